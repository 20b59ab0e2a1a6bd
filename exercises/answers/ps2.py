"""Answers to problem set 2: `problem__fault` must lose points, `problem__right_...` must get them all."""

import torch

from gpt2_to_k3.ops import merge_softmax


def merge_parts__plain_mean(o, lse):
    empty = (lse == -torch.inf)[..., None]
    return o.masked_fill(empty, 0.0).sum(0) / (~empty).sum(0).clamp(min=1), lse.logsumexp(0)


def merge_parts__sums_without_logarithms(o, lse):
    """The failure of chapter 3: exponentials of the scores themselves."""
    weights = lse.exp()
    total = weights.sum(0)
    o = (weights[..., None] * o.masked_fill(weights[..., None] == 0, 0.0)).sum(0)
    return o / total.masked_fill(total == 0, 1.0)[..., None], total.log()


def merge_parts__starts_at_zero(o, lse):
    m = lse.amax(0).clamp(min=0.0)
    weights = (lse - m).exp()
    total = weights.sum(0)
    o = (weights[..., None] * o.masked_fill((lse == -torch.inf)[..., None], 0.0)).sum(0)
    return o / total.masked_fill(total == 0, 1.0)[..., None], m + total.log()


def merge_parts__one_maximum_for_all(o, lse):
    m = lse.max()
    m = m.masked_fill(m == -torch.inf, 0.0)
    weights = (lse - m).exp()
    total = weights.sum(0)
    o = (weights[..., None] * o.masked_fill((lse == -torch.inf)[..., None], 0.0)).sum(0)
    return o / total.masked_fill(total == 0, 1.0)[..., None], m + total.log()


def merge_parts__nan_where_all_is_empty(o, lse):
    """attention of a row without any key: softmax of an all -inf row is NaN."""
    o = o.masked_fill((lse == -torch.inf)[..., None], 0.0)
    return (lse.softmax(0)[..., None] * o).sum(0), lse.logsumexp(0)


def merge_parts__zero_times_nan(o, lse):
    """fla #967, #902 in kind: what was never written leaks into the result."""
    weights = lse.softmax(0).nan_to_num(0.0)
    return (weights[..., None] * o).sum(0), lse.logsumexp(0)


def merge_parts__keeps_the_larger_lse(o, lse):
    o, out = o.masked_fill((lse == -torch.inf)[..., None], 0.0), (None, None)
    for i in range(len(o)):
        if i == 0:
            out = o[0], lse[0]
        else:
            merged = merge_softmax(*out, o[i], lse[i])[0]
            out = merged, torch.maximum(out[1], lse[i])
    return out


def merge_parts__largest_score_as_lse(o, lse):
    weights = lse.softmax(0).nan_to_num(0.0)
    o = o.masked_fill((lse == -torch.inf)[..., None], 0.0)
    return (weights[..., None] * o).sum(0), lse.amax(0)


def merge_parts__sum_not_divided(o, lse):
    m = lse.amax(0).clamp(min=-1e30)
    weights = (lse - m).exp()
    o = (weights[..., None] * o.masked_fill((lse == -torch.inf)[..., None], 0.0)).sum(0)
    return o, m + weights.sum(0).log()


def merge_parts__lowest_number_for_empty(o, lse):
    """All empty: a uniform mean of nothing with an lse that is finite."""
    lse = lse.clamp(min=-1e30)
    return (lse.softmax(0)[..., None] * o.nan_to_num(0.0)).sum(0), lse.logsumexp(0)


def merge_parts__nan_mended_in_place(o, lse):
    empty = lse == -torch.inf
    o[empty] = 0.0
    return (lse.softmax(0).nan_to_num(0.0)[..., None] * o).sum(0), lse.logsumexp(0)


def merge_parts__only_a_whole_empty_part_left_out(o, lse):
    used = [i for i in range(len(lse)) if (lse[i] > -torch.inf).any()]
    return merge_parts__nan_where_all_is_empty(o[used], lse[used])


def merge_parts__in_single_precision(o, lse):
    out = merge_parts__right_weights(o.float(), lse.float())
    return tuple(x.to(o.dtype) for x in out)


def merge_parts__right_weights(o, lse):
    total = lse.logsumexp(0)
    finite = total.masked_fill(total == -torch.inf, 0.0)
    weights = (lse - finite).exp()[..., None]
    return (weights * torch.where(weights > 0, o, 0.0)).sum(0), total


def merge_parts__right_part_after_part(o, lse):
    mean, total = torch.zeros_like(o[0]), torch.full_like(lse[0], -torch.inf)
    for o_p, lse_p in zip(o, lse, strict=True):
        new = torch.logaddexp(total, lse_p)
        there = new > -torch.inf
        old, add = ((x - new).where(there, -torch.inf).exp()[..., None] for x in (total, lse_p))
        mean = old * mean + (add * o_p).where(add > 0, 0.0)
        total = new
    return mean, total


def merge_parts__right_halves(o, lse):
    if len(o) == 1:
        return o[0].masked_fill((lse[0] == -torch.inf)[..., None], 0.0), lse[0].clone()
    cut = len(o) // 2
    left, right = (
        merge_parts__right_halves(o[part], lse[part]) for part in (slice(cut), slice(cut, None))
    )
    return merge_softmax(*left, *right)


def stream(
    q,
    k,
    v,
    block,
    *,
    first=0,
    end=None,
    m0=-torch.inf,
    mask="causal",
    rescale=True,
    scale=None,
    low=-torch.inf,
):
    """The pass over blocks of keys, with one thing in it to be made wrong."""
    (B, n, H, K), T = q.shape, k.shape[1]
    q = q.transpose(1, 2) * (K**-0.5 if scale is None else scale)
    position = torch.arange(T - n, T)[:, None]
    if mask == "from the first key":
        position = position - (T - n)
    if mask == "own key hidden":
        position = position - 1
    m, total = q.new_full((B, H, n, 1), m0), q.new_zeros(B, H, n, 1)
    o = q.new_zeros(B, H, n, v.shape[-1])
    for j in range(first, T if end is None else end, block):
        k_j, v_j = (x[:, j : j + block].transpose(1, 2) for x in (k, v))
        at = torch.arange(k_j.shape[2]) + (0 if mask == "inside the block" else j)
        scores = q @ k_j.mT
        if mask is not None:
            scores = scores.masked_fill(at > position, low)
        m_new = torch.maximum(m, scores.amax(-1, keepdim=True))
        shrink, weights = (m - m_new).exp(), (scores - m_new).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        o = (o * shrink if rescale else o) + weights @ v_j
        m = m_new
    return (o / total).transpose(1, 2)


def stream_attention__no_mask(q, k, v, block):
    return stream(q, k, v, block, mask=None)


def stream_attention__mask_from_the_first_key(q, k, v, block):
    """meta-llama/llama #899, LLMs-from-scratch #697: right for a prompt, wrong after a past."""
    return stream(q, k, v, block, mask="from the first key")


def stream_attention__mask_inside_the_block(q, k, v, block):
    return stream(q, k, v, block, mask="inside the block")


def stream_attention__mask_is_a_number(q, k, v, block):
    return stream(q, k, v, block, low=-1e4)


def stream_attention__own_key_hidden(q, k, v, block):
    return stream(q, k, v, block, mask="own key hidden")


def stream_attention__last_block_dropped(q, k, v, block):
    return stream(q, k, v, block, end=k.shape[1] // block * block)


def stream_attention__output_not_rescaled(q, k, v, block):
    return stream(q, k, v, block, rescale=False)


def stream_attention__maximum_starts_at_zero(q, k, v, block):
    return stream(q, k, v, block, m0=0.0)


def stream_attention__scale_of_the_values(q, k, v, block):
    return stream(q, k, v, block, scale=v.shape[-1] ** -0.5)


def stream_attention__no_scale(q, k, v, block):
    return stream(q, k, v, block, scale=1.0)


def stream_attention__heads_and_positions_swapped(q, k, v, block):
    """transformers #40963: axes swapped, unnoticed where they are equal."""
    return stream(*(x.transpose(1, 2) for x in (q, k, v)), block).transpose(1, 2)


def stream_attention__query_scaled_in_place(q, k, v, block):
    q *= q.shape[-1] ** -0.5
    return stream(q, k, v, block, scale=1.0)


def stream_attention__stops_at_the_first_query(q, k, v, block):
    """Leaves out blocks that the first query may not see, though later ones may."""
    n, T = q.shape[1], k.shape[1]
    return stream(q, k, v, block, end=T - n + 1)


def stream_attention__whole_matrix(q, k, v, block):
    n, T = q.shape[1], k.shape[1]
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(n, T).triu(T - n + 1).bool(), -torch.inf)
    return torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), v)


def stream_attention__whole_mask(q, k, v, block):
    n, T = q.shape[1], k.shape[1]
    bias = q.new_full((n, T), -torch.inf).triu(T - n + 1)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = torch.zeros_like(q[..., :1] * v[..., :1, :]), q.new_full(q.shape[:3], -torch.inf)
    for j in range(0, T, block):
        scores = q @ k[:, :, j : j + block].mT * q.shape[-1] ** -0.5 + bias[:, j : j + block]
        part = scores.softmax(-1).nan_to_num(0.0) @ v[:, :, j : j + block]
        o, lse = merge_softmax(o, lse, part, scores.logsumexp(-1))
    return o.transpose(1, 2)


def stream_attention__two_passes(q, k, v, block):
    n, T = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    position = torch.arange(T - n, T)[:, None]

    def scores(j):
        s = q @ k[:, :, j : j + block].mT
        return s.masked_fill(torch.arange(j, j + s.shape[-1]) > position, -torch.inf)

    m = torch.stack([scores(j).amax(-1) for j in range(0, T, block)]).amax(0)[..., None]
    weights = [((scores(j) - m).exp(), v[:, :, j : j + block]) for j in range(0, T, block)]
    o, total = sum(w @ x for w, x in weights), sum(w.sum(-1, keepdim=True) for w, _ in weights)
    return (o / total).transpose(1, 2)


def stream_attention__mean_of_the_blocks(q, k, v, block):
    n, T = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    position, o, seen = torch.arange(T - n, T)[:, None], 0, 0
    for j in range(0, T, block):
        s = q @ k[:, :, j : j + block].mT
        s = s.masked_fill(torch.arange(j, j + s.shape[-1]) > position, -torch.inf)
        o = o + s.softmax(-1).nan_to_num(0.0) @ v[:, :, j : j + block]
        seen = seen + (position >= j)
    return (o / seen).transpose(1, 2)


def stream_attention__no_maximum(q, k, v, block):
    n, T = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
    position, o, total = torch.arange(T - n, T)[:, None], 0, 0
    for j in range(0, T, block):
        weights = (q @ k[:, :, j : j + block].mT).exp()
        weights = weights.masked_fill(torch.arange(j, j + weights.shape[-1]) > position, 0.0)
        o, total = o + weights @ v[:, :, j : j + block], total + weights.sum(-1, keepdim=True)
    return (o / total).transpose(1, 2)


def stream_attention__right_merge_from_the_last_block(q, k, v, block):
    n, T = q.shape[1], k.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o, lse = q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_full(q.shape[:3], -torch.inf)
    for j in reversed(range(0, T, block)):
        s = q @ k[:, :, j : j + block].mT * q.shape[-1] ** -0.5
        s = s.masked_fill(torch.ones_like(s).triu(T - n - j + 1) > 0, -torch.inf)
        part = s.softmax(-1).nan_to_num(0.0) @ v[:, :, j : j + block]
        o, lse = merge_softmax(o, lse, part, s.logsumexp(-1))
    return o.transpose(1, 2)


def stream_attention__right_products_without_matmul(q, k, v, block):
    n, K, T = q.shape[1], q.shape[3], k.shape[1]
    state = None
    for k_j, v_j, j in zip(k.split(block, 1), v.split(block, 1), range(0, T, block), strict=True):
        s = torch.einsum("bihk,bjhk->bihj", q, k_j) / K**0.5
        late = torch.arange(j, j + k_j.shape[1]) > torch.arange(T - n, T)[:, None, None]
        s = s.where(~late, -torch.inf)
        m = (
            s.amax(-1, keepdim=True)
            if state is None
            else torch.maximum(state[0], s.amax(-1, keepdim=True))
        )
        w = (s - m).exp()
        # the sum is one more value channel, which is 1 for every key
        x = torch.einsum("bihj,bjhv->bihv", w, torch.cat([v_j, torch.ones_like(v_j[..., :1])], -1))
        state = (m, x if state is None else x + state[1] * (state[0] - m).exp())
    return state[1][..., :-1] / state[1][..., -1:]


def read_blocks(
    scores,
    values,
    block,
    *,
    m0=-torch.inf,
    rescale=True,
    guard=True,
    add_m=True,
    zero=True,
    end=None,
):
    """The pass over given scores, with each of its cares to be left out."""
    (R, T), V = scores.shape, values.shape[1]
    m, total, o = scores.new_full((R, 1), m0), scores.new_zeros(R, 1), scores.new_zeros(R, V)
    for j in range(0, T if end is None else end, block):
        s, v = scores[:, j : j + block], values[j : j + block]
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        out = m_new.masked_fill(m_new == -torch.inf, 0.0) if guard else m_new
        shrink, weights = (m - out).exp(), (s - out).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        o = (o * shrink if rescale else o) + weights @ v
        m = m_new
    o = o / (total.masked_fill(total == 0, 1.0) if zero else total)
    return o, ((m + total.log()) if add_m else total.log()).squeeze(-1)


def read_stream__the_given_one(scores, values, block):
    return read_blocks(scores, values, block, m0=0.0, rescale=False, add_m=False, zero=False)


def read_stream__only_the_output_mended(scores, values, block):
    return read_blocks(scores, values, block, m0=0.0, add_m=False)


def read_stream__only_the_lse_mended(scores, values, block):
    return read_blocks(scores, values, block, m0=0.0, rescale=False)


def read_stream__maximum_still_starts_at_zero(scores, values, block):
    return read_blocks(scores, values, block, m0=0.0)


def read_stream__output_still_not_rescaled(scores, values, block):
    return read_blocks(scores, values, block, rescale=False)


def read_stream__lse_still_without_the_maximum(scores, values, block):
    return read_blocks(scores, values, block, add_m=False)


def read_stream__first_keys_hidden_give_nan(scores, values, block):
    """The fault that comes out when the maximum starts at -inf: -inf - (-inf)."""
    return read_blocks(scores, values, block, guard=False)


def read_stream__row_without_keys_is_nan(scores, values, block):
    """The softmax of an all -inf row, 0 / 0."""
    return read_blocks(scores, values, block, zero=False)


def read_stream__maximum_starts_low(scores, values, block):
    return read_blocks(scores, values, block, m0=-1000.0)


def read_stream__last_block_dropped(scores, values, block):
    return read_blocks(scores, values, block, end=scores.shape[1] // block * block)


def read_stream__nan_to_zero_at_the_end(scores, values, block):
    """Hides the NaN of a row whose first keys are hidden, and with it the row."""
    o, lse = read_blocks(scores, values, block, guard=False)
    return o.nan_to_num(0.0), torch.where(lse.isnan(), -torch.inf, lse)


def read_stream__hidden_scores_lowered_in_place(scores, values, block):
    hidden = scores == -torch.inf
    scores[hidden] = -1e30
    o, lse = read_blocks(scores, values, block)
    empty = hidden.all(-1)
    return o.masked_fill(empty[:, None], 0.0), lse.masked_fill(empty, -torch.inf)


def read_stream__right_lowest_number(scores, values, block):
    low = torch.finfo(scores.dtype).min / 4
    m, total = scores.new_full((len(scores), 1), low), scores.new_zeros(len(scores), 1)
    o = scores.new_zeros(len(scores), values.shape[1])
    for s, v in zip(scores.split(block, 1), values.split(block), strict=True):
        old, m = m, m.maximum(s.amax(-1, keepdim=True))
        weights = (s - m).exp()
        total, o = (
            (old - m).exp() * x + y
            for x, y in ((total, weights.sum(-1, keepdim=True)), (o, weights @ v))
        )
    return o / total.clamp(min=0.5), (m + total.log()).squeeze(-1)


def read_stream__right_merge(scores, values, block):
    o, lse = (
        scores.new_zeros(len(scores), values.shape[1]),
        scores.new_full((len(scores),), -torch.inf),
    )
    for s, v in zip(scores.split(block, 1), values.split(block), strict=True):
        part = s.logsumexp(-1)
        both = torch.logaddexp(lse, part)
        share = both.masked_fill(both == -torch.inf, 0.0)
        o = (lse - share).exp()[:, None] * o + (s - share[:, None]).exp() @ v
        lse = both
    return o, lse


def read_stream__right_row_by_row(scores, values, block):
    os, lses = [], []
    for row in scores:
        m, total, o = -torch.inf, 0.0, torch.zeros_like(values[0])
        for s, v in zip(row.split(block), values.split(block), strict=True):
            if (top := max(m, s.max().item())) == -torch.inf:
                continue
            w = (s - top).exp()
            shrink = torch.tensor(m - top).exp().item()
            total, o, m = total * shrink + w.sum(), o * shrink + w @ v, top
        os.append(o / total if m > -torch.inf else o)
        lses.append(m + torch.as_tensor(total).log() if m > -torch.inf else o.new_tensor(m))
    return torch.stack(os), torch.stack(lses).to(scores.dtype)


def read_one_tile(q, k, v, hidden=None):
    scores = q @ k.T * q.shape[1] ** -0.5
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).exp() @ v, lse


def tile_loop(
    memory,
    block_q,
    block_k,
    causal,
    *,
    visible=None,
    again=False,
    mask=True,
    part=False,
    shift=True,
):
    Tq, (Tk, V) = memory.shape("q")[0], memory.shape("v")
    for i in range(0, Tq, block_q):
        q = memory.read("q", i, i + block_q)
        position = torch.arange(i, i + len(q)) + (Tk - Tq if shift else 0)
        o, lse = q.new_zeros(len(q), V), q.new_full((len(q),), -torch.inf)
        end = visible(position.tolist(), Tk) if visible and causal else Tk
        for j in range(0, end, block_k):
            stop = min(j + block_k, end) if part else j + block_k
            k, v = memory.read("k", j, stop), memory.read("v", j, stop)
            if again:
                q = memory.read("q", i, i + block_q)
            hidden = torch.arange(j, j + len(k)) > position[:, None]
            o, lse = merge_softmax(
                o, lse, *read_one_tile(q, k, v, hidden if causal and mask else None)
            )
        memory.write("o", o, i)


def last_seen(position, Tk):
    return position[-1] + 1


def tiled__reads_what_is_hidden(memory, block_q, block_k, causal):
    tile_loop(memory, block_q, block_k, causal)


def tiled__queries_read_for_each_tile(memory, block_q, block_k, causal):
    tile_loop(memory, block_q, block_k, causal, visible=last_seen, again=True)


def tiled__no_mask_inside_a_tile(memory, block_q, block_k, causal):
    tile_loop(memory, block_q, block_k, causal, visible=last_seen, mask=False)


def tiled__blocks_cut_at_the_diagonal(memory, block_q, block_k, causal):
    tile_loop(memory, block_q, block_k, causal, visible=last_seen, part=True)


def tiled__only_what_the_first_query_sees(memory, block_q, block_k, causal):
    tile_loop(memory, block_q, block_k, causal, visible=lambda position, Tk: position[0] + 1)


def tiled__one_key_short(memory, block_q, block_k, causal):
    tile_loop(memory, block_q, block_k, causal, visible=lambda position, Tk: position[-1])


def tiled__mask_from_the_first_key(memory, block_q, block_k, causal):
    tile_loop(memory, block_q, block_k, causal, visible=last_seen, shift=False)


def tiled__block_sizes_swapped(memory, block_q, block_k, causal):
    tile_loop(memory, block_k, block_q, causal, visible=last_seen)


def tiled__all_keys_read_at_once(memory, block_q, block_k, causal):
    """Right output and fewer bytes, by a chip that holds everything."""
    Tq, Tk = memory.shape("q")[0], memory.shape("k")[0]
    k, v = memory.read("k"), memory.read("v")
    for i in range(0, Tq, block_q):
        q = memory.read("q", i, i + block_q)
        hidden = torch.arange(Tk) > torch.arange(i, i + len(q))[:, None] + Tk - Tq
        memory.write("o", read_one_tile(q, k, v, hidden if causal else None)[0], i)


def tiled__scores_in_memory(memory, block_q, block_k, causal):
    Tq, Tk = memory.shape("q")[0], memory.shape("k")[0]
    scores = memory.read("q") @ memory.read("k").T * memory.shape("q")[1] ** -0.5
    hidden = torch.arange(Tk) > torch.arange(Tk - Tq, Tk)[:, None]
    memory.write("scores", scores.masked_fill(hidden & causal, -torch.inf))
    memory.write("o", memory.read("scores").softmax(-1) @ memory.read("v"))


def tiled__output_and_lse_go_out_with_each_tile(memory, block_q, block_k, causal):
    """The paper's first loop, keys outside: reads and writes o again instead of keys and values."""
    Tq, Tk = memory.shape("q")[0], memory.shape("k")[0]
    for j in range(0, Tk, block_k):
        k, v = memory.read("k", j, j + block_k), memory.read("v", j, j + block_k)
        for i in range(0, Tq, block_q):
            q = memory.read("q", i, i + block_q)
            hidden = torch.arange(j, j + len(k)) > torch.arange(i, i + len(q))[:, None] + Tk - Tq
            o, lse = read_one_tile(q, k, v, hidden if causal else None)
            if j:
                old = memory.read("o", i, i + block_q), memory.read("lse", i, i + block_q)[:, 0]
                o, lse = merge_softmax(*old, o, lse)
            else:
                memory.tensors.setdefault("lse", q.new_zeros(Tq, 1))
            memory.write("o", o, i)
            memory.write("lse", lse[:, None], i)


def tiled__right_other_order_of_keys(memory, block_q, block_k, causal):
    Tq, Tk = memory.shape("q")[0], memory.shape("k")[0]
    for i in range(0, Tq, block_q):
        q = memory.read("q", i, i + block_q)
        past = Tk - Tq + i
        m, total, o = -torch.inf, 0.0, 0.0
        starts = [j for j in range(0, Tk, block_k) if not causal or j <= past + len(q) - 1]
        for j in reversed(starts):
            s = q @ memory.read("k", j, j + block_k).T / q.shape[1] ** 0.5
            v = memory.read("v", j, j + block_k)
            if causal:
                s = s.masked_fill(torch.ones_like(s).triu(past - j + 1).bool(), -1e300)
            top = s.amax(-1, keepdim=True).clamp(min=m)
            w = (s - top).exp()
            shrink = (m - top).exp()
            m, total, o = top, total * shrink + w.sum(-1, keepdim=True), o * shrink + w @ v
        memory.write("o", o / total, i)


def tiled__right_break(memory, block_q, block_k, causal):
    Tq, Tk = memory.shape("q")[0], memory.shape("k")[0]
    i = 0
    while i < Tq:
        q, read, j = memory.read("q", i, i + block_q), None, 0
        position = torch.arange(Tk - Tq + i, Tk - Tq + i + len(q)).unsqueeze(1)
        while j < Tk and not (causal and j > position.max()):
            k, v = (memory.read(name, j, j + block_k) for name in "kv")
            tile = read_one_tile(q, k, v, causal & (torch.arange(j, j + len(k)) > position))
            read = tile if read is None else merge_softmax(*read, *tile)
            j += block_k
        memory.write("o", read[0], start=i)
        i += block_q

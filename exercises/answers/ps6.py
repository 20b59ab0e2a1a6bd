"""Answers to problem set 6: `problem__fault` must lose points, `problem__right_...` must get them all."""

import torch
import torch.nn.functional as F


def read_latents(q, rows, length, W_K, W_V, *, scale=None):
    """The absorbed form with a scale of the caller's."""
    r, n = W_K.shape[1:]
    rows = rows[:, :length]
    absorbed = torch.cat([torch.einsum("bhn,hrn->bhr", q[..., :n], W_K), q[..., n:]], -1)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (torch.einsum("bhc,btc->bht", absorbed, rows) * scale).softmax(-1)
    mean = torch.einsum("bht,btr->bhr", weights, rows[..., :r])
    return torch.einsum("bhr,hrv->bhv", mean, W_V)


def mla_decode__scale_of_the_kept_row(q, rows, length, W_K, W_V):
    """What softmax_attention does by default with the absorbed query."""
    return read_latents(q, rows, length, W_K, W_V, scale=rows.shape[-1] ** -0.5)


def mla_decode__scale_without_the_shared_part(q, rows, length, W_K, W_V):
    return read_latents(q, rows, length, W_K, W_V, scale=W_K.shape[-1] ** -0.5)


def mla_decode__scaled_twice(q, rows, length, W_K, W_V):
    """The query has been divided by the root already, and the scores are again."""
    return read_latents(q, rows, length, W_K, W_V, scale=1 / q.shape[-1])


def mla_decode__expands_keys_and_values(q, rows, length, W_K, W_V):
    r = W_K.shape[1]
    c, shared = rows[:, :length, :r], rows[:, :length, r:]
    k, v = (torch.einsum("btr,hrm->bhtm", c, W) for W in (W_K, W_V))
    k = torch.cat([k, shared[:, None].expand(-1, k.shape[1], -1, -1)], -1)
    weights = (torch.einsum("bhk,bhtk->bht", q, k) * q.shape[-1] ** -0.5).softmax(-1)
    return torch.einsum("bht,bhtv->bhv", weights, v)


def mla_decode__expands_values(q, rows, length, W_K, W_V):
    """Half absorbed: the query, but not the output."""
    r, n = W_K.shape[1:]
    rows = rows[:, :length]
    absorbed = torch.cat([torch.einsum("bhn,hrn->bhr", q[..., :n], W_K), q[..., n:]], -1)
    scores = torch.einsum("bhc,btc->bht", absorbed, rows) * q.shape[-1] ** -0.5
    v = torch.einsum("btr,hrv->bhtv", rows[..., :r], W_V)
    return torch.einsum("bht,bhtv->bhv", scores.softmax(-1), v)


def mla_decode__rope_and_nope_swapped(q, rows, length, W_K, W_V):
    """MHA2MLA #8 in kind: the shared channels are taken for the query's first."""
    R = q.shape[-1] - W_K.shape[-1]
    q = torch.cat([q[..., R:], q[..., :R]], -1)
    return read_latents(q, rows, length, W_K, W_V)


def mla_decode__shared_part_left_out(q, rows, length, W_K, W_V):
    r, n = W_K.shape[1:]
    scale = q.shape[-1] ** -0.5
    return read_latents(q[..., :n], rows[..., :r], length, W_K, W_V, scale=scale)


def mla_decode__row_split_from_the_wrong_end(q, rows, length, W_K, W_V):
    R = q.shape[-1] - W_K.shape[-1]
    rows = torch.cat([rows[..., R:], rows[..., :R]], -1)
    return read_latents(q, rows, length, W_K, W_V)


def mla_decode__reads_the_whole_buffer(q, rows, length, W_K, W_V):
    return read_latents(q, rows.nan_to_num(), rows.shape[1], W_K, W_V)


def mla_decode__masks_scores_but_sums_all_rows(q, rows, length, W_K, W_V):
    """A weight of 0 times NaN is NaN."""
    r, n = W_K.shape[1:]
    absorbed = torch.cat([torch.einsum("bhn,hrn->bhr", q[..., :n], W_K), q[..., n:]], -1)
    scores = torch.einsum("bhc,btc->bht", absorbed, rows) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.arange(rows.shape[1]) >= length, float("-inf"))
    mean = torch.einsum("bht,btr->bhr", scores.softmax(-1), rows[..., :r])
    return torch.einsum("bhr,hrv->bhv", mean, W_V)


def mla_decode__own_row_left_out(q, rows, length, W_K, W_V):
    return read_latents(q, rows, max(1, length - 1), W_K, W_V)


def mla_decode__cleans_the_buffer_in_place(q, rows, length, W_K, W_V):
    rows[:, length:] = 0
    return read_latents(q, rows, length, W_K, W_V)


def mla_decode__exp_without_a_maximum(q, rows, length, W_K, W_V):
    r, n = W_K.shape[1:]
    rows = rows[:, :length]
    absorbed = torch.cat([torch.einsum("bhn,hrn->bhr", q[..., :n], W_K), q[..., n:]], -1)
    weights = (torch.einsum("bhc,btc->bht", absorbed, rows) * q.shape[-1] ** -0.5).exp()
    mean = torch.einsum("bht,btr->bhr", weights / weights.sum(-1, keepdim=True), rows[..., :r])
    return torch.einsum("bhr,hrv->bhv", mean, W_V)


def mla_decode__first_head_for_all(q, rows, length, W_K, W_V):
    return read_latents(q, rows, length, W_K[:1].expand_as(W_K), W_V[:1].expand_as(W_V))


def mla_decode__right_many_queries_of_one_head(q, rows, length, W_K, W_V):
    r, n = W_K.shape[1:]
    k = rows[:, None, :length]
    moved = (q[:, :, None, :n] @ W_K.transpose(1, 2)).transpose(1, 2)
    absorbed = torch.cat([moved, q[:, None, :, n:]], -1)
    mean = F.scaled_dot_product_attention(absorbed, k, k[..., :r], scale=q.shape[-1] ** -0.5)
    return (mean.transpose(1, 2) @ W_V)[:, :, 0]


def mla_decode__right_head_by_head(q, rows, length, W_K, W_V):
    r, n = W_K.shape[1:]
    c, shared = rows[:, :length, :r], rows[:, :length, r:]
    outputs = []
    for h in range(q.shape[1]):
        a, b = q[:, h, :n] @ W_K[h].T, q[:, h, n:]
        scores = (c * a[:, None]).sum(-1) + (shared * b[:, None]).sum(-1)
        scores = scores / (n + b.shape[-1]) ** 0.5
        weights = (scores - scores.amax(1, keepdim=True)).exp()
        weights = weights / weights.sum(1, keepdim=True)
        outputs.append((weights[:, :, None] * c).sum(1) @ W_V[h])
    return torch.stack(outputs, 1)


def mixed(w, sources, eps):
    v = torch.stack(sources)
    scores = (v @ w) * (v.square().mean(-1) + eps).rsqrt()
    return (scores.softmax(0)[..., None] * v).sum(0)


def run_stack(x, sublayers, w, S, eps, *, mix=mixed):
    """The block form with a mixing of the caller's."""
    sources = [x]
    for i, f in enumerate(sublayers):
        y = f(mix(w[i], sources, eps))
        if i % S == 0:
            sources.append(y)
        else:
            sources[-1] = sources[-1] + y
    return mix(w[len(sublayers)], sources, eps)


def attnres__normed_sources_mixed(x, sublayers, w, S, eps):
    """The norm is for the scores alone."""

    def mix(w, sources, eps):
        v = torch.stack(sources)
        v = v * (v.square().mean(-1, keepdim=True) + eps).rsqrt()
        return ((v @ w).softmax(0)[..., None] * v).sum(0)

    return run_stack(x, sublayers, w, S, eps, mix=mix)


def attnres__keys_not_normed(x, sublayers, w, S, eps):
    def mix(w, sources, eps):
        v = torch.stack(sources)
        return ((v @ w).softmax(0)[..., None] * v).sum(0)

    return run_stack(x, sublayers, w, S, eps, mix=mix)


def attnres__softmax_over_the_tokens(x, sublayers, w, S, eps):
    def mix(w, sources, eps):
        v = torch.stack(sources)
        scores = (v @ w) * (v.square().mean(-1) + eps).rsqrt()
        return (scores.softmax(-1)[..., None] * v).sum(0)

    return run_stack(x, sublayers, w, S, eps, mix=mix)


def attnres__scaled_by_the_width(x, sublayers, w, S, eps):
    return run_stack(x, sublayers, w / x.shape[-1] ** 0.5, S, eps)


def attnres__eps_on_the_sum(x, sublayers, w, S, eps):
    """mlx-lm #1624 the other way: D times too small."""
    return run_stack(x, sublayers, w, S, eps / x.shape[-1])


def attnres__eps_outside_the_root(x, sublayers, w, S, eps):
    def mix(w, sources, eps):
        v = torch.stack(sources)
        scores = (v @ w) / (v.square().mean(-1).sqrt() + eps)
        return (scores.softmax(0)[..., None] * v).sum(0)

    return run_stack(x, sublayers, w, S, eps, mix=mix)


def attnres__exp_without_a_maximum(x, sublayers, w, S, eps):
    def mix(w, sources, eps):
        v = torch.stack(sources)
        alpha = ((v @ w) * (v.square().mean(-1) + eps).rsqrt()).exp()
        return (alpha[..., None] * v).sum(0) / alpha.sum(0)[..., None]

    return run_stack(x, sublayers, w, S, eps, mix=mix)


def attnres__sum_in_place_of_a_mean(x, sublayers, w, S, eps):
    return run_stack(x, sublayers, w, S, eps, mix=lambda w, v, eps: len(v) * mixed(w, v, eps))


def attnres__empty_block_is_a_source(x, sublayers, w, S, eps):
    """A block's first sublayer also reads a sum of nothing, which takes a share of the weights."""
    blocks, p = [x], torch.zeros_like(x)
    for i, f in enumerate(sublayers):
        p = p + f(mixed(w[i], [*blocks, p], eps))
        if (i + 1) % S == 0:
            blocks, p = [*blocks, p], torch.zeros_like(x)
    return mixed(w[len(sublayers)], blocks if len(sublayers) % S == 0 else [*blocks, p], eps)


def attnres__last_block_forgotten(x, sublayers, w, S, eps):
    blocks, p = [x], None
    for i, f in enumerate(sublayers):
        y = f(mixed(w[i], blocks if p is None else [*blocks, p], eps))
        p = y if p is None else p + y
        if (i + 1) % S == 0:
            blocks, p = [*blocks, p], None
    return mixed(w[len(sublayers)], blocks, eps)


def attnres__mixes_at_block_borders_only(x, sublayers, w, S, eps):
    """A claim of the digests: what is between the borders adds to a plain stream."""
    sources, h = [x], x
    for i, f in enumerate(sublayers):
        if i % S == 0:
            h = mixed(w[i], sources, eps)
            sources.append(torch.zeros_like(x))
        y = f(h)
        h, sources[-1] = h + y, sources[-1] + y
    return mixed(w[len(sublayers)], sources, eps)


def attnres__block_is_a_running_sum(x, sublayers, w, S, eps):
    sources, stream = [x], x
    for i, f in enumerate(sublayers):
        stream = stream + f(mixed(w[i], sources, eps))
        if i % S == 0:
            sources.append(stream)
        else:
            sources[-1] = stream
    return mixed(w[len(sublayers)], sources, eps)


def attnres__block_size_ignored(x, sublayers, w, S, eps):
    return run_stack(x, sublayers, w, 1, eps)


def attnres__output_with_the_last_sublayers_query(x, sublayers, w, S, eps):
    return run_stack(x, sublayers, torch.cat([w[:-1], w[-2:-1]]), S, eps)


def attnres__adds_in_place(x, sublayers, w, S, eps):
    """The sum is written into the tensor that a sublayer returned."""
    sources = [x]
    for i, f in enumerate(sublayers):
        y = f(mixed(w[i], sources, eps))
        if i % S == 0:
            sources.append(y)
        else:
            sources[-1] += y
    return mixed(w[len(sublayers)], sources, eps)


def attnres__sublayers_run_again(x, sublayers, w, S, eps):
    """Outputs are not kept but computed anew for each reader."""

    def sources(i):
        found = [x]
        for j in range(i):
            y = sublayers[j](mixed(w[j], sources(j), eps))
            found = [*found, y] if j % S == 0 else [*found[:-1], found[-1] + y]
        return found

    return mixed(w[len(sublayers)], sources(len(sublayers)), eps)


def attnres__right_two_phases(x, sublayers, w, S, eps):
    """Chapter 11's (11.3): the finished blocks by all queries of a block, then the open sum."""

    def score(w, v):
        return (v @ w) * (v.square().mean(-1) + eps).rsqrt()

    def read(w, v):
        s = torch.stack([score(w, u) for u in v])
        return torch.einsum("nbt,nbtd->btd", s.softmax(0), torch.stack(v)), s.logsumexp(0)

    blocks = [x]
    for start in range(0, len(sublayers), S):
        block = range(start, min(start + S, len(sublayers)))
        readings, p = [read(w[i], blocks) for i in block], None
        for i, (o, lse) in zip(block, readings, strict=True):
            if p is not None:
                share = (score(w[i], p) - lse).sigmoid()[..., None]
                o = (1 - share) * o + share * p
            y = sublayers[i](o)
            p = y if p is None else p + y
        blocks.append(p)
    return read(w[len(sublayers)], blocks)[0]


def attnres__right_from_all_outputs(x, sublayers, w, S, eps):
    """All outputs are kept, and the blocks' sums made anew for each reader."""
    outputs, D = [], x.shape[-1]
    for i in range(len(sublayers) + 1):
        v = torch.stack([x, *(sum(outputs[a : a + S]) for a in range(0, len(outputs), S))], -2)
        keys = v / (v.pow(2).sum(-1, keepdim=True) / D + eps).sqrt()
        scores = torch.einsum("btnd,d->btn", keys, w[i])
        h = torch.einsum("btn,btnd->btd", F.softmax(scores, dim=-1), v)
        if i == len(sublayers):
            return h
        outputs.append(sublayers[i](h))


def placed(logits, chosen, p):
    return torch.zeros_like(logits).scatter(-1, chosen, p)


def router__weights_from_biased_scores(logits, bias, k):
    p, chosen = (logits.sigmoid() + bias).topk(k, dim=-1)
    return placed(logits, chosen, p / p.sum(-1, keepdim=True))


def router__no_bias(logits, bias, k):
    p, chosen = logits.sigmoid().topk(k, dim=-1)
    return placed(logits, chosen, p / p.sum(-1, keepdim=True))


def router__bias_on_the_logits(logits, bias, k):
    chosen = (logits + bias).topk(k, dim=-1).indices
    p = logits.sigmoid().gather(-1, chosen)
    return placed(logits, chosen, p / p.sum(-1, keepdim=True))


def router__divided_by_all_scores(logits, bias, k):
    s = logits.sigmoid()
    chosen = (s + bias).topk(k, dim=-1).indices
    return placed(logits, chosen, s.gather(-1, chosen) / s.sum(-1, keepdim=True))


def router__not_normalised(logits, bias, k):
    s = logits.sigmoid()
    chosen = (s + bias).topk(k, dim=-1).indices
    return placed(logits, chosen, s.gather(-1, chosen))


def router__softmax_of_the_chosen(logits, bias, k):
    chosen = (logits.sigmoid() + bias).topk(k, dim=-1).indices
    return placed(logits, chosen, logits.gather(-1, chosen).softmax(-1))


def router__softmax_scores(logits, bias, k):
    s = logits.softmax(-1)
    chosen = (s + bias).topk(k, dim=-1).indices
    p = s.gather(-1, chosen)
    return placed(logits, chosen, p / p.sum(-1, keepdim=True))


def router__without_a_gradient(logits, bias, k):
    """Mini-K3 book, chapter 14: the router never learns."""
    with torch.no_grad():
        return router__right_threshold(logits, bias, k) + 0 * logits


def router__not_those_with_a_negative_sum(logits, bias, k):
    s = logits.sigmoid()
    chosen = (s + bias).topk(k, dim=-1)
    p = s.gather(-1, chosen.indices) * (chosen.values > 0)
    return placed(logits, chosen.indices, p / p.sum(-1, keepdim=True))


def router__right_threshold(logits, bias, k):
    s = torch.sigmoid(logits)
    least = (s + bias).topk(k, dim=-1).values[..., -1:]
    p = torch.where(s + bias >= least, s, 0)
    return p / p.sum(dim=-1, keepdim=True)


def router__right_sorted(logits, bias, k):
    s = 1 / (1 + (-logits).exp())
    chosen = (s + bias).argsort(-1, descending=True)[..., :k]
    return placed(logits, chosen, F.normalize(s.gather(-1, chosen), p=1, dim=-1))


def dispatch__the_given_one(x, p, chosen, experts):
    k = chosen.shape[1]
    order = chosen.flatten().argsort()
    token = order // k
    counts = chosen.unique(return_counts=True)[1]
    groups = x[token].split(counts.tolist())
    out = torch.cat([f(rows) for f, rows in zip(experts, groups, strict=False)])
    y = torch.zeros_like(x)
    y[token] += p.flatten()[:, None] * out
    return y


def dispatch__counts_without_the_empty(x, p, chosen, experts):
    """An expert without a token is lost, and all after it get another's rows."""
    k = chosen.shape[1]
    order = chosen.flatten().argsort()
    token = order // k
    groups = x[token].split(chosen.unique(return_counts=True)[1].tolist())
    out = torch.cat([f(rows) for f, rows in zip(experts, groups, strict=False)])
    return torch.zeros_like(x).index_add(0, token, p.flatten()[order, None] * out)


def dispatch__empty_experts_behind_the_last_only(x, p, chosen, experts):
    """bincount without minlength, and equal counts for all that are missing in the middle."""
    k = chosen.shape[1]
    order = chosen.flatten().argsort()
    counts = torch.bincount(chosen.flatten())
    groups = x[order // k].split(counts[counts > 0].tolist())
    out = torch.cat([f(rows) for f, rows in zip(experts, groups, strict=False)])
    return torch.zeros_like(x).index_add(0, order // k, p.flatten()[order, None] * out)


def dispatch__one_expert_a_token_kept(x, p, chosen, experts):
    """y[token] += ... with a token twice adds once."""
    k = chosen.shape[1]
    order = chosen.flatten().argsort()
    token = order // k
    counts = torch.bincount(chosen.flatten(), minlength=len(experts))
    out = torch.cat([f(r) for f, r in zip(experts, x[token].split(counts.tolist()), strict=True)])
    y = torch.zeros_like(x)
    y[token] += p.flatten()[order, None] * out
    return y


def dispatch__weights_in_another_order(x, p, chosen, experts):
    k = chosen.shape[1]
    order = chosen.flatten().argsort()
    token = order // k
    counts = torch.bincount(chosen.flatten(), minlength=len(experts))
    out = torch.cat([f(r) for f, r in zip(experts, x[token].split(counts.tolist()), strict=True)])
    return torch.zeros_like(x).index_add(0, token, p.flatten()[:, None] * out)


def dispatch__stops_at_the_first_empty_expert(x, p, chosen, experts):
    y = torch.zeros_like(x)
    for e, f in enumerate(experts):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        if len(token) == 0:
            break
        y = y.index_add(0, token, p[token, slot, None] * f(x[token]))
    return y


def dispatch__no_weights(x, p, chosen, experts):
    return dispatch__right_one_expert_at_a_time(x, torch.ones_like(p), chosen, experts)


def dispatch__experts_under_no_grad(x, p, chosen, experts):
    """Mini-K3 book, chapter 14, in its released code."""
    silent = [torch.no_grad()(f) for f in experts]
    return dispatch__right_one_expert_at_a_time(x, p, chosen, silent)


def dispatch__weights_detached(x, p, chosen, experts):
    return dispatch__right_one_expert_at_a_time(x, p.detach(), chosen, experts) + 0 * p.sum()


def dispatch__token_by_token(x, p, chosen, experts):
    """Right values, and a call of an expert for every pair."""
    rows = []
    for row, weights, choice in zip(x, p, chosen.tolist(), strict=True):
        rows.append(sum(w * experts[e](row[None])[0] for w, e in zip(weights, choice, strict=True)))
    return torch.stack(rows)


def dispatch__every_expert_on_every_token(x, p, chosen, experts):
    dense = torch.zeros(len(x), len(experts), dtype=p.dtype).scatter(1, chosen, p)
    return sum(dense[:, e, None] * f(x) for e, f in enumerate(experts))


def dispatch__right_one_expert_at_a_time(x, p, chosen, experts):
    y = torch.zeros_like(x)
    for e, f in enumerate(experts):
        token, slot = (chosen == e).nonzero(as_tuple=True)
        if len(token):
            y = y.index_add(0, token, p[token, slot, None] * f(x[token]))
    return y


def dispatch__right_back_in_order(x, p, chosen, experts):
    N, k = chosen.shape
    flat = chosen.reshape(-1)
    order = torch.argsort(flat, stable=True)
    bounds = torch.searchsorted(flat[order], torch.arange(len(experts) + 1)).tolist()
    rows = x.repeat_interleave(k, 0)[order]
    out = torch.cat(
        [f(rows[a:b]) for f, a, b in zip(experts, bounds[:-1], bounds[1:], strict=True) if b > a]
    )
    out = out[order.argsort()].view(N, k, -1)
    return (p[..., None] * out).sum(1)


def balanced(old, k, steps, *, rank=1, cutoff_rank=1, centred=True, biased=False):
    """The bias after `steps` steps, with faults of the caller's."""
    m, E = old.shape
    b = torch.zeros(E, dtype=old.dtype)
    for _ in range(steps):
        cutoff = (old + b).topk(k + cutoff_rank, dim=-1).values[:, -1:]
        margins = (old + b if biased else old) - cutoff
        b = -margins.topk(m * k // E + rank, dim=0).values[-1]
        b = b - b.mean() if centred else b
    return b


def counted(scores, b, k):
    return torch.bincount((scores + b).topk(k, dim=-1).indices.flatten(), minlength=len(b))


def load_after__of_the_old_tokens(old, new, k, steps):
    return counted(old, balanced(old, k, steps), k)


def load_after__balanced_on_the_new_tokens(old, new, k, steps):
    return counted(new, balanced(new, k, steps), k)


def load_after__one_step_only(old, new, k, steps):
    return counted(new, balanced(old, k, min(steps, 1)), k)


def load_after__cutoff_is_the_kth(old, new, k, steps):
    return counted(new, balanced(old, k, steps, cutoff_rank=0), k)


def load_after__qth_margin(old, new, k, steps):
    return counted(new, balanced(old, k, steps, rank=0), k)


def load_after__margins_of_biased_scores(old, new, k, steps):
    """Then what is found is a step, and not the bias."""
    return counted(new, balanced(old, k, steps, biased=True), k)


def load_after__sign_reversed(old, new, k, steps):
    return counted(new, -balanced(old, k, steps), k)


def load_after__first_choice_only(old, new, k, steps):
    return counted(new, balanced(old, k, steps), 1)


def load_after__bias_forgotten(old, new, k, steps):
    return counted(new, torch.zeros_like(old[0]), k)


def load_after__experts_without_a_token_missing(old, new, k, steps):
    chosen = (new + balanced(old, k, steps)).topk(k, dim=-1).indices
    return torch.bincount(chosen.flatten())


def load_after__share_in_place_of_a_count(old, new, k, steps):
    return counted(new, balanced(old, k, steps), k) / len(new)


def load_after__sign_rule(old, new, k, steps):
    b = torch.zeros_like(old[0])
    for _ in range(steps):
        load = counted(old, b, k)
        b = b + 1e-3 * (len(old) * k / len(b) - load).sign()
    return counted(new, b, k)


def load_after__right_sorted(old, new, k, steps):
    m, E = old.shape
    q, b = m * k // E, torch.zeros_like(old[0])
    for _ in range(steps):
        a = (old + b).sort(-1, descending=True).values[:, k]
        b = -(old - a[:, None]).sort(0, descending=True).values[q]
        b -= b.mean()
    chosen = (new + b).argsort(-1, descending=True)[:, :k]
    return F.one_hot(chosen, E).sum((0, 1))


def load_after__right_kth_smallest(old, new, k, steps):
    m, E = old.shape
    b = old.new_zeros(E)
    while steps:
        a = (old + b).kthvalue(E - k, dim=1, keepdim=True).values
        b = (a - old).kthvalue(m * k // E + 1, dim=0).values
        b, steps = b - b.mean(), steps - 1
    s = new + b
    return (s >= s.kthvalue(E - k + 1, dim=1, keepdim=True).values).sum(0)

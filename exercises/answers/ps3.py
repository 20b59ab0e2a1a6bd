"""Answers to problem set 3: `problem__fault` must lose points, `problem__right_...` must get them all."""

import torch
import torch.nn.functional as F


def features(x):
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def linear(q, k, v, S, z, *, phi=features, eps=0.0, early=False, early_z=False, quotient=True):
    """The recurrence, with one thing in it to be made wrong."""
    q, k = phi(q), phi(k)
    o = []
    for q_t, k_t, v_t in zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True):
        old = S, z
        S, z = S + k_t[..., None] * v_t[..., None, :], z + k_t
        read = torch.einsum("bhk,bhkv->bhv", q_t, old[0] if early else S)
        weight = (q_t * (old[1] if early or early_z else z)).sum(-1, keepdim=True) + eps
        o.append(read / weight if quotient else read)
    return torch.stack(o, 1), S, z


def linear_attention__no_feature_map(q, k, v, S, z):
    """performer-pytorch #9, fast-transformers #11 in kind: weights that are negative, and may add to zero."""
    return linear(q, k, v, S, z, phi=lambda x: x)


def linear_attention__elu_as_written(q, k, v, S, z):
    return linear(q, k, v, S, z, phi=lambda x: F.elu(x) + 1)


def linear_attention__relu(q, k, v, S, z):
    return linear(q, k, v, S, z, phi=F.relu)


def linear_attention__features_of_the_keys_alone(q, k, v, S, z):
    return linear(q, features(k), v, S, z, phi=lambda x: x)


def linear_attention__read_before_the_write(q, k, v, S, z):
    return linear(q, k, v, S, z, early=True)


def linear_attention__own_weight_not_in_the_sum(q, k, v, S, z):
    """Sana #267 in kind: the quotient leaves out a term that the read has."""
    return linear(q, k, v, S, z, early_z=True)


def linear_attention__no_quotient(q, k, v, S, z):
    return linear(q, k, v, S, z, quotient=False)


def linear_attention__eps_in_the_quotient(q, k, v, S, z):
    return linear(q, k, v, S, z, eps=1e-6)


def linear_attention__past_ignored(q, k, v, S, z):
    """TileOps #1557, vllm-ascend #3309: the given state is not used."""
    return linear(q, k, v, torch.zeros_like(S), torch.zeros_like(z))


def linear_attention__past_of_the_weights_ignored(q, k, v, S, z):
    return linear(q, k, v, S, torch.zeros_like(z))


def linear_attention__in_place(q, k, v, S, z):
    """S += on the caller's tensor: right once, wrong for the next who goes on from it."""
    q, k = features(q), features(k)
    o = []
    for t in range(q.shape[1]):
        S += k[:, t, :, :, None] * v[:, t, :, None]
        z += k[:, t]
        o.append((q[:, t, :, None] @ S).squeeze(-2) / (q[:, t] * z).sum(-1, keepdim=True))
    return torch.stack(o, 1), S, z


def linear_attention__one_sum_for_all(q, k, v, S, z):
    """The worklog's listing: no causal mask, right for a single new token only."""
    q, k = features(q), features(k)
    S, z = S + torch.einsum("bthk,bthv->bhkv", k, v), z + k.sum(1)
    weight = torch.einsum("bthk,bhk->bth", q, z)[..., None]
    return torch.einsum("bthk,bhkv->bthv", q, S) / weight, S, z


def linear_attention__past_in_the_first_read_only(q, k, v, S, z):
    o, S_new, z_new = linear(q, k, v, torch.zeros_like(S), torch.zeros_like(z))
    first = linear(q[:, :1], k[:, :1], v[:, :1], S, z)[0]
    return torch.cat([first, o[:, 1:]], 1), S + S_new, z + z_new


def linear_attention__heads_and_positions_swapped(q, k, v, S, z):
    """transformers #40963: axes swapped, unnoticed where they are equal."""
    o, S, z = linear(*(x.transpose(1, 2) for x in (q, k, v)), S, z)
    return o.transpose(1, 2), S, z


def linear_attention__values_through_the_feature_map(q, k, v, S, z):
    return linear(q, k, features(v), S, z)


def linear_attention__right_masked_products(q, k, v, S, z):
    q, k, v = (x.transpose(1, 2) for x in (features(q), features(k), v))
    weights = (q @ k.mT).tril()
    o = weights @ v + q @ S
    total = weights.sum(-1, keepdim=True) + q @ z[..., None]
    return (o / total).transpose(1, 2), S + k.mT @ v, z + k.sum(2)


def linear_attention__right_running_sums(q, k, v, S, z):
    q, k = (F.relu(x) + x.clamp(max=0).exp() for x in (q, k))
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last channel of the state is z
    terms = torch.einsum("bthk,bthv->bthkv", k, v)
    states = torch.cat([S, z[..., None]], -1)[:, None] + terms.cumsum(1)
    o = torch.einsum("bthk,bthkv->bthv", q, states)
    return o[..., :-1] / o[..., -1:], states[:, -1, ..., :-1], states[:, -1, ..., -1]


def by_length(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def delta(
    q, k, v, b, S, *, key=by_length, query=by_length, gate=torch.sigmoid, scale=None, wide=True
):
    """The layer's core with parts to be exchanged."""
    dtype, out = torch.promote_types(v.dtype, torch.float32) if wide else v.dtype, v.dtype
    q, k, v, b = (x.to(dtype) for x in (q, k, v, b))
    q, k, beta = query(q), key(k), gate(b)
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if S is None:
        S = v.new_zeros(v.shape[0], *k.shape[2:], v.shape[-1])
    S, o = S.to(dtype), []
    for t in range(q.shape[1]):
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S))
        S = S + k[:, t, ..., None] * u[..., None, :]
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(o, 1).to(out), S


def delta_net__keys_as_they_come(q, k, v, b, S):
    """Long keys overshoot: the state explodes."""
    return delta(q, k, v, b, S, key=lambda x: x)


def delta_net__queries_as_they_come(q, k, v, b, S):
    return delta(q, k, v, b, S, query=lambda x: x)


def delta_net__eps_on_the_mean(q, k, v, b, S):
    """mlx-lm #1624, maxtext #5098: eps is added to the mean of the squares, K times as large."""

    def key(x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * x.shape[-1] ** -0.5

    return delta(q, k, v, b, S, key=key, query=key)


def delta_net__root_mean_square(q, k, v, b, S):
    def key(x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    return delta(q, k, v, b, S, key=key, query=key)


def delta_net__zero_row_divided_by_zero(q, k, v, b, S):
    def key(x):
        return x / x.norm(dim=-1, keepdim=True)

    return delta(q, k, v, b, S, key=key, query=key)


def delta_net__no_eps_in_the_root(q, k, v, b, S):
    def key(x):
        return F.normalize(x, dim=-1)

    return delta(q, k, v, b, S, key=key, query=key)


def delta_net__divided_by_the_sum(q, k, v, b, S):
    return delta(q, k, v, b, S, key=lambda x: features(x) / features(x).sum(-1, keepdim=True))


def delta_net__no_sigmoid(q, k, v, b, S):
    return delta(q, k, v, b, S, gate=lambda b: b)


def delta_net__beta_up_to_two(q, k, v, b, S):
    return delta(q, k, v, b, S, gate=lambda b: 2 * b.sigmoid())


def delta_net__no_scale(q, k, v, b, S):
    return delta(q, k, v, b, S, scale=1.0)


def delta_net__scale_of_the_values(q, k, v, b, S):
    return delta(q, k, v, b, S, scale=v.shape[-1] ** -0.5)


def delta_net__scaled_before_the_length(q, k, v, b, S):
    return delta(q * q.shape[-1] ** -0.5, k, v, b, S, scale=1.0)


def delta_net__state_in_16_bits(q, k, v, b, S):
    """vllm #13466, TensorRT-LLM #17415: the state has the dtype of the inputs."""
    return delta(q, k, v, b, S, wide=False)


def delta_net__state_rounded_on_the_way(q, k, v, b, S):
    o = []
    for t in range(q.shape[1]):
        o_t, S = delta(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], b[:, t : t + 1], S)
        o.append(o_t)
        S = S.to(v.dtype).to(S.dtype)
    return torch.cat(o, 1), S


def delta_net__output_stays_wide(q, k, v, b, S):
    o, S = delta(*(x.to(torch.promote_types(v.dtype, torch.float32)) for x in (q, k, v, b)), S)
    return o, S


def delta_net__lengths_in_16_bits(q, k, v, b, S):
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, beta = by_length(q).to(wide), by_length(k).to(wide), b.sigmoid().to(wide)
    o, S = delta(q, k, v.to(wide), beta, S, key=lambda x: x, query=lambda x: x, gate=lambda b: b)
    return o.to(v.dtype), S


def delta_net__state_ignored(q, k, v, b, S):
    """TileOps #1557: a given initial state changes nothing."""
    return delta(q, k, v, b, None)


def delta_net__state_needed(q, k, v, b, S):
    return delta(q, k, v, b, torch.zeros_like(S) + S)


def delta_net__read_before_the_write(q, k, v, b, S):
    o = []
    for t in range(q.shape[1]):
        one = [x[:, t : t + 1] for x in (q, k, v, b)]
        quiet = [*one[:3], torch.full_like(one[3], -1e4)]  # beta = 0: a read alone
        o.append(delta(*quiet, S)[0])
        S = delta(*one, S)[1]
    return torch.cat(o, 1), S


def delta_net__corrections_all_from_the_first_state(q, k, v, b, S):
    """All tokens at once, as if no write of these changed what the next one reads."""
    wide = torch.promote_types(v.dtype, torch.float32)
    qs, ks, beta = by_length(q.to(wide)), by_length(k.to(wide)), b.to(wide).sigmoid()
    if S is None:
        S = qs.new_zeros(v.shape[0], *k.shape[2:], v.shape[-1])
    u = beta[..., None] * (v.to(wide) - torch.einsum("bthk,bhkv->bthv", ks, S))
    states = S[:, None] + torch.einsum("bthk,bthv->bthkv", ks, u).cumsum(1)
    o = torch.einsum("bthk,bthkv->bthv", qs * qs.shape[-1] ** -0.5, states)
    return o.to(v.dtype), states[:, -1]


def delta_net__beta_on_the_write_alone(q, k, v, b, S):
    wide = torch.promote_types(v.dtype, torch.float32)
    qs, ks, beta = by_length(q.to(wide)), by_length(k.to(wide)), b.to(wide).sigmoid()
    S = qs.new_zeros(v.shape[0], *k.shape[2:], v.shape[-1]) if S is None else S
    o = []
    for t in range(q.shape[1]):
        k_t = ks[:, t, ..., None]
        S = S - k_t * (k_t.mT @ S) + k_t * (beta[:, t, :, None] * v[:, t])[..., None, :]
        o.append((qs[:, t, :, None] @ S).squeeze(-2) * q.shape[-1] ** -0.5)
    return torch.stack(o, 1).to(v.dtype), S


def delta_net__only_adds(q, k, v, b, S):
    wide = torch.promote_types(v.dtype, torch.float32)
    qs, ks, beta = by_length(q.to(wide)), by_length(k.to(wide)), b.to(wide).sigmoid()
    S = 0 if S is None else S[:, None]
    states = S + torch.einsum("bthk,bth,bthv->bthkv", ks, beta, v.to(wide)).cumsum(1)
    o = torch.einsum("bthk,bthkv->bthv", qs * qs.shape[-1] ** -0.5, states)
    return o.to(v.dtype), states[:, -1]


def delta_net__in_place(q, k, v, b, S):
    """S += on the caller's tensor."""
    o, after = delta(q, k, v, b, S)
    return o, after if S is None else S.copy_(after)


def delta_net__right_transition_matrix(q, k, v, b, S):
    """Equation (5.3): the state times a matrix, and a write."""
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    qs, ks, vs, beta = (x.to(dtype).transpose(1, 2)[..., None] for x in (q, k, v, b))
    qs, ks = (x / (x.pow(2).sum(-2, keepdim=True) + 1e-6).sqrt() for x in (qs, ks))
    beta = 1 / (1 + (-beta[..., None]).exp())
    K = q.shape[-1]
    identity = torch.eye(K, dtype=dtype)
    S, o = vs.new_zeros(*vs.shape[:2], K, v.shape[-1]) if S is None else S, []
    for t in range(q.shape[1]):
        k_t = ks[:, :, t]
        S = (identity - beta[:, :, t] * k_t @ k_t.mT) @ S + beta[:, :, t] * k_t @ vs[:, :, t].mT
        o.append((qs[:, :, t].mT @ S)[..., 0, :] / K**0.5)
    return torch.stack(o, 1).to(v.dtype), S


def delta_net__right_one_head_at_a_time(q, k, v, b, S):
    B, T, H, K = q.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    o = torch.zeros(v.shape, dtype=dtype)
    S = torch.zeros(B, H, K, v.shape[-1], dtype=dtype) if S is None else S.clone()
    for row in range(B):
        for head in range(H):
            M = S[row, head]
            for t in range(T):
                q_t, k_t, v_t = (x[row, t, head].to(dtype) for x in (q, k, v))
                k_t = k_t / (k_t @ k_t + 1e-6).sqrt()
                q_t = q_t / (q_t @ q_t + 1e-6).sqrt()
                M += torch.outer(k_t, torch.sigmoid(b[row, t, head].to(dtype)) * (v_t - k_t @ M))
                o[row, t, head] = q_t @ M / K**0.5
    return o.to(v.dtype), S


def step__the_given_one(S, q, k, v, beta):
    o = torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, S)
    S += torch.einsum("bh,bhk,bhv->bhkv", beta, k, v)
    S -= torch.einsum("bh,bhk,bhv->bhkv", beta, k, torch.einsum("bhk,bhkv->bhv", k, S))
    return o, S


def step__only_a_copy(S, q, k, v, beta):
    return step__the_given_one(S.clone(), q, k, v, beta)


def step__still_reads_before_the_write(S, q, k, v, beta):
    o = torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, S)
    return o, step__right_erase_then_add(S, q, k, v, beta)[1]


def step__still_erases_what_it_added(S, q, k, v, beta):
    S = step__only_a_copy(S, q, k, v, beta)[1]
    return torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, S), S


def step__still_in_place(S, q, k, v, beta):
    recalled = torch.einsum("bhk,bhkv->bhv", k, S)
    S += torch.einsum("bh,bhk,bhv->bhkv", beta, k, v - recalled)
    return torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, S), S


def step__in_place_through_a_view(S, q, k, v, beta):
    new = S[:]
    new -= torch.einsum("bh,bhk,bhv->bhkv", beta, k, torch.einsum("bhk,bhkv->bhv", k, S) - v)
    return torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, new), new


def step__copy_of_expanded_storage(S, q, k, v, beta):
    """Copies a state only where an in-place write would raise."""
    return step__still_in_place(S.clone() if 0 in S.stride() else S, q, k, v, beta)


def step__query_scaled_in_place(S, q, k, v, beta):
    q *= q.shape[-1] ** -0.5
    S = step__right_erase_then_add(S, q, k, v, beta)[1]
    return torch.einsum("bhk,bhkv->bhv", q, S), S


def step__no_scale(S, q, k, v, beta):
    S = step__right_erase_then_add(S, q, k, v, beta)[1]
    return torch.einsum("bhk,bhkv->bhv", q, S), S


def step__beta_twice(S, q, k, v, beta):
    return step__right_erase_then_add(S, q, k, v, beta.square())


def step__erases_whole(S, q, k, v, beta):
    """beta on the write alone."""
    S = (
        S
        - k[..., None] * (k[..., None, :] @ S)
        + (beta[..., None] * k)[..., None] * v[..., None, :]
    )
    return torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, S), S


def step__divides_the_keys(S, q, k, v, beta):
    return step__right_erase_then_add(S, q, k / k.norm(dim=-1, keepdim=True), v, beta)


def step__asks_with_the_query(S, q, k, v, beta):
    recalled = torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, S)
    S = S + torch.einsum("bh,bhk,bhv->bhkv", beta, k, v - recalled)
    return torch.einsum("bhk,bhkv->bhv", q * q.shape[-1] ** -0.5, S), S


def step__right_erase_then_add(S, q, k, v, beta):
    strong = (beta[..., None] * k)[..., None]
    S = S - strong * (k[..., None, :] @ S)
    S = S + strong * v[..., None, :]
    return (q[..., None, :] @ S).squeeze(-2) / q.shape[-1] ** 0.5, S


def step__right_clone(S, q, k, v, beta):
    S = S.clone()
    for row in range(S.shape[0]):
        for head in range(S.shape[1]):
            M, k_, v_ = S[row, head], k[row, head], v[row, head]
            M.addr_(k_, v_ - k_ @ M, alpha=beta[row, head].item())
    return (q.unsqueeze(-1) * S).sum(-2) * q.shape[-1] ** -0.5, S


def recall(keys, which, values, *, first=False, written=False, root=False, power=1, corrected=True):
    """Both errors, with the question or the measure to be made wrong."""
    k = keys[which]
    total = k.T @ values
    S = torch.zeros_like(total)
    for k_t, v_t in zip(k, values, strict=True):
        S = S + torch.outer(k_t, v_t - (k_t @ S if corrected else 0))
    at = [torch.nonzero(which == i).flatten() for i in range(len(keys))]
    right = values[torch.stack([x[0 if first else -1] for x in at])]
    if written:
        keys, right = k, values
    errors = [((keys @ M - right) ** 2).mean() / (right**2).mean() ** power for M in (total, S)]
    return tuple((e.sqrt() if root else e).item() for e in errors)


def recall_errors__first_value_is_right(keys, which, values):
    return recall(keys, which, values, first=True)


def recall_errors__every_write_asked(keys, which, values):
    return recall(keys, which, values, written=True)


def recall_errors__root(keys, which, values):
    return recall(keys, which, values, root=True)


def recall_errors__not_relative(keys, which, values):
    return recall(keys, which, values, power=0)


def recall_errors__delta_rule_only_adds(keys, which, values):
    return recall(keys, which, values, corrected=False)


def recall_errors__the_other_order(keys, which, values):
    return recall(keys, which, values)[::-1]


def recall_errors__all_values_in_the_mean_square(keys, which, values):
    right = torch.stack([values[which == i][-1] for i in range(len(keys))])
    share = (right.square().mean() / values.square().mean()).item()
    return tuple(e * share for e in recall(keys, which, values))


def recall_errors__order_of_the_keys(keys, which, values):
    """Writes sorted by key: the last value of each is kept, the order among keys is lost."""
    order = torch.sort(which, stable=True)[1]
    return recall(keys, which[order], values[order])


def recall_errors__last_writes_alone(keys, which, values):
    """What is overwritten later is not written at all, so the sum memory has nothing old in it."""
    last = sorted(torch.nonzero(which == i).max().item() for i in range(len(keys)))
    return recall(keys, which[last], values[last])


def recall_errors__with_a_scale(keys, which, values):
    scale = keys.shape[1] ** -0.5
    right = torch.stack([values[which == i][-1] for i in range(len(keys))])
    S = torch.zeros(keys.shape[1], values.shape[1], dtype=keys.dtype)
    for k, v in zip(keys[which], values, strict=True):
        S = S + torch.outer(k, v - k @ S)
    states = keys[which].T @ values, S
    errors = (((scale * keys @ M - right) ** 2).mean() / (right**2).mean() for M in states)
    return tuple(e.item() for e in errors)


def recall_errors__right_vectors(keys, which, values):
    return recall(keys, which, values)


def recall_errors__right_what_is_recalled(keys, which, values):
    """No state: what each key recalls, moved by each write with the products of the keys."""
    products = keys @ keys.T
    right = values.new_zeros(len(keys), values.shape[1])
    added, corrected = right.clone(), right.clone()
    for i, v in zip(which, values, strict=True):
        added += products[i, :, None] * v
        corrected += products[i, :, None] * (v - corrected[i])
        right[i] = v
    size = float((right**2).sum())
    return float(((added - right) ** 2).sum()) / size, float(
        ((corrected - right) ** 2).sum()
    ) / size

"""Answers to problem set 5: `problem__fault` must lose points, `problem__right_...` must get them all."""

import math

import torch


def recalled(k, S):
    return (k[..., None] * S).sum(-2)


def outer(k, v):
    return k[..., :, None] * v[..., None, :]


def finish(q, S, dtype):
    return (recalled(q, S) * q.shape[-1] ** -0.5).to(dtype), S


def decode__reads_before_it_decays(S, q, k, v, g, beta):
    """Two digests: a S + k (v - k S), the recalled value not decayed."""
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    u = beta[..., None] * (v - recalled(k, S))
    return finish(q, g.exp()[..., None, None] * S + outer(k, u), dtype)


def decode__decays_after_the_write(S, q, k, v, g, beta):
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    S = g.exp()[..., None, None] * (S + outer(k, beta[..., None] * (v - recalled(k, S))))
    return finish(q, S, dtype)


def decode__decays_what_it_writes(S, q, k, v, g, beta):
    """The inclusive product of the Kimi Linear paper's text: the writer's own decay."""
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    a = g.exp()[..., None, None]
    S = a * S
    S = S + a * outer(k, beta[..., None] * (v - recalled(k, S)))
    return finish(q, S, dtype)


def decode__output_before_the_write(S, q, k, v, g, beta):
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    S = g.exp()[..., None, None] * S
    o, _ = finish(q, S, dtype)
    return o, S + outer(k, beta[..., None] * (v - recalled(k, S)))


def decode__the_logarithm_as_decay(S, q, k, v, g, beta):
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    S = g[..., None, None] * S
    return finish(q, S + outer(k, beta[..., None] * (v - recalled(k, S))), dtype)


def decode__base_two(S, q, k, v, g, beta):
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    S = torch.exp2(g)[..., None, None] * S
    return finish(q, S + outer(k, beta[..., None] * (v - recalled(k, S))), dtype)


def decode__beta_and_g_swapped(S, q, k, v, g, beta):
    """fla's naive files: two functions, two orders of arguments."""
    return decode__right_by_the_transition(S, q, k, v, beta, g)


def decode__beta_on_the_value_alone(S, q, k, v, g, beta):
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    S = g.exp()[..., None, None] * S
    return finish(q, S + outer(k, beta[..., None] * v - recalled(k, S)), dtype)


def decode__decay_without_correction(S, q, k, v, g, beta):
    """Mamba-2's rule."""
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    S = g.exp()[..., None, None] * S + outer(k, beta[..., None] * v)
    return finish(q, S, dtype)


def decode__gate_of_the_first_head(S, q, k, v, g, beta):
    return decode__right_by_the_transition(S, q, k, v, g[:, :1].expand_as(g), beta)


def decode__floor_of_minus_five(S, q, k, v, g, beta):
    return decode__right_by_the_transition(S, q, k, v, g.clamp(min=-5), beta)


def decode__not_scaled(S, q, k, v, g, beta):
    o, S = decode__right_by_the_transition(S, q * q.shape[-1] ** 0.5, k, v, g, beta)
    return o, S


def decode__in_place(S, q, k, v, g, beta):
    dtype, (q, k, v) = v.dtype, (x.to(S.dtype) for x in (q, k, v))
    S *= g.exp()[..., None, None]
    S += outer(k, beta[..., None] * (v - recalled(k, S)))
    return finish(q, S, dtype)


def decode__correction_in_16_bits(S, q, k, v, g, beta):
    wide = S.dtype
    S = g.exp()[..., None, None] * S
    u = beta.to(v.dtype)[..., None] * (v - recalled(k, S.to(k.dtype)))
    return finish(q.to(wide), S + outer(k, u).to(wide), v.dtype)


def decode__decay_in_16_bits(S, q, k, v, g, beta):
    """A decay of 0.999 is 1 in bfloat16."""
    return decode__right_by_the_transition(S, q, k, v, g.exp().to(v.dtype).log().to(g.dtype), beta)


def decode__output_in_32_bits(S, q, k, v, g, beta):
    o, new = decode__right_by_the_transition(S, *(x.to(S.dtype) for x in (q, k, v)), g, beta)
    return o, new


def decode__right_by_the_transition(S, q, k, v, g, beta):
    """S <- a (I - beta k^T k) S + beta k^T v."""
    wide, K = S.dtype, k.shape[-1]
    key = k.to(wide)
    erase = torch.eye(K, dtype=wide) - beta[..., None, None] * outer(key, key)
    S = g.exp()[..., None, None] * (erase @ S) + beta[..., None, None] * outer(key, v.to(wide))
    o = (q.to(wide)[..., None, :] @ S).squeeze(-2) / math.sqrt(K)
    return o.to(v.dtype), S


def decode__right_one_head_at_a_time(S, q, k, v, g, beta):
    o, new = torch.zeros_like(v), S.clone()
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            M, key = new[b, h], k[b, h].to(S.dtype)
            M *= torch.exp(g[b, h])
            M += key[:, None] * ((v[b, h].to(S.dtype) - key @ M) * beta[b, h])
            o[b, h] = (q[b, h].to(S.dtype) @ M * q.shape[-1] ** -0.5).to(o.dtype)
    return o, new


def step(S, k, v, g, beta):
    S = g.exp()[..., None] * S
    return S + outer(k, beta[..., None] * (v - recalled(k, S)))


def tokens_of(step_rule, q, k, v, g, beta, initial_state, lengths, *, live_only=True):
    """A right frame, for the faults inside a step."""
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    o = []
    for t in range(T):
        live = (lengths > t)[:, None, None]
        new = step_rule(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        S = torch.where(live[..., None], new, S) if live_only else new
        o.append(torch.where(live, recalled(q[:, t], S) * K**-0.5, 0.0))
    return torch.stack(o, 1), S


def kda__gate_on_the_values(q, k, v, g, beta, initial_state, lengths):
    """Accepted whenever K = V."""

    def wrong(S, k, v, g, beta):
        S = g.exp()[..., None, :] * S
        return S + outer(k, beta[..., None] * (v - recalled(k, S)))

    return tokens_of(wrong, q, k, v, g, beta, initial_state, lengths)


def kda__one_gate_per_head(q, k, v, g, beta, initial_state, lengths):
    g = g.mean(-1, keepdim=True).expand_as(g)
    return tokens_of(step, q, k, v, g, beta, initial_state, lengths)


def kda__gate_of_the_first_channel(q, k, v, g, beta, initial_state, lengths):
    return tokens_of(step, q, k, v, g[..., :1].expand_as(g), beta, initial_state, lengths)


def kda__reverse_order(q, k, v, g, beta, initial_state, lengths):
    """Table 6 and equation 12 of the Kimi Linear paper: erase, then decay."""

    def wrong(S, k, v, g, beta):
        b = beta[..., None]
        return g.exp()[..., None] * (S - outer(k, b * recalled(k, S))) + outer(k, b * v)

    return tokens_of(wrong, q, k, v, g, beta, initial_state, lengths)


def kda__reads_before_it_decays(q, k, v, g, beta, initial_state, lengths):
    def wrong(S, k, v, g, beta):
        return g.exp()[..., None] * S + outer(k, beta[..., None] * (v - recalled(k, S)))

    return tokens_of(wrong, q, k, v, g, beta, initial_state, lengths)


def kda__decays_what_it_writes(q, k, v, g, beta, initial_state, lengths):
    def wrong(S, k, v, g, beta):
        a = g.exp()[..., None]
        return a * (S + outer(k, beta[..., None] * (v - recalled(k, a * S))))

    return tokens_of(wrong, q, k, v, g, beta, initial_state, lengths)


def kda__writes_the_value_uncorrected(q, k, v, g, beta, initial_state, lengths):
    """The last line of the paper's listing 8b."""

    def wrong(S, k, v, g, beta):
        return g.exp()[..., None] * S + outer(k, beta[..., None] * v)

    return tokens_of(wrong, q, k, v, g, beta, initial_state, lengths)


def kda__floor_of_minus_five(q, k, v, g, beta, initial_state, lengths):
    return tokens_of(step, q, k, v, g.clamp(min=-5), beta, initial_state, lengths)


def kda__initial_state_ignored(q, k, v, g, beta, initial_state, lengths):
    return tokens_of(step, q, k, v, g, beta, None, lengths)


def kda__first_gate_left_out(q, k, v, g, beta, initial_state, lengths):
    """Right from a state of zeros: the first token has nothing to decay there."""
    g = g.clone()
    g[:, 0] = 0
    return tokens_of(step, q, k, v, g, beta, initial_state, lengths)


def kda__initial_state_in_place(q, k, v, g, beta, initial_state, lengths):
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    o = torch.zeros_like(v)
    for t in range(T):
        for b in range(B):
            if t < lengths[b]:
                S[b] = step(S[b], k[b, t], v[b, t], g[b, t], beta[b, t])
                o[b, t] = recalled(q[b, t], S[b]) * K**-0.5
    return o, S


def kda__lengths_ignored(q, k, v, g, beta, initial_state, lengths):
    all_of_it = torch.full_like(lengths, q.shape[1])
    return tokens_of(step, q, k, v, g, beta, initial_state, all_of_it)


def kda__padding_writes(q, k, v, g, beta, initial_state, lengths):
    return tokens_of(step, q, k, v, g, beta, initial_state, lengths, live_only=False)


def kda__padding_forgets(q, k, v, g, beta, initial_state, lengths):
    """Its write strength is zero, and its decay is not."""
    padding = torch.arange(q.shape[1]) >= lengths[:, None]
    k, v = (x.masked_fill(padding[..., None, None], 0) for x in (k, v))
    beta = beta.masked_fill(padding[..., None], 0)
    g = torch.where(g.isnan(), -1.0, g)
    return tokens_of(step, q, k, v, g, beta, initial_state, lengths, live_only=False)


def kda__padding_times_zero(q, k, v, g, beta, initial_state, lengths):
    """fla #902 in kind: zero times what stands there, which may be NaN (or -inf times 0)."""
    live = (torch.arange(q.shape[1]) < lengths[:, None]).to(q.dtype)
    beta = beta * live[..., None]
    g = torch.where(live[..., None, None] > 0, g, g * 0)
    return tokens_of(step, q, k, v, g, beta, initial_state, lengths, live_only=False)


def kda__output_of_padding(q, k, v, g, beta, initial_state, lengths):
    B, T, H, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    o = []
    for t in range(T):
        new = step(S, k[:, t], v[:, t], g[:, t], beta[:, t])
        S = torch.where((lengths > t)[:, None, None, None], new, S)
        o.append(recalled(q[:, t], S) * K**-0.5)
    return torch.stack(o, 1), S


def kda__padding_first(q, k, v, g, beta, initial_state, lengths):
    """Tokens taken from the end of each row."""
    T = q.shape[1]
    live = torch.arange(T) >= T - lengths[:, None]
    q, k, v, g = (x.masked_fill(~live[..., None, None], 0) for x in (q, k, v, g))
    beta = beta.masked_fill(~live[..., None], 0)
    return tokens_of(step, q, k, v, g, beta, initial_state, torch.full_like(lengths, T))


def kda__one_token_too_many(q, k, v, g, beta, initial_state, lengths):
    return tokens_of(step, q, k, v, g, beta, initial_state, lengths + 1)


def kda__not_scaled(q, k, v, g, beta, initial_state, lengths):
    q = q * q.shape[-1] ** 0.5
    return tokens_of(step, q, k, v, g, beta, initial_state, lengths)


def kda__quotients_of_running_products(q, k, v, g, beta, initial_state, lengths):
    """One chunk of all tokens, with K / Gamma: overflows, or is 0 / 0."""
    padding = torch.arange(q.shape[1]) >= lengths[:, None]
    q, k, v_, g = (x.masked_fill(padding[..., None, None], 0).mT.mT for x in (q, k, v, g))
    beta = beta.masked_fill(padding[..., None], 0)
    q, k, v_, g = (x.transpose(1, 2) for x in (q, k, v_, g))
    b = beta.transpose(1, 2)[..., None]
    gamma = g.cumsum(2).exp()
    B, H, T, K = q.shape
    S = q.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state
    A = b * ((k * gamma) @ (k / gamma).mT)
    right = b * (v_ - (k * gamma) @ S)
    U = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    q = q * K**-0.5
    o = (q * gamma) @ S + ((q * gamma) @ (k / gamma).mT).tril() @ U
    S = gamma[:, :, -1, :, None] * S + (k * gamma[:, :, -1:] / gamma).mT @ U
    return o.transpose(1, 2), S


def kda__right_where(q, k, v, g, beta, initial_state, lengths):
    return tokens_of(step, q, k, v, g, beta, initial_state, lengths)


def kda__right_row_by_row_with_matrices(q, k, v, g, beta, initial_state, lengths):
    """S <- (I - beta k^T k) Diag(a) S + beta k^T v, each row over its own tokens."""
    B, T, H, K = q.shape
    o, eye = torch.zeros_like(v), torch.eye(K, dtype=q.dtype)
    states = q.new_zeros(B, H, K, v.shape[-1])
    for b in range(B):
        for h in range(H):
            S = states[b, h] if initial_state is None else initial_state[b, h]
            for t in range(int(lengths[b])):
                key, strength = k[b, t, h], beta[b, t, h]
                erase = eye - strength * torch.outer(key, key)
                S = erase @ (g[b, t, h].exp()[:, None] * S)
                S = S + strength * torch.outer(key, v[b, t, h])
                o[b, t, h] = q[b, t, h] @ S / math.sqrt(K)
            states[b, h] = S
    return o, states


def pairs_summed(g):
    """g_{i+1} + ... + g_r below the diagonal, each by itself."""
    return g[:, None].expand(len(g), len(g)).tril(-1).cumsum(0)


def chunk_from(q, k, v, g, beta, S, D, to_end, *, decayed_early=False):
    """The given function without or with its fault of the state, from the decays inside the chunk."""
    from_start, b = g.cumsum(0).exp()[:, None], beta[:, None]
    after = from_start[-1] * S
    S = after if decayed_early else S
    right = b * (v - (from_start * k) @ S)
    A = b * (k @ k.T) * D
    U = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    o = (from_start * q) @ S + ((q @ k.T) * D) @ U
    return o, after + (to_end[:, None] * k).T @ U


def differences(g):
    G = g.cumsum(0)
    return G[:, None] - G


def gated_chunk__the_given_one(q, k, v, g, beta, S):
    D = differences(g).exp() * torch.ones(len(g), len(g), dtype=g.dtype).tril()
    G = g.cumsum(0)
    return chunk_from(q, k, v, g, beta, S, D, (G[-1] - (G - g)).exp(), decayed_early=True)


def gated_chunk__still_differences(q, k, v, g, beta, S):
    D = differences(g).exp() * torch.ones(len(g), len(g), dtype=g.dtype).tril()
    G = g.cumsum(0)
    return chunk_from(q, k, v, g, beta, S, D, (G[-1] - G).exp())


def gated_chunk__still_decayed_early(q, k, v, g, beta, S):
    """shainet #170 in kind: a decay that counts twice, unseen while the state before is zero."""
    sums = pairs_summed(g)
    return chunk_from(q, k, v, g, beta, S, sums.exp().tril(), sums[-1].exp(), decayed_early=True)


def gated_chunk__still_the_writers_own_gate(q, k, v, g, beta, S):
    sums = pairs_summed(g)
    return chunk_from(q, k, v, g, beta, S, sums.exp().tril(), (sums[-1] + g).exp())


def gated_chunk__differences_masked_by_selection(q, k, v, g, beta, S):
    """No overflow times zero any more; a reset is still -inf - (-inf)."""
    D, G = differences(g).exp().tril(), g.cumsum(0)
    return chunk_from(q, k, v, g, beta, S, D, (G[-1] - G).exp())


def gated_chunk__nan_replaced_by_zero(q, k, v, g, beta, S):
    """A pair behind a reset is forgotten although nothing stands between."""
    D = differences(g).masked_fill(~torch.ones(len(g), len(g), dtype=torch.bool).tril(), -math.inf)
    D = D.exp().nan_to_num(0.0)
    G = g.cumsum(0)
    return chunk_from(q, k, v, g, beta, S, D, (G[-1] - G).exp().nan_to_num(0.0))


def gated_chunk__resets_made_finite(q, k, v, g, beta, S):
    """Differences of large sums have few digits left, in 32 bits."""
    g = g.clamp(min=-1e4)
    D = differences(g).tril().exp().tril()
    G = g.cumsum(0)
    return chunk_from(q, k, v, g, beta, S, D, (G[-1] - G).exp())


def gated_chunk__floor_of_minus_twenty(q, k, v, g, beta, S):
    """Right where the state is of the size of 1; a reset leaves two parts in a billion."""
    g = g.clamp(min=-20)
    sums = pairs_summed(g)
    return chunk_from(q, k, v, g, beta, S, sums.exp().tril(), sums[-1].exp())


def gated_chunk__masked_after_the_exponential(q, k, v, g, beta, S):
    """mamba #352 in kind: outputs right, gradients 0 times infinity."""
    sums = pairs_summed(g)
    D = (sums - sums.T).exp().tril()
    return chunk_from(q, k, v, g, beta, S, D, sums[-1].exp())


def gated_chunk__own_write_not_read(q, k, v, g, beta, S):
    sums = pairs_summed(g)
    return chunk_from(q, k, v, g, beta, S, sums.exp().tril(-1), sums[-1].exp())


def gated_chunk__sums_from_the_writer_on(q, k, v, g, beta, S):
    """The inclusive product between all pairs."""
    below = g[:, None].expand(len(g), len(g)).tril(-1)
    sums = below.cumsum(0) + (g * torch.ones_like(below)).tril(-1)
    return chunk_from(q, k, v, g, beta, S, sums.exp().tril(), sums[-1].exp())


def gated_chunk__state_of_32_bits_in_place(q, k, v, g, beta, S):
    sums = pairs_summed(g)
    o, new = chunk_from(q, k, v, g, beta, S, sums.exp().tril(), sums[-1].exp())
    with torch.no_grad():
        S.copy_(new)
    return o, new


def gated_chunk__decays_without_gradient(q, k, v, g, beta, S):
    sums = pairs_summed(g).detach()
    return chunk_from(q, k, v, g, beta, S, sums.exp().tril(), sums[-1].exp())


def gated_chunk__token_by_token(q, k, v, g, beta, S):
    o = []
    for q_t, k_t, v_t, g_t, b in zip(q, k, v, g, beta, strict=True):
        S = g_t.exp() * S
        S = S + torch.outer(k_t, b * (v_t - k_t @ S))
        o.append(q_t @ S)
    return torch.stack(o), S


def gated_chunk__right_inverse(q, k, v, g, beta, S):
    C = len(g)
    r, i = torch.arange(C)[:, None], torch.arange(C)
    terms = torch.where(r > i, g[:, None], 0.0)
    sums = terms.cumsum(0).masked_fill(r < i, -math.inf)
    D, P, R = sums.exp(), g.cumsum(0).exp()[:, None], sums[-1].exp()[:, None]
    X = torch.linalg.inv(torch.eye(C, dtype=q.dtype) + (beta[:, None] * (k @ k.T) * D).tril(-1))
    X = X * beta
    U = X @ v - X @ (P * k) @ S
    return P * (q @ S) + (D * (q @ k.T)) @ U, P[-1] * S + (R * k).T @ U


def gated_chunk__right_sums_from_the_end(q, k, v, g, beta, S):
    """Row by row from the right: the sum up to r of what comes after i."""
    C = len(g)
    rows = g.expand(C, C).tril().flip(1).cumsum(1).flip(1)  # g_i + ... + g_r
    sums = torch.cat([rows[:, 1:], rows.new_zeros(C, 1)], 1)
    return chunk_from(q, k, v, g, beta, S, sums.exp().tril(), sums[-1].exp())


def stored_half_life__not_rounded(g, dtype, logarithm):
    return math.log(2) / g.abs()


def stored_half_life__always_the_logarithm(g, dtype, logarithm):
    return math.log(2) / g.to(dtype).double().abs()


def stored_half_life__always_the_decay(g, dtype, logarithm):
    return math.log(2) / g.exp().to(dtype).double().log().abs()


def stored_half_life__minus_infinity(g, dtype, logarithm):
    kept = g.to(dtype).double() if logarithm else g.exp().to(dtype).double().log()
    return math.log(0.5) / kept


def stored_half_life__time_to_one_part_in_e(g, dtype, logarithm):
    kept = g.to(dtype).double() if logarithm else g.exp().to(dtype).double().log()
    return 1 / kept.abs()


def stored_half_life__logarithm_in_few_bits(g, dtype, logarithm):
    kept = g.to(dtype) if logarithm else g.exp().to(dtype).log()
    return math.log(2) / kept.double().abs()


def stored_half_life__exponential_in_few_bits(g, dtype, logarithm):
    """Rounded twice."""
    kept = g.to(dtype).double() if logarithm else g.to(dtype).exp().double().log()
    return math.log(2) / kept.abs()


def stored_half_life__divided_in_few_bits(g, dtype, logarithm):
    kept = g.to(dtype) if logarithm else g.exp().to(dtype).double().log()
    return (math.log(2) / kept.abs()).double()


def stored_half_life__whole_tokens(g, dtype, logarithm):
    kept = g.to(dtype).double() if logarithm else g.exp().to(dtype).double().log()
    return (math.log(2) / kept.abs()).ceil()


def stored_half_life__right_divided_by_logarithm_to_base_two(g, dtype, logarithm):
    stored = (g if logarithm else g.exp()).to(dtype).to(torch.float64)
    if not logarithm:
        return 1 / stored.log2().abs()
    return 1 / (stored.abs() / math.log(2))


def stored_half_life__right_where(g, dtype, logarithm):
    stored = (g if logarithm else torch.exp(g)).to(dtype).double()
    kept = stored if logarithm else torch.log(stored)
    half = torch.full_like(g, 0.5).log()
    return torch.where(kept == 0, math.inf, half / kept)

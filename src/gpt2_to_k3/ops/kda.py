"""Kimi Delta Attention: the delta rule on a state whose channels forget at their own rates."""

import torch
import torch.nn.functional as F

from ._check import check_float, check_shape, compute_dtype, full_precision, prepare
from ._chunk import from_chunks, halves, inverse_low, merge, solve_chunks, to_chunks


def recurrent_kda(q, k, v, *, g, beta, scale=None, initial_state=None):
    """S <- Diag(e^g) S, then S <- S + beta k^T (v - k S), then o = scale q S (eq. 8.1).

    Shapes: q, k [B, T, H, K], v [B, T, H, V], g [B, T, H, K], beta [B, T, H], initial_state
    [B, H, K, V] or None (zeros) -> o [B, T, H, V], state [B, H, K, V]; T = 1 is a decode step.
    Units: g is the natural logarithm of the decay, <= 0; -inf clears a channel. beta in [0, 2];
    keys of length 1 keep the rule stable. scale multiplies q, default K**-0.5.
    Dtype: computed in float32 (float64 for float64 inputs), as is the state; o in v's dtype.
    Errors: ValueError naming the argument: shapes, dtypes, devices, g > 0, beta outside [0, 2].
    Source: Kimi Linear (arXiv 2510.26692), equation 1.
    """
    args = prepare(q, k, v, g=g, g_axes="B, T, H, K", beta=beta, scale=scale, state=initial_state)
    with full_precision(q.device):
        *rows, S = args
        o = []
        for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in rows), strict=True):
            S = S * g_t.exp()[..., None]
            u = beta_t[..., None] * (v_t - (k_t[..., None, :] @ S).squeeze(-2))
            S = S + k_t[..., :, None] * u[..., None, :]
            o.append((q_t[..., None, :] @ S).squeeze(-2))
    return (torch.stack(o, 1).to(v.dtype) if o else torch.zeros_like(v)), S


def chunk_kda(q, k, v, *, g, beta, scale=None, initial_state=None, chunk_size=64):
    """recurrent_kda by chunks: matrix products inside a chunk, one affine step between chunks.

    Arguments, dtypes, errors and result are those of recurrent_kda; chunk_size is any integer
    >= 1 and changes the speed alone.
    Source: Kimi Linear, section 3.1; the decay inside a chunk is ours, see `inside_chunks`.
    """
    q, k, v_, g, beta, S = prepare(
        q, k, v, g=g, g_axes="B, T, H, K", beta=beta, scale=scale, state=initial_state,
        chunk_size=chunk_size,
    )  # fmt: skip
    T = q.shape[1]
    if T == 0:
        return torch.zeros_like(v), S
    with full_precision(q.device):
        q, k, v_, g, beta = (to_chunks(x, chunk_size) for x in (q, k, v_, g, beta[..., None]))
        Aqk, X, P, R = inside_chunks(q, k, g, beta)
        o, S = solve_chunks(q, k, v_, Aqk, X * beta.mT, P, R, S)
        return from_chunks(o, T, chunk_size).to(v.dtype), S


def inside_chunks(q, k, g, beta):
    """Scores and corrections inside chunks, [..., C, K] -> Aqk [C, C], X [C, C], P, R [C, K].

    Aqk[r, i] = sum_d q_r k_i e^(g_{i+1} + ... + g_r), X = (I + diag(beta) Akk)^-1, and P and R sum
    g from the chunk's start to r, and from r+1 to its end.

    The textbook writes the decay between i and r as e^(G_r - G_i) with running sums G, either
    split into e^(G_r) e^(-G_i), which overflows as soon as a channel forgets more than e^88, or
    as a difference, which loses digits and is NaN after a reset. Here nothing is subtracted.
    Blocks of one token are joined into blocks of 2, 4, ... C. When two blocks meet, the decay from
    i (left) to r (right) goes through the border between them:

        e^(sum from i+1 to the border) * e^(sum from the border to r) = e^(R_i) e^(P_r),

    two sums of numbers that are never positive, kept up by additions alone (eq. 8.3). So no exponential
    exceeds 1, underflow means forgotten, and -inf stays -inf. The inverse grows along with the blocks.
    """
    C = q.shape[-2]
    beta_k = beta * k
    Aqk = (q * k).sum(-1)[..., None, None]
    X = torch.ones_like(Aqk)
    P, R = g, torch.zeros_like(g)
    size = 1
    while size < C:
        (P_left, P_right), (R_left, R_right) = halves(P, size), halves(R, size)
        to_border = (halves(k, size)[0] * R_left.exp()).mT
        from_border = P_right.exp()
        Aqk = merge(Aqk, (halves(q, size)[1] * from_border) @ to_border)
        X = merge(X, inverse_low(X, (halves(beta_k, size)[1] * from_border) @ to_border))
        total_left, total_right = P_left[..., -1:, :], P_right[..., -1:, :]
        P = torch.stack([P_left, P_right + total_left], -3).flatten(-4, -2)
        R = torch.stack([R_left + total_right, R_right], -3).flatten(-4, -2)
        size *= 2
    return Aqk.squeeze(-3), X.squeeze(-3), P, R


def kda_log_decay(z, A_log, dt_bias, lower_bound=None):
    """g = -e^A_log softplus(z + dt_bias); with a lower bound, g = lower_bound sigmoid(e^A_log (z + dt_bias)).

    Equation 8.2. The first form (Kimi Linear) has no floor; the second (Kimi K3, lower_bound = -5) is another
    function, not a clamp: every decay stays above e^lower_bound.
    Shapes: z [B, T, H, K], A_log [H], dt_bias [H * K] -> g [B, T, H, K].
    Units: g is a natural logarithm, <= 0. Dtype: float32 (float64 for float64 z) whatever z's.
    Errors: ValueError for shapes, dtypes, devices, or a lower_bound that is not negative.
    Source: Kimi Linear, equation 10 and `fla/layers/kda.py`; Kimi K3 (arXiv 2607.24653), equation 3.
    """
    dtype = compute_dtype(z=z)
    check_float("A_log", A_log, z, "z")
    check_float("dt_bias", dt_bias, z, "z")
    check_shape("z", z, "B, T, H, K", (None,) * 4)
    H, K = z.shape[2:]
    check_shape("A_log", A_log, "H", (H,), "z", z)
    check_shape("dt_bias", dt_bias, "H * K", (H * K,), "z", z)
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"lower_bound must be negative or None, got {lower_bound!r}")
    rate = A_log.to(dtype).exp()[:, None]
    z = z.to(dtype) + dt_bias.to(dtype).view(H, K)
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)

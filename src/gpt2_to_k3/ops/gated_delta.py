"""One decay per head: Mamba-2's rule (decay alone) and Gated DeltaNet (decay, then the delta rule)."""

import torch

from ._check import full_precision, prepare
from ._chunk import from_chunks, segment_sums, solve_chunks, to_chunks, unit_lower_inverse


def recurrent_gated_delta_rule(q, k, v, *, g, beta, scale=None, initial_state=None):
    """S <- e^g S, then S <- S + beta k^T (v - k S), then o = scale q S (eq. 7.2): decay, correct, read.

    Shapes: q, k [B, T, H, K], v [B, T, H, V], g, beta [B, T, H], initial_state [B, H, K, V] or
    None (zeros) -> o [B, T, H, V], state [B, H, K, V]; T = 1 is a decode step.
    Units: g is the natural logarithm of the decay, <= 0; -inf clears the state. beta in [0, 2];
    keys of length 1 keep the rule stable. scale multiplies q, default K**-0.5.
    Dtype: computed in float32 (float64 for float64 inputs), as is the state; o in v's dtype.
    Errors: ValueError naming the argument: shapes, dtypes, devices, g > 0, beta outside [0, 2].
    Source: Gated Delta Networks (arXiv 2412.06464), equation 10, in the row convention. The decay
    comes before the read: k reads e^g S, not S.
    """
    args = prepare(q, k, v, g=g, beta=beta, scale=scale, state=initial_state)
    with full_precision(q.device):
        *rows, S = args
        o = []
        for q_t, k_t, v_t, g_t, beta_t in zip(*(x.unbind(1) for x in rows), strict=True):
            S = S * g_t.exp()[..., None, None]
            u = beta_t[..., None] * (v_t - (k_t[..., None, :] @ S).squeeze(-2))
            S = S + k_t[..., :, None] * u[..., None, :]
            o.append((q_t[..., None, :] @ S).squeeze(-2))
    return (torch.stack(o, 1).to(v.dtype) if o else torch.zeros_like(v)), S


def chunk_gated_delta_rule(q, k, v, *, g, beta, scale=None, initial_state=None, chunk_size=64):
    """recurrent_gated_delta_rule by chunks: products inside a chunk, one affine step between chunks.

    Arguments, dtypes, errors and result are those of recurrent_gated_delta_rule; chunk_size is
    any integer >= 1 and changes the speed alone.
    Source: Gated Delta Networks, section 3.3.
    """
    q, k, v_, g, beta, S = prepare(
        q, k, v, g=g, beta=beta, scale=scale, state=initial_state, chunk_size=chunk_size
    )
    T = q.shape[1]
    if T == 0:
        return torch.zeros_like(v), S
    with full_precision(q.device):
        q, k, v_, g, beta = (to_chunks(x, chunk_size) for x in (q, k, v_, g, beta[..., None]))
        sums = segment_sums(g)
        decay = sums.exp().tril()
        X = unit_lower_inverse(beta * (k @ k.mT * decay).tril(-1)) * beta.mT
        P, R = g.cumsum(-1)[..., None], sums[..., -1, :, None]
        o, S = solve_chunks(q, k, v_, q @ k.mT * decay, X, P, R, S)
        return from_chunks(o, T, chunk_size).to(v.dtype), S


def recurrent_decay(q, k, v, *, g, scale=None, initial_state=None):
    """S <- e^g S + k^T v, then o = scale q S: linear attention that forgets (eq. 7.1).

    Shapes, units, dtypes and errors are those of recurrent_gated_delta_rule, without beta; a write
    strength goes into v. Source: Mamba-2 (arXiv 2405.21060), scalar-identity state space model.
    """
    q, k, v_, g, _, S = prepare(q, k, v, g=g, scale=scale, state=initial_state)
    with full_precision(q.device):
        o = []
        for q_t, k_t, v_t, g_t in zip(*(x.unbind(1) for x in (q, k, v_, g)), strict=True):
            S = S * g_t.exp()[..., None, None] + k_t[..., :, None] * v_t[..., None, :]
            o.append((q_t[..., None, :] @ S).squeeze(-2))
    return (torch.stack(o, 1).to(v.dtype) if o else torch.zeros_like(v)), S


def chunk_decay(q, k, v, *, g, scale=None, initial_state=None, chunk_size=64):
    """recurrent_decay by chunks: masked scores inside a chunk, a decayed sum between chunks.

    Arguments, dtypes, errors and result are those of recurrent_decay; chunk_size is any integer
    >= 1 and changes the speed alone. Source: Mamba-2, section 6.
    """
    q, k, v_, g, _, S = prepare(
        q, k, v, g=g, scale=scale, state=initial_state, chunk_size=chunk_size
    )
    T = q.shape[1]
    if T == 0:
        return torch.zeros_like(v), S
    with full_precision(q.device):
        q, k, v_, g = (to_chunks(x, chunk_size) for x in (q, k, v_, g))
        sums = segment_sums(g)
        P, R = g.cumsum(-1)[..., None], sums[..., -1, :, None]
        written = (k * R.exp()).mT @ v_
        starts = []
        for decay, new in zip(P[..., -1:, :].exp().unbind(2), written.unbind(2), strict=True):
            starts.append(S)
            S = decay * S + new
        o = (q @ k.mT * sums.exp().tril()) @ v_ + (q * P.exp()) @ torch.stack(starts, 2)
        return from_chunks(o, T, chunk_size).to(v.dtype), S

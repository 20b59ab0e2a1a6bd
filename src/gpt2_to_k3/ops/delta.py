"""The delta rule: a state that corrects what a key already reads before it writes."""

import torch

from ._check import full_precision, prepare
from ._chunk import from_chunks, solve_chunks, to_chunks, unit_lower_inverse


def recurrent_delta_rule(q, k, v, *, beta, scale=None, initial_state=None):
    """S <- S + beta k^T (v - k S), then o = scale q S (eq. 5.1): a step on half (k S - v)^2, then a read.

    Shapes: q, k [B, T, H, K], v [B, T, H, V], beta [B, T, H], initial_state [B, H, K, V] or None
    (zeros) -> o [B, T, H, V], state [B, H, K, V]; T = 1 is a decode step.
    Units: beta in [0, 2]; keys of length 1 keep the rule stable, and then beta = 1 replaces a value exactly.
    scale multiplies q, default K**-0.5.
    Dtype: computed in float32 (float64 for float64 inputs), as is the state; o in v's dtype.
    Errors: ValueError naming the argument: shapes, dtypes, devices, beta outside [0, 2].
    Source: Schlag et al. 2021 (arXiv 2102.11174), equations 20 to 25; Widrow and Hoff 1960.
    """
    q, k, v_, _, beta, S = prepare(q, k, v, beta=beta, scale=scale, state=initial_state)
    with full_precision(q.device):
        o = []
        for q_t, k_t, v_t, beta_t in zip(*(x.unbind(1) for x in (q, k, v_, beta)), strict=True):
            u = beta_t[..., None] * (v_t - (k_t[..., None, :] @ S).squeeze(-2))
            S = S + k_t[..., :, None] * u[..., None, :]
            o.append((q_t[..., None, :] @ S).squeeze(-2))
    return (torch.stack(o, 1).to(v.dtype) if o else torch.zeros_like(v)), S


def chunk_delta_rule(q, k, v, *, beta, scale=None, initial_state=None, chunk_size=64):
    """recurrent_delta_rule by chunks (eq. 6.2, 6.3): a triangular solve inside, an affine step between.

    Arguments, dtypes, errors and result are those of recurrent_delta_rule; chunk_size is any
    integer >= 1 and changes the speed alone.
    Source: Yang et al. 2024 (arXiv 2406.06484), WY representation and UT transform.
    """
    q, k, v_, _, beta, S = prepare(
        q, k, v, beta=beta, scale=scale, state=initial_state, chunk_size=chunk_size
    )
    T = q.shape[1]
    if T == 0:
        return torch.zeros_like(v), S
    with full_precision(q.device):
        q, k, v_, beta = (to_chunks(x, chunk_size) for x in (q, k, v_, beta[..., None]))
        X = unit_lower_inverse(beta * (k @ k.mT).tril(-1)) * beta.mT
        no_decay = torch.zeros_like(beta)
        o, S = solve_chunks(q, k, v_, (q @ k.mT).tril(), X, no_decay, no_decay, S)
        return from_chunks(o, T, chunk_size).to(v.dtype), S

"""Linear attention: a positive kernel instead of the exponential, and so a state instead of a cache."""

import torch

from ._check import check_values, full_precision, prepare, prepare_state
from ._chunk import from_chunks, to_chunks


def elu_feature_map(x):
    """phi(x) = ELU(x) + 1: x + 1 for x > 0, e^x otherwise; positive, of x's shape and dtype.

    Another positive kernel, not an approximation of softmax's exponential.
    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equation 7.
    """
    # F.elu(x) + 1 would round e^x to 0 below x = -17: e^x - 1 is -1 in float32.
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def recurrent_linear_attention(q, k, v, *, scale=None, initial_state=None, normalize=True):
    """S <- S + k^T v, z <- z + k, then o = q S / (q . z); without normalize, o = scale q S (eq. 4.2).

    Shapes: q, k [B, T, H, K], already through a feature map, v [B, T, H, V], initial_state the
    pair (S [B, H, K, V], z [B, H, K]) or None (zeros) -> o [B, T, H, V], (S, z).
    Units: scale multiplies q, default K**-0.5; the quotient does not feel it.
    Dtype: computed in float32 (float64 for float64 inputs), as are S and z; o in v's dtype.
    Errors: ValueError naming the argument: shapes, dtypes, devices; with normalize, a negative
    feature, which could make the weights' sum 0. If all weights are 0 (underflow), o is 0.
    Source: Katharopoulos et al. 2020, equations 16 to 20.
    """
    q, k, v_, S, z = _prepare(q, k, v, scale, initial_state, normalize)
    with full_precision(q.device):
        o = []
        for q_t, k_t, v_t in zip(*(x.unbind(1) for x in (q, k, v_)), strict=True):
            S, z = S + k_t[..., :, None] * v_t[..., None, :], z + k_t
            read, weight = (q_t[..., None, :] @ S).squeeze(-2), (q_t * z).sum(-1, keepdim=True)
            o.append(_divide(read, weight) if normalize else read)
    return (torch.stack(o, 1).to(v.dtype) if o else torch.zeros_like(v)), (S, z)


def parallel_linear_attention(q, k, v, *, scale=None, initial_state=None, normalize=True):
    """recurrent_linear_attention as one masked product: o = tril(q k^T) v / tril(q k^T) 1 (eq. 4.1), quadratic in T.

    Arguments, dtypes, errors and result are those of recurrent_linear_attention.
    Source: Katharopoulos et al. 2020, equation 5 with a causal mask.
    """
    q, k, v_, S, z = _prepare(q, k, v, scale, initial_state, normalize)
    with full_precision(q.device):
        q, k, v_ = (x.transpose(1, 2) for x in (q, k, v_))
        scores = (q @ k.mT).tril()
        o = scores @ v_ + q @ S
        if normalize:
            o = _divide(o, scores.sum(-1, keepdim=True) + q @ z[..., None])
        return o.transpose(1, 2).to(v.dtype), (S + k.mT @ v_, z + k.sum(-2))


def chunk_linear_attention(
    q, k, v, *, scale=None, initial_state=None, chunk_size=64, normalize=True
):
    """recurrent_linear_attention by chunks: masked products inside, running sums between.

    Arguments, dtypes, errors and result are those of recurrent_linear_attention; chunk_size is
    any integer >= 1 and changes the speed alone.
    """
    q, k, v_, S, z = _prepare(q, k, v, scale, initial_state, normalize, chunk_size)
    T = q.shape[1]
    if T == 0:
        return torch.zeros_like(v), (S, z)
    with full_precision(q.device):
        q, k, v_ = (to_chunks(x, chunk_size) for x in (q, k, v_))
        sums = torch.cat([S[:, :, None], k.mT @ v_], 2).cumsum(2)
        counts = torch.cat([z[:, :, None], k.sum(-2)], 2).cumsum(2)
        scores = (q @ k.mT).tril()
        o = scores @ v_ + q @ sums[:, :, :-1]
        if normalize:
            o = _divide(o, scores.sum(-1, keepdim=True) + q @ counts[:, :, :-1, :, None])
        return from_chunks(o, T, chunk_size).to(v.dtype), (sums[:, :, -1], counts[:, :, -1])


def _divide(x, by):
    # Where every weight has underflowed to 0 so has what they weigh: 0 / 1 instead of 0 / 0. Dividing
    # by a tiny number would give 0 as well, but with a gradient of inf * 0 = NaN.
    return x / by.masked_fill(by < torch.finfo(by.dtype).tiny, 1.0)


def _prepare(q, k, v, scale, initial_state, normalize, chunk_size=1):
    if initial_state is None:
        initial_state = (None, None)
    if not isinstance(initial_state, (tuple, list)) or len(initial_state) != 2:
        got = type(initial_state).__name__
        raise ValueError(f"initial_state must be the pair (S, z) or None, got {got}")
    S, z = initial_state
    scale = 1.0 if normalize else scale
    scaled_q, k_, v_, _, _, S = prepare(q, k, v, scale=scale, state=S, chunk_size=chunk_size)
    if normalize:
        for name, x in (("q", q), ("k", k)):
            check_values(name, x, lambda x: x >= 0, "a feature >= 0 where normalize=True")
        # The quotient does not feel q's size: with 1 as its largest feature, products of two small
        # features do not underflow.
        scaled_q = _divide(scaled_q, scaled_q.detach().amax(-1, keepdim=True))
    B, _, H, K = q.shape
    z = prepare_state(z, (B, H, K), q, S.dtype, "initial_state[1]", "B, H, K")
    return scaled_q, k_, v_, S, z

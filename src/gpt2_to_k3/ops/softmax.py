"""Softmax attention in its plain quadratic form: the definition that faster forms must equal."""

import torch

from ._check import check_shape, compute_dtype, full_precision


def softmax_attention(q, k, v, *, scale=None, causal=True, window=None):
    """o_i = sum_j softmax_j(scale * q_i . k_j) v_j over the keys j that row i may see.

    Shapes: q [B, Tq, H, K], k [B, Tk, H, K], v [B, Tk, H, V] -> o [B, Tq, H, V]; any T may be 0.
    Mask: causal row i stands at position p = Tk - Tq + i (the last query beside the last key) and
    sees the keys at positions <= p; window=W keeps only p-W+1..p. A row that sees no key gives 0.
    Units: scale multiplies q . k, default K**-0.5; window counts keys, the row's own included.
    Dtype: computed in float32 (float64 for float64 inputs), o in v's dtype.
    Errors: ValueError for shapes, dtypes or devices that do not match, for window < 1, and for a
    window with causal=False.
    Source: equation (1.2); Vaswani et al. 2017 (arXiv 1706.03762), equation 1; window: Beltagy et al. 2020
    (arXiv 2004.05150), section 3.1, its causal half.
    """
    dtype = compute_dtype(q=q, k=k, v=v)
    check_shape("q", q, "B, Tq, H, K", (None,) * 4)
    B, Tq, H, K = q.shape
    check_shape("k", k, "B, Tk, H, K", (B, None, H, K), "q", q)
    Tk = k.shape[1]
    check_shape("v", v, "B, Tk, H, V", (B, Tk, H, None), "k", k)
    if K == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected at least one key channel K")
    if window is not None:
        if type(window) is not int or window < 1:
            raise ValueError(f"window must be an integer >= 1 or None, got {window!r}")
        if not causal:
            raise ValueError(f"window={window} counts keys backwards and needs causal=True")
    scale = K**-0.5 if scale is None else scale

    with full_precision(q.device):
        scores = torch.einsum("bihk,bjhk->bhij", q.to(dtype) * scale, k.to(dtype))
        if not causal:
            weights = scores.softmax(-1)
        else:
            p = torch.arange(Tk - Tq, Tk, device=q.device)[:, None]
            j = torch.arange(Tk, device=q.device)
            hidden = j > p
            if window is not None:
                hidden = hidden | (j <= p - window)
            # A row of -inf would be 0/0 = NaN in softmax and in its backward pass. With the lowest
            # finite number such a row is uniform instead, and the second mask makes it 0; in any
            # other row a hidden key's weight has already underflowed to exactly 0.
            weights = scores.masked_fill(hidden, torch.finfo(dtype).min).softmax(-1)
            weights = weights.masked_fill(hidden, 0.0)
        return torch.einsum("bhij,bjhv->bihv", weights, v.to(dtype)).to(v.dtype)

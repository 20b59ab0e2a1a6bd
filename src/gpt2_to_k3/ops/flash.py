"""FlashAttention: exact softmax attention tile by tile, without a matrix of scores in memory."""

import torch

from ._check import check_shape, compute_dtype, full_precision


def merge_softmax(o_a, lse_a, o_b, lse_b):
    """Softmax readings of two disjoint sets of keys become that of both: weights e^lse, normalised (eq. 3.2).

    Shapes: o_a, o_b [..., V]; lse_a, lse_b [...], the logarithms of each side's sum of
    exponentials, -inf where it has no keys -> o [..., V], lse [...].
    The larger lse is taken out first, so no exponential exceeds 1.
    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867); FlashAttention, section 3.1.
    """
    # A constant taken out of numerator and denominator has no gradient; 0 avoids -inf - (-inf).
    m = torch.maximum(lse_a, lse_b).detach()
    m = m.masked_fill(m == -torch.inf, 0.0)
    w_a, w_b = (lse_a - m).exp(), (lse_b - m).exp()
    total = (w_a + w_b).clamp(min=torch.finfo(m.dtype).tiny)
    o = (w_a / total)[..., None] * o_a + (w_b / total)[..., None] * o_b
    return o, torch.where(w_a + w_b > 0, m + total.log(), -torch.inf)


def flash_attention(q, k, v, *, scale=None, causal=True, block_q=64, block_k=64):
    """softmax_attention tile by tile: each tile's scores are read and dropped, the rows merged (eq. 3.2).

    Shapes, mask, dtypes and result are those of ops.softmax_attention. block_q, block_k: rows
    and columns of a tile, integers >= 1. A forward pass needs memory for one tile; under autograd
    all tiles are kept, where the published kernel computes them again.
    Errors: ValueError naming the argument.
    Source: FlashAttention (arXiv 2205.14135), algorithm 1, with the loop over queries outside as
    in FlashAttention-2 (arXiv 2307.08691).
    """
    dtype = compute_dtype(q=q, k=k, v=v)
    check_shape("q", q, "B, Tq, H, K", (None,) * 4)
    B, Tq, H, K = q.shape
    check_shape("k", k, "B, Tk, H, K", (B, None, H, K), "q", q)
    Tk, V = k.shape[1], v.shape[-1]
    check_shape("v", v, "B, Tk, H, V", (B, Tk, H, None), "k", k)
    if K == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected at least one key channel K")
    scale = K**-0.5 if scale is None else scale
    with full_precision(q.device):
        q, k, v_ = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        # No row yet, but a gradient for each input even where no tile is read.
        out = [q[:, :, :0] @ k[:, :, :0].mT @ v_[:, :, :0]]
        for i, columns in tiles(Tq, Tk, causal, block_q, block_k):
            q_i = q[:, :, i : i + block_q] * scale
            position = torch.arange(i, i + q_i.shape[2], device=q.device) + Tk - Tq
            o = q.new_zeros(B, H, q_i.shape[2], V)
            lse = q.new_full((B, H, q_i.shape[2]), -torch.inf)
            for j in columns:
                k_j, v_j = k[:, :, j : j + block_k], v_[:, :, j : j + block_k]
                later = torch.arange(j, j + k_j.shape[2], device=q.device) > position[:, None]
                o, lse = merge_softmax(o, lse, *_read(q_i @ k_j.mT, v_j, later & causal))
            out.append(o)
        return torch.cat(out, 2).transpose(1, 2).to(v.dtype)


def _read(scores, v, hidden):
    """Softmax reading of one tile, and its lse; a row that sees no key reads 0 with lse -inf."""
    scores = scores.masked_fill(hidden, -torch.inf)
    m = scores.detach().amax(-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0.0)
    weights = (scores - m).exp()
    total = weights.sum(-1, keepdim=True)
    safe = total.clamp(min=torch.finfo(total.dtype).tiny)
    lse = torch.where(total > 0, m + safe.log(), -torch.inf)
    return weights @ v / safe, lse.squeeze(-1)


def tiles(Tq, Tk, causal, block_q, block_k):
    """Yield the first row of each query block, and the first columns of the key blocks it reads.

    Under a causal mask, blocks that lie wholly behind the last row's position are left out.
    """
    for name, block in (("block_q", block_q), ("block_k", block_k)):
        if type(block) is not int or block < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {block!r}")
    for i in range(0, Tq, block_q):
        visible = Tk - Tq + min(i + block_q, Tq) if causal else Tk
        yield i, range(0, min(visible, Tk), block_k)


def flash_hbm_bytes(Tq, Tk, K, V, *, causal=True, block_q=64, block_k=64, number_bytes=2):
    """Bytes that flash_attention moves per head between memory and chip: Q and O once, K and V per query block (eq. 3.3).

    With a chip memory of M numbers that holds the blocks, block_q grows like M / K, and the count
    like Tq Tk K^2 / M (FlashAttention, theorem 2). The paper's own loop, keys outside, reads Q
    and O again instead; the order of growth is the same.
    Shapes: numbers of queries and keys, and channels of a key and a value. Units: bytes.
    """
    moved = Tq * (K + V)
    for _, columns in tiles(Tq, Tk, causal, block_q, block_k):
        moved += min(len(columns) * block_k, Tk) * (K + V)
    return moved * number_bytes


def standard_hbm_bytes(Tq, Tk, K, V, *, number_bytes=2):
    """Bytes that the plain form moves per head: the inputs and o once, scores and weights out and in (eq. 3.3).

    Q and K are read, S = Q K^T is written; S is read, the weights P are written; P and V are
    read, O is written: (Tq + Tk)(K + V) + 4 Tq Tk numbers.
    Source: FlashAttention, algorithm 0 and theorem 2.
    """
    return ((Tq + Tk) * (K + V) + 4 * Tq * Tk) * number_bytes

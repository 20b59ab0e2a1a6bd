"""What the chunk forms share: cutting a sequence, a triangular inverse, and the carry between chunks.

Inside a chunk everything is matrix products; between chunks the state follows S <- M S + N. A chunk
is padded to a power of two with empty tokens (key 0, write strength 0, no decay), which change
nothing, so that it can be halved down to single tokens.
"""

import torch
import torch.nn.functional as F


def to_chunks(x, chunk_size):
    """[B, T, H, ...] -> [B, H, N, C, ...]: N chunks of `chunk_size` tokens, padded to C = 2^n."""
    T = x.shape[1]
    chunk_size = min(chunk_size, T)  # more would be padding alone, quadratic in memory
    N, C = -(-T // chunk_size), 1 << (chunk_size - 1).bit_length()
    channels = (0, 0) * (x.ndim - 2)
    if N * chunk_size > T:
        x = F.pad(x, channels + (0, N * chunk_size - T))
    x = x.unflatten(1, (N, chunk_size))
    if C > chunk_size:
        x = F.pad(x, channels + (0, C - chunk_size))
    return x.movedim(3, 1).contiguous()


def from_chunks(o, T, chunk_size):
    """The inverse of to_chunks: [B, H, N, C, V] -> [B, T, H, V]."""
    return o[:, :, :, :chunk_size].movedim(1, 3).flatten(1, 2)[:, :T].contiguous()


def halves(x, size):
    """Cut axis -2 into pairs of blocks of `size`: the left ones and the right ones, [..., n, size, D]."""
    return x.unflatten(-2, (-1, 2, size)).unbind(-3)


def merge(blocks, low):
    """Pairs (a, d) of the diagonal blocks [..., 2n, l, l] become [[a, 0], [low, d]], [..., n, 2l, 2l]."""
    a, d = blocks.unflatten(-3, (-1, 2)).unbind(-3)
    top = torch.cat([a, torch.zeros_like(low)], -1)
    return torch.cat([top, torch.cat([low, d], -1)], -2)


def inverse_low(inverses, low):
    """The low block of [[a, 0], [low, d]]^-1, given a^-1 and d^-1: -d^-1 low a^-1."""
    a, d = inverses.unflatten(-3, (-1, 2)).unbind(-3)
    return -(d @ low @ a)


def unit_lower_inverse(A):
    """(I + A)^-1 for strictly lower triangular A [..., C, C], C a power of two, by halving.

    As exact as forward substitution, in log2(C) steps of products. The product form
    (I - A)(I + A^2)(I + A^4)... is not: with equal keys its terms grow to 1e9 and cancel.
    """
    C = A.shape[-1]
    X = A.new_ones(*A.shape[:-2], C, 1, 1)
    size = 1
    while size < C:
        pairs = A.unflatten(-1, (-1, 2 * size)).unflatten(-3, (-1, 2 * size))
        low = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]
        X = merge(X, inverse_low(X, low))
        size *= 2
    return X.squeeze(-3)


def segment_sums(g):
    """D[r, i] = g_{i+1} + ... + g_r for i <= r (eq. 7.3), [..., C] -> [..., C, C]; 0 elsewhere.

    Each is summed by itself. A difference of two running sums would lose digits when both are
    large, and be -inf - (-inf) = NaN after a reset.
    """
    C = g.shape[-1]
    return g[..., :, None].expand(*g.shape, C).tril(-1).cumsum(-2)


def carry(M, N, S):
    """The state at the start of each chunk, [B, H, N, K, V], and after the last: S <- M S + N.

    Two steps are one of the same kind, M2 M1 and M2 N1 + N2, so the chain is as deep as log2 of
    its length: a loop is a little faster on a CPU, this on a GPU, and a compiler can take it in.
    """
    n = N.shape[2]
    if n == 1:
        return S[:, :, None], M[:, :, 0] @ S + N[:, :, 0]
    even = n - n % 2
    M1, M2 = M[:, :, 0:even:2], M[:, :, 1:even:2]
    N1, N2 = N[:, :, 0:even:2], N[:, :, 1:even:2]
    starts, last = carry(M2 @ M1, M2 @ N1 + N2, S)
    starts = torch.stack([starts, M1 @ starts + N1], 3).flatten(2, 3)
    if n % 2:
        starts = torch.cat([starts, last[:, :, None]], 2)
        last = M[:, :, -1] @ last + N[:, :, -1]
    return starts, last


def solve_chunks(q, k, v, Aqk, X, P, R, S):
    """Outputs [B, H, N, C, V] and the last state of a delta rule, from what each chunk knows by itself.

    Aqk [C, C] are the decayed scores q_r k_i for i <= r, X = (I + diag(beta) Akk)^-1 diag(beta).
    P and R are the log-decays from the chunk's start to r, and from after r to its end
    ([..., C, 1] or [..., C, K]; never positive). With W = X (k e^P) and U = X v the values
    that a chunk writes are U - W S, all at once (UT transform, eq. 6.2; arXiv 2406.06484, section 3).
    """
    decayed_k = k * P.exp()
    to_end = (k * R.exp()).mT
    W, U = X @ decayed_k, X @ v
    M = torch.diag_embed(P[..., -1, :].exp().expand(*k.shape[:-2], k.shape[-1])) - to_end @ W
    starts, S = carry(M, to_end @ U, S)
    return (q * P.exp() - Aqk @ W) @ starts + Aqk @ U, S

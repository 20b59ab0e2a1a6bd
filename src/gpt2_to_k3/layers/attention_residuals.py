"""Attention residuals: what a sublayer reads is a softmax-weighted mean over the depth before it.

A sublayer is an attention or a feed-forward part: a transformer layer has two.
"""

import torch
from torch import nn

from ..ops import merge_softmax
from ..ops._check import full_precision
from .norm import RMSNorm, at_least_float32, check_sizes


def source_weights(w, sources, eps):
    """alpha = softmax_i(w . s_i / sqrt(mean of s_i^2 + eps)): the share of each source (eq. 11.1).

    w is the learned query times the weight of the RMSNorm of the sources; the scores have no
    1 / sqrt(D). w = 0 weighs all sources alike.

    Shapes: w [D], or S queries at once [S, D]; sources, a sequence of N tensors [..., D] ->
    alpha [N, ...] or [S, N, ...], with sum 1 over N.
    Units: eps is added to the mean of squares.
    Dtype: float32 (float64 for float64 w or sources).
    Errors: ValueError without a source, if sources are not floating point or differ in shape,
    dtype or device, or if w does not have their D.
    Source: Attention Residuals (arXiv 2603.15031), section 3.
    """
    return _scores(w, _stack(sources), eps).softmax(w.ndim - 1)


def mix_sources(w, sources, eps):
    """h = sum over i of alpha_i s_i (eq. 11.1), alpha = source_weights: the sources are not normed.

    w = 0 gives their mean. A plain residual stream is their sum, N times as large; the norm before
    the next sublayer takes the factor out.

    Shapes: w [D], sources: N tensors [..., D] -> h [..., D].
    Dtype: computed in float32 (float64 for float64 w or sources), h in the sources'.
    Errors: as source_weights, and ValueError for more than one query.
    Source: Attention Residuals (arXiv 2603.15031), section 3; `fla/ops/attnres/naive.py`.
    """
    _one_query(w)
    s = _stack(sources)
    return _read(_scores(w, s, eps).softmax(w.ndim - 1), s).to(sources[0].dtype)


def read_blocks(w, sources, eps):
    """Phase 1 of inference: the S queries of a block read all finished sources at once (eq. 11.3).

    It comes before any of the block's sublayers: a query is a weight and waits for no activation.

    Shapes: w [S, D], sources: N tensors [..., D] -> o [S, ..., D], lse [S, ...]: each softmax
    reading, and the logarithm of its sum of exponentials.
    Dtype: float32 (float64 for float64 w or sources).
    Errors: as source_weights.
    Source: Attention Residuals (arXiv 2603.15031), section 4.
    """
    s = _stack(sources)
    scores = _scores(w, s, eps)
    return _read(scores.softmax(w.ndim - 1), s), scores.logsumexp(w.ndim - 1)


def read_partial(w, o, lse, partial, eps):
    """Phase 2: the open block's sum joins a reading of phase 1, by merge_softmax (eq. 11.3).

    A source alone is its own reading, and its score is that reading's lse.

    Shapes: w [D]; o [..., D] and lse [...] of read_blocks; partial [..., D] -> h [..., D], equal
    to mix_sources of all sources and partial.
    Dtype: computed in o's, h in partial's.
    Errors: as mix_sources, with partial as the only source; ValueError if o does not have partial's
    shape, or lse that shape without D.
    Source: Attention Residuals (arXiv 2603.15031), section 4.
    """
    _one_query(w)
    if o.shape != partial.shape:
        raise ValueError(f"o has shape {tuple(o.shape)}, expected {list(partial.shape)} as partial")
    if lse.shape != o.shape[:-1]:
        raise ValueError(f"lse has shape {tuple(lse.shape)}, expected {list(o.shape[:-1])} as o")
    (score,) = _scores(w, _stack([partial]), eps)
    return merge_softmax(o, lse, partial.to(o.dtype), score)[0].to(partial.dtype)


class AttentionResidual(nn.Module):
    """h = mix_sources(query * norm.weight, sources, eps): what one sublayer, or the output, reads.

    The query, w in equation 11.1, starts at zero, so h starts as the mean. Where there is one
    source alone, as before the first sublayer, no weight changes h, and the gradients are 0.

    Shapes: sources, a sequence of [..., hidden_size] -> h [..., hidden_size]; query and
    norm.weight [hidden_size].
    Dtype: as mix_sources.
    Errors: as mix_sources, and ValueError if hidden_size is not an integer >= 1.
    Source: Attention Residuals (arXiv 2603.15031), section 3; Kimi K3 (arXiv 2607.24653),
    section 2.2.
    """

    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        check_sizes(hidden_size=hidden_size)
        self.query = nn.Parameter(torch.zeros(hidden_size))
        self.norm = RMSNorm(hidden_size, eps)

    def score_vector(self):
        """Return query * norm.weight [hidden_size], in float32 or float64."""
        return at_least_float32(self.query) * at_least_float32(self.norm.weight)

    def forward(self, sources):
        """Mix the sources, a sequence of [..., hidden_size]."""
        return mix_sources(self.score_vector(), sources, self.norm.eps)


def attention_residuals(x, sublayers, mixers, block_size):
    """y_i = f_i(mix_i(b_0, ..., b_n, p)) (eq. 11.2): b_0 = x, b_n a block's sum, p the open one's.

    block_size sublayers are a block; the last one may be shorter. A block's first sublayer has no
    p to read. The last mixer reads all there is at the end, and its reading is the result.

    block_size=1 is the full form: every y is a source by itself. One block of all sublayers has two
    sources, x and the sum of the others. Kimi K3 has block_size=24, 12 layers of two sublayers.

    Shapes: x [..., D]; sublayers, L functions [..., D] -> [..., D]; mixers, L + 1 modules
    AttentionResidual -> [..., D].
    Dtype: sums in x's.
    Errors: ValueError for a block_size that is not an integer >= 1, or another number of mixers.
    Source: Attention Residuals (arXiv 2603.15031), sections 3 and 4; Kimi K3 (arXiv 2607.24653),
    section 2.2.
    """
    _check_stack(sublayers, mixers, block_size)
    sources = [x]
    for i, f in enumerate(sublayers):
        y = f(mixers[i](sources)).to(x.dtype)
        if i % block_size == 0:
            sources.append(y)
        else:
            sources[-1] = sources[-1] + y
    return mixers[-1](sources)


def two_phase_attention_residuals(x, sublayers, mixers, block_size):
    """attention_residuals, its finished blocks read once a block, not once a sublayer (eq. 11.3).

    Shapes, dtype: as attention_residuals.
    Errors: as attention_residuals, and ValueError if the mixers' eps differ.
    Source: Attention Residuals (arXiv 2603.15031), section 4.
    """
    _check_stack(sublayers, mixers, block_size)
    eps = mixers[-1].norm.eps
    if any(mix.norm.eps != eps for mix in mixers):
        raise ValueError(f"mixers must have one eps, got {sorted({m.norm.eps for m in mixers})}")
    sources = [x]
    for start in range(0, len(sublayers), block_size):
        block = slice(start, min(start + block_size, len(sublayers)))
        w = torch.stack([mix.score_vector() for mix in mixers[block]])
        partial = None
        for f, w_i, o, lse in zip(sublayers[block], w, *read_blocks(w, sources, eps), strict=True):
            if partial is None:
                partial = f(o.to(x.dtype)).to(x.dtype)
            else:
                partial = partial + f(read_partial(w_i, o, lse, partial, eps)).to(x.dtype)
        sources.append(partial)
    return mixers[-1](sources)


def _one_query(w):
    if w.ndim != 1:
        raise ValueError(f"w has shape {tuple(w.shape)}, expected [D]")


def _scores(w, s, eps):
    """[N, ...] for w [D], [S, N, ...] for w [S, D]; s [N, ..., D]."""
    if w.ndim not in (1, 2) or w.shape[-1] != s.shape[-1]:
        raise ValueError(
            f"w has shape {tuple(w.shape)}, expected [D] or [S, D] with D = {s.shape[-1]}"
        )
    dtype = torch.promote_types(w.dtype, s.dtype)
    w, s = w.to(dtype), s.to(dtype)
    with full_precision(s.device):
        scores = torch.einsum("n...d,d->n..." if w.ndim == 1 else "n...d,sd->sn...", s, w)
    return scores * (s.square().mean(-1) + eps).rsqrt()


def _read(alpha, s):
    with full_precision(s.device):
        subscripts = "n...,n...d->...d" if alpha.ndim < s.ndim else "sn...,n...d->s...d"
        return torch.einsum(subscripts, alpha, s.to(alpha.dtype))


def _stack(sources):
    """Return the sources as one tensor [N, ..., D] of float32 or float64."""
    if len(sources) == 0:
        raise ValueError("sources must hold at least one tensor [..., D], got none")
    a = sources[0]
    if not a.is_floating_point():
        raise ValueError(f"sources must be floating point tensors, got {a.dtype}")
    for i, s in enumerate(sources):
        if s.ndim < 1 or s.shape != a.shape:
            raise ValueError(
                f"sources[{i}] has shape {tuple(s.shape)}, expected [..., D], and that of "
                f"sources[0], which has {tuple(a.shape)}"
            )
        if (s.dtype, s.device) != (a.dtype, a.device):
            raise ValueError(
                f"sources[{i}] is {s.dtype} on {s.device}, but sources[0] is {a.dtype} "
                f"on {a.device}"
            )
    return at_least_float32(torch.stack(tuple(sources)))


def _check_stack(sublayers, mixers, block_size):
    check_sizes(block_size=block_size)
    if len(mixers) != len(sublayers) + 1:
        raise ValueError(
            f"mixers has length {len(mixers)}, expected {len(sublayers) + 1}: one for each of the "
            f"{len(sublayers)} sublayers, and one for the output"
        )

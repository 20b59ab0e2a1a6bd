"""Normalisation: RMSNorm of channels, and keys of length 1."""

import math

import torch
from torch import nn


def at_least_float32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))


def l2norm(x, eps=1e-6):
    """y = x / sqrt(sum of x^2 over the last axis + eps): a vector of length 1, or 0 for a zero vector.

    Shapes: x [..., K] -> y [..., K].
    Units: eps is added to the sum, so it is a squared length: vectors much shorter than sqrt(eps)
    stay short. Added to the mean, as in RMSNorm, it would be K times larger.
    Dtype: computed in float32 (float64 for float64 x), y in x's.
    Errors: none. A zero vector has finite gradients, which division by its length does not have.
    Source: flash-linear-attention, `fla/modules/l2norm.py`.
    """
    wide = at_least_float32(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean of x^2 over the last axis + eps).

    Shapes: x [..., dim] -> y [..., dim]; weight [dim], 1 at the start. Given [B, T, H, dim], it
    norms each head by itself, with one weight for all heads.
    Units: eps is added to the mean, unlike l2norm's.
    Dtype: computed in float32 (float64 for float64 x or weight) and rounded once, to x's.
    Errors: ValueError if the last axis of x is not dim, if dim is not an integer >= 1, or if eps is
    not finite and >= 0.
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """

    def __init__(self, dim, eps):
        super().__init__()
        check_sizes(dim=dim)
        if not 0 <= eps < math.inf:
            raise ValueError(f"eps must be finite and >= 0, got {eps!r}")
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        """Norm x [..., dim]."""
        if x.ndim < 1 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [..., {self.dim}]")
        wide = at_least_float32(x)
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (self.weight * wide).to(x.dtype)


def check_sizes(**sizes):
    """Raise ValueError naming the first size that is not an integer >= 1."""
    for name, n in sizes.items():
        if type(n) is not int or n < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {n!r}")

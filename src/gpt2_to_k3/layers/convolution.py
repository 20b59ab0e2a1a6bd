"""The short convolution: each channel sees the last few tokens before a memory does."""

import torch
import torch.nn.functional as F
from torch import nn

from .norm import at_least_float32, check_sizes


class ShortConvolution(nn.Module):
    """y_t = SiLU(sum over j of weight[j] * x_{t - kernel_size + 1 + j}), each channel by itself.

    The last tap is the token itself, and the first tokens see zeros before them. What a later call
    needs of this one is its tail: the last kernel_size - 1 inputs.

    Shapes: x [B, T, dim], tail [B, kernel_size - 1, dim] or None (zeros) -> y [B, T, dim], the
    new tail. T may be 0, 1 or shorter than the kernel; weight [dim, 1, kernel_size], as nn.Conv1d's.
    Units: kernel_size counts tokens, itself included.
    Dtype: computed in float32 (float64 for float64 x); y and tail in x's.
    Errors: ValueError for a shape, or a tail of another dtype or device than x's. The given tail
    is not changed.
    Source: Gated Delta Networks (arXiv 2412.06464), section 3.4; `fla/modules/convolution.py`.
    """

    def __init__(self, dim, kernel_size=4):
        super().__init__()
        check_sizes(dim=dim, kernel_size=kernel_size)
        self.dim, self.kernel_size = dim, kernel_size
        self.weight = nn.Parameter(torch.empty(dim, 1, kernel_size))
        nn.init.uniform_(self.weight, -(kernel_size**-0.5), kernel_size**-0.5)  # as nn.Conv1d

    def forward(self, x, tail=None):
        """Convolve x [B, T, dim], which follows the tail."""
        if x.ndim != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, {self.dim}]")
        B, T, _ = x.shape
        before = (B, self.kernel_size - 1, self.dim)
        if tail is None:
            tail = x.new_zeros(before)
        elif tail.shape != before:
            raise ValueError(f"tail has shape {tuple(tail.shape)}, expected {list(before)}")
        elif (tail.dtype, tail.device) != (x.dtype, x.device):
            raise ValueError(
                f"tail is {tail.dtype} on {tail.device}, but x is {x.dtype} on {x.device}"
            )
        seen = torch.cat([tail, x], dim=1)
        # Tap by tap: F.conv1d refuses T = 0, where there is less than one kernel to see.
        y = sum(
            weight * at_least_float32(seen[:, j : j + T])
            for j, weight in enumerate(self.weight.squeeze(1).unbind(-1))
        )
        # A copy: a view would keep all T inputs alive.
        return F.silu(y).to(x.dtype), seen[:, T:].clone()

"""The memory of a delta-rule layer: as large after a million tokens as before the first."""

import torch

from .norm import check_sizes


class RecurrentCache:
    """Keep S [B, H, K, V], and the tail [B, kernel_size - 1, C] of each short convolution.

    Use it under torch.no_grad(): otherwise S keeps the graph of every token alive. It never
    overflows, and nothing in it grows.

    Units: length counts the tokens seen.
    Dtype: the tails as given; S in float32 (float64 for float64), since a sum over thousands of
    tokens in 16 bits drifts.
    Errors: ValueError for a size that is not an integer >= 1 (batch_size: >= 0), or a dtype that
    is not floating point.
    Source: `fla/models/utils.py` (`conv_state`, `recurrent_state`).
    """

    def __init__(
        self, batch_size, num_heads, key_dim, value_dim, conv_dims, kernel_size, *, dtype, device
    ):
        if type(batch_size) is not int or batch_size < 0:
            raise ValueError(f"batch_size must be an integer >= 0, got {batch_size!r}")
        check_sizes(num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)
        check_sizes(**{f"conv_dims[{i}]": n for i, n in enumerate(conv_dims)})
        check_sizes(kernel_size=kernel_size)
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating point dtype, got {dtype}")
        options = dict(dtype=dtype, device=device)
        self.tails = [torch.zeros(batch_size, kernel_size - 1, n, **options) for n in conv_dims]
        options["dtype"] = torch.promote_types(dtype, torch.float32)
        self.S = torch.zeros(batch_size, num_heads, key_dim, value_dim, **options)
        self.length = 0

    @property
    def batch_size(self):
        """B, the number of sequences held."""
        return self.S.shape[0]

    @property
    def nbytes(self):
        """Bytes of the state and the tails."""
        return self.S.nbytes + sum(tail.nbytes for tail in self.tails)

    def update(self, tails, S, new):
        """Replace all that is held, after new tokens."""
        self.tails, self.S, self.length = tails, S, self.length + new

"""The memory of softmax attention: every key and value seen so far, or their latent."""

import torch


class KVCache:
    """Keep k [B, capacity, H, K] and v [B, capacity, H, V], of which `length` tokens are filled.

    The rows are allocated once: growing by torch.cat would copy the whole cache on each token,
    which makes T tokens cost T^2 copied bytes.

    Use it under torch.no_grad(): append writes in place, so gradients through a cache are not
    supported (autograd may refuse a backward pass after a later append, and it would keep the
    graph of every token alive).

    Units: capacity and length count tokens. Dtype and device: as given, never converted.
    Errors: ValueError for a size below 0, or a dtype that is not floating point.
    Source: openai/gpt-2, src/model.py (`past`, `present`), which grows by concatenation.
    """

    def __init__(self, batch_size, capacity, n_head, key_dim, value_dim=None, *, dtype, device):
        value_dim = key_dim if value_dim is None else value_dim
        sizes = dict(batch_size=batch_size, capacity=capacity, n_head=n_head)
        _check_sizes(dtype, **sizes, key_dim=key_dim, value_dim=value_dim)
        rows = (batch_size, capacity, n_head)
        self.k = torch.zeros(*rows, key_dim, dtype=dtype, device=device)
        self.v = torch.zeros(*rows, value_dim, dtype=dtype, device=device)
        self.length = 0

    @property
    def batch_size(self):
        """B, the number of sequences held."""
        return self.k.shape[0]

    @property
    def capacity(self):
        """The number of tokens that fit, for each sequence."""
        return self.k.shape[1]

    @property
    def nbytes(self):
        """Bytes of all allocated rows, filled or not."""
        return self.k.nbytes + self.v.nbytes

    @property
    def used_bytes(self):
        """Bytes of the rows that hold a token."""
        return self.k[:, : self.length].nbytes + self.v[:, : self.length].nbytes

    def append(self, k, v):
        """Write the keys and values of T new tokens; return all that are held, oldest first.

        Shapes: k [B, T, H, K], v [B, T, H, V] -> k_all [B, length, H, K], v_all [B, length, H, V],
        views of the cache; k and v are copied. Dtype: the cache's, of both.
        Errors: ValueError if k or v does not match the cache in batch, heads, channels, dtype or
        device, if their T differ, or if length + T > capacity. Nothing is written then.
        """
        _check_rows("k", k, self.k)
        _check_rows("v", v, self.v)
        new = k.shape[1]
        if v.shape[1] != new:
            raise ValueError(f"v has shape {tuple(v.shape)}: {v.shape[1]} tokens, but k has {new}")
        end = self.length + new
        if end > self.capacity:
            raise ValueError(
                f"cache overflow: capacity {self.capacity}, length {self.length}, new tokens {new}"
            )
        self.k[:, self.length : end] = k
        self.v[:, self.length : end] = v
        self.length = end
        return self.k[:, :end], self.v[:, :end]


class LatentCache:
    """Keep rows [B, capacity, dim], of which `length` tokens are filled: what MLA needs of a token.

    A row is the normed latent and the key channels that all heads share (eq. 9.1), side by side:
    512 + 64 = 576 numbers in Kimi Linear, where the keys and values of its 32 heads would be
    10,240. The rows are allocated once. Use it under torch.no_grad(), as KVCache.

    Units: capacity and length count tokens. Dtype and device: as given, never converted.
    Errors: ValueError for a size below 0, or a dtype that is not floating point.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2.
    """

    def __init__(self, batch_size, capacity, dim, *, dtype, device):
        _check_sizes(dtype, batch_size=batch_size, capacity=capacity, dim=dim)
        self.rows = torch.zeros(batch_size, capacity, dim, dtype=dtype, device=device)
        self.length = 0

    @property
    def batch_size(self):
        """B, the number of sequences held."""
        return self.rows.shape[0]

    @property
    def capacity(self):
        """The number of tokens that fit, for each sequence."""
        return self.rows.shape[1]

    @property
    def nbytes(self):
        """Bytes of all allocated rows, filled or not."""
        return self.rows.nbytes

    @property
    def used_bytes(self):
        """Bytes of the rows that hold a token."""
        return self.rows[:, : self.length].nbytes

    def append(self, rows):
        """Write the rows of T new tokens; return all that are held, oldest first.

        Shapes: rows [B, T, dim] -> [B, length, dim], a view of the cache; rows are copied.
        Errors: ValueError if rows do not match the cache in batch, channels, dtype or device, or
        if length + T > capacity. Nothing is written then.
        """
        _check_rows("rows", rows, self.rows)
        new = rows.shape[1]
        end = self.length + new
        if end > self.capacity:
            raise ValueError(
                f"cache overflow: capacity {self.capacity}, length {self.length}, new tokens {new}"
            )
        self.rows[:, self.length : end] = rows
        self.length = end
        return self.rows[:, :end]


def projected_dtype(weight):
    """Return the dtype of what a projection by weight gives: its own, or autocast's where it is on."""
    kind = weight.device.type
    if weight.dtype == torch.float64 or kind == "meta" or not torch.is_autocast_enabled(kind):
        return weight.dtype
    return torch.get_autocast_dtype(kind)


def check_kind(cache, kind):
    """Raise ValueError unless cache is None or of this class."""
    if not isinstance(cache, (kind, type(None))):
        raise ValueError(f"cache must be a {kind.__name__} or None, got {type(cache).__name__}")


def _check_sizes(dtype, **sizes):
    for name, n in sizes.items():
        if type(n) is not int or n < 0:
            raise ValueError(f"{name} must be an integer >= 0, got {n!r}")
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating point dtype, got {dtype}")


def _check_rows(name, x, rows):
    B, _, *rest = rows.shape
    if x.ndim != rows.ndim or (x.shape[0], *x.shape[2:]) != (B, *rest):
        want = ", ".join(map(str, [B, "any", *rest]))
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [{want}]")
    if x.dtype != rows.dtype:
        raise ValueError(f"{name} has dtype {x.dtype}, expected {rows.dtype}")
    if x.device != rows.device:
        raise ValueError(f"{name} is on {x.device}, expected {rows.device}")

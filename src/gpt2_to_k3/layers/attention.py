"""GPT-2's attention layer."""

from torch import nn

from ..ops import softmax_attention
from .cache import KVCache, check_kind, projected_dtype


class CausalSelfAttention(nn.Module):
    """y = c_proj(softmax_attention(q, k, v)) with q, k, v = c_attn(x), split into n_head heads.

    Shapes: x [B, T, n_embd] -> y [B, T, n_embd]; each head has K = V = n_embd / n_head channels.
    Units: n_ctx counts tokens; it is the default capacity of a cache.
    Dtype: the weights'; attention itself is computed in float32 or float64.
    Errors: ValueError if n_head does not divide n_embd, if x has another shape, or from the cache.
    The module holds no state of a sequence: that is in the cache the caller passes.
    Source: Radford et al. 2019 (GPT-2); openai/gpt-2, src/model.py, `attn`.
    """

    def __init__(self, n_embd, n_head, n_ctx):
        super().__init__()
        if n_head < 1 or n_embd % n_head != 0:
            raise ValueError(f"n_embd={n_embd} is not a multiple of n_head={n_head}")
        self.n_embd, self.n_head, self.n_ctx = n_embd, n_head, n_ctx
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x, cache=None):
        """Attend over x [B, T, n_embd], and over the tokens in the cache before it, if any."""
        if x.ndim != 3 or x.shape[-1] != self.n_embd:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, {self.n_embd}]")
        check_kind(cache, KVCache)
        B, T, D = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, D // self.n_head).unbind(2)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.c_proj(softmax_attention(q, k, v).reshape(B, T, D))

    def init_cache(self, batch_size, capacity=None):
        """Return an empty KVCache for capacity (default n_ctx) tokens, of the dtype of k and v."""
        weight = self.c_attn.weight
        capacity = self.n_ctx if capacity is None else capacity
        size = (batch_size, capacity, self.n_head, self.n_embd // self.n_head)
        return KVCache(*size, dtype=projected_dtype(weight), device=weight.device)

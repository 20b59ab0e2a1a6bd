"""Multi-head latent attention: the cache keeps what keys and values are made of, not them."""

import torch
from torch import nn

from ..ops import softmax_attention
from .cache import LatentCache, check_kind, projected_dtype
from .norm import RMSNorm, check_sizes

# The release's, whatever the model's own epsilon is.
_LORA_NORM_EPS = 1e-6


class MultiHeadLatentAttention(nn.Module):
    """y = o_proj(softmax_attention(q, k, v)), the heads' k and v made from one latent (eq. 9.1).

    c = RMSNorm(kv_a(x)) is the latent; a head's key is [c W_k, k_shared], its value c W_v, where
    k_shared are qk_rope_head_dim more channels of kv_a(x), not normed, the same for all heads.
    Nothing is rotated (NoPE), "rope" is only their name: in Kimi's models the order of tokens is
    known from the layers between.

    Two forms with the same result. `naive` expands keys and values from the latent. `absorbed`
    moves W_k to the query and W_v to the output, since q . (c W_k) = (q W_k^T) . c: then all heads
    attend to the cached rows themselves. The layer decodes absorbed and prefills naive.

    q = q_proj(x), or with q_lora_rank q_b_proj(RMSNorm(q_a_proj(x))). With output_gate the heads'
    outputs are multiplied by sigmoid(g_proj(x)) before o_proj. Kimi K3 has both, Kimi Linear none.

    Shapes: x [B, T, hidden_size] -> y [B, T, hidden_size].
    Units: n_ctx counts tokens; it is the default capacity of a cache. Scores are multiplied by
    (qk_nope_head_dim + qk_rope_head_dim)**-0.5 in both forms, whatever the width of a cached row.
    Dtype: the weights'; attention itself is computed in float32 or float64.
    Errors: ValueError for a size that is not an integer >= 1, if x has another shape, or from the
    cache, which is then as it was.
    The module holds no state of a sequence: that is in the cache the caller passes.
    Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.2; Kimi Linear (arXiv 2510.26692),
    section 4; Kimi K3 (arXiv 2607.24653), equation 7.
    """

    def __init__(
        self, hidden_size, num_heads, *, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim,
        v_head_dim, q_lora_rank=None, output_gate=False, n_ctx,
    ):  # fmt: skip
        super().__init__()
        check_sizes(hidden_size=hidden_size, num_heads=num_heads, kv_lora_rank=kv_lora_rank)
        check_sizes(qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim)
        check_sizes(v_head_dim=v_head_dim, n_ctx=n_ctx)
        self.hidden_size, self.num_heads, self.n_ctx = hidden_size, num_heads, n_ctx
        self.q_lora_rank, self.output_gate = q_lora_rank, output_gate
        # How a row of the cache, a head's query, and a row of kv_b_proj's output divide.
        self.row_dims = [kv_lora_rank, qk_rope_head_dim]
        self.query_dims = [qk_nope_head_dim, qk_rope_head_dim]
        self.kv_dims = [qk_nope_head_dim, v_head_dim]
        self.scale = sum(self.query_dims) ** -0.5
        queries, outputs = num_heads * sum(self.query_dims), num_heads * v_head_dim
        if q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, queries, bias=False)
        else:
            check_sizes(q_lora_rank=q_lora_rank)
            self.q_a_proj = nn.Linear(hidden_size, q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(q_lora_rank, _LORA_NORM_EPS)
            self.q_b_proj = nn.Linear(q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden_size, sum(self.row_dims), bias=False)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, _LORA_NORM_EPS)
        self.kv_b_proj = nn.Linear(kv_lora_rank, num_heads * sum(self.kv_dims), bias=False)
        if output_gate:
            self.g_proj = nn.Linear(hidden_size, outputs, bias=False)
        self.o_proj = nn.Linear(outputs, hidden_size, bias=False)

    def forward(self, x, cache=None):
        """Attend over x [B, T, hidden_size], and over the tokens in the cache before it, if any."""
        check_kind(cache, LatentCache)
        q, rows = self.project(x)
        if cache is not None:
            rows = cache.append(rows)
        o = (self.absorbed if x.shape[1] == 1 else self.naive)(q, rows).flatten(2)
        if self.output_gate:
            o = o * self.g_proj(x).sigmoid()
        return self.o_proj(o)

    def project(self, x):
        """Return queries [B, T, H, nope + rope], and the rows [c, k_shared] of x, [B, T, dim]."""
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, {self.hidden_size}]")
        if self.q_lora_rank is None:
            q = self.q_proj(x)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        c, k_shared = self.kv_a_proj_with_mqa(x).split(self.row_dims, -1)
        rows = torch.cat([self.kv_a_layernorm(c), k_shared], -1)
        return q.unflatten(-1, (self.num_heads, -1)), rows

    def naive(self, q, rows):
        """Attend with q to the k and v that all rows expand to (eq. 9.1), [B, T, H, v_head_dim].

        For every call the rows become num_heads * (nope + rope + v_head_dim) numbers each.
        """
        c, k_shared = rows.split(self.row_dims, -1)
        k, v = self.kv_b_proj(c).unflatten(-1, (self.num_heads, -1)).split(self.kv_dims, -1)
        k_shared = k_shared[:, :, None].expand(-1, -1, self.num_heads, -1)
        return softmax_attention(q, torch.cat([k, k_shared], -1), v, scale=self.scale)

    def absorbed(self, q, rows):
        """Attend with q to the rows themselves, as naive does to what they expand to (eq. 9.2).

        Of T tokens each attends by itself: the form is for T = 1, a decode step.
        """
        T, rank = q.shape[1], self.row_dims[0]
        weights = self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))
        W_k, W_v = weights.split(self.kv_dims, 1)  # [H, nope, rank], [H, v_head_dim, rank]
        q, q_shared = q.split(self.query_dims, -1)
        q = torch.cat([torch.einsum("bthn,hnc->bthc", q, W_k), q_shared], -1)
        o = [q[:, :0, :, :rank]]
        for t in range(T):
            seen = rows[:, : rows.shape[1] - T + t + 1, None]
            # All heads see the same keys and values: they are many queries of one head.
            o_t = softmax_attention(
                q[:, t, :, None], seen, seen[..., :rank], scale=self.scale, causal=False
            )
            o.append(o_t.transpose(1, 2))
        return torch.einsum("bthc,hvc->bthv", torch.cat(o, 1), W_v)

    def init_cache(self, batch_size, capacity=None):
        """Return an empty cache for capacity (default n_ctx) tokens, of the dtype of their rows."""
        weight = self.kv_b_proj.weight
        capacity = self.n_ctx if capacity is None else capacity
        size = (batch_size, capacity, sum(self.row_dims))
        return LatentCache(*size, dtype=projected_dtype(weight), device=weight.device)

"""Kimi Delta Attention's layer: a delta net whose channels forget, each at its own rate."""

import torch
from torch import nn

from ..ops import chunk_kda, kda_log_decay, recurrent_kda
from ._delta_layer import DeltaLayer, initial_A_log, initial_dt_bias


class KimiDeltaAttention(DeltaLayer):
    """y = o_proj(RMSNorm(KDA(q, k, v, g, beta)) * sigmoid(gate(x))).

    q, k, v and beta are DeltaNet's; g = kda_log_decay(f_b_proj(f_a_proj(x)), A_log, dt_bias,
    lower_bound), one for each channel of a key; gate(x) = g_b_proj(g_a_proj(x)).

    Kimi Linear is the default. Kimi K3 has lower_bound=-5.0, so that every decay stays above
    e^-5, and use_full_rank_gate=True, which makes gate(x) = g_proj(x).

    Shapes: x [B, T, hidden_size] -> y [B, T, hidden_size]; K = V = head_dim channels a head; both
    low-rank projections pass through head_dim channels.
    Units: g is a natural logarithm, <= 0.
    Dtype: the weights'; A_log, dt_bias, g, beta, the rule and its state in float32 (float64 for
    float64 weights), also when the layer is made bfloat16.
    Errors: as DeltaNet's, and ValueError for a lower_bound that is not negative.
    Source: Kimi Linear (arXiv 2510.26692), section 4; Kimi K3 (arXiv 2607.24653), equations 1 to 6;
    `fla/layers/kda.py`.
    """

    def __init__(
        self, hidden_size, num_heads, head_dim, *, lower_bound=None, use_full_rank_gate=False
    ):
        super().__init__(hidden_size, num_heads, head_dim)
        if lower_bound is not None and not lower_bound < 0:
            raise ValueError(f"lower_bound must be negative or None, got {lower_bound!r}")
        self.lower_bound, self.use_full_rank_gate = lower_bound, use_full_rank_gate
        width = num_heads * head_dim
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, width, bias=False)
        if lower_bound is None:
            self.A_log = initial_A_log(num_heads, low=1)
        else:
            self.A_log = nn.Parameter(torch.zeros(num_heads, dtype=torch.float32))
        self.dt_bias = initial_dt_bias(width)
        if use_full_rank_gate:
            self.g_proj = nn.Linear(hidden_size, width, bias=False)
        else:
            self.g_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
            self.g_b_proj = nn.Linear(head_dim, width, bias=False)

    def forward(self, x, cache=None):
        """Remember and read x [B, T, hidden_size], after the tokens in the cache, if any."""
        q, k, v, beta, tails = self.project(x, cache)
        z = self.f_b_proj(self.f_a_proj(x)).unflatten(-1, (self.num_heads, self.head_dim))
        g = kda_log_decay(z, self.A_log, self.dt_bias, self.lower_bound)
        rule = recurrent_kda if x.shape[1] == 1 else chunk_kda
        o, S = rule(q, k, v, g=g, beta=beta, initial_state=None if cache is None else cache.S)
        if cache is not None:
            cache.update(tails, S, x.shape[1])
        gate = self.g_proj(x) if self.use_full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        return self.o_proj(self.o_norm(o).flatten(2) * gate.sigmoid())

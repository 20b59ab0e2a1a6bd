"""Gated DeltaNet's layer: a delta net whose heads forget, and whose output is gated."""

import torch.nn.functional as F
from torch import nn

from ..ops import chunk_gated_delta_rule, kda_log_decay, recurrent_gated_delta_rule
from ._delta_layer import DeltaLayer, initial_A_log, initial_dt_bias


class GatedDeltaNet(DeltaLayer):
    """y = o_proj(RMSNorm(gated delta rule(q, k, v, g, beta)) * SiLU(g_proj(x))).

    q, k, v and beta are DeltaNet's; each head's log-decay is g = -e^A_log softplus(a_proj(x) + dt_bias).

    Shapes: x [B, T, hidden_size] -> y [B, T, hidden_size]. num_heads heads of q and k with
    K = head_dim channels; num_v_heads heads (default num_heads) of v with V = head_v_dim channels
    (default head_dim), each with its own decay, beta and state. Each head of q and k serves
    num_v_heads / num_heads neighbours. The paper has V = 2 K; Qwen3-Next has 16 heads, 32 for v.
    Units: g is a natural logarithm, <= 0; norm_eps is RMSNorm's (1e-6 in Qwen3-Next).
    Dtype: the weights'; A_log, dt_bias, g, beta, the rule and its state in float32 (float64 for
    float64 weights), also when the layer is made bfloat16.
    Errors: as DeltaNet's, and ValueError if num_heads does not divide num_v_heads.
    Source: Gated Delta Networks (arXiv 2412.06464), section 3.4; `fla/layers/gated_deltanet.py`.
    """

    def __init__(
        self, hidden_size, num_heads, head_dim, *, num_v_heads=None, head_v_dim=None, norm_eps=1e-5
    ):
        super().__init__(
            hidden_size, num_heads, head_dim,
            num_v_heads=num_v_heads, head_v_dim=head_v_dim, norm_eps=norm_eps,
        )  # fmt: skip
        heads, values = self.num_v_heads, self.num_v_heads * self.head_v_dim
        if heads % num_heads != 0:
            raise ValueError(f"num_v_heads={heads} is not a multiple of num_heads={num_heads}")
        self.a_proj = nn.Linear(hidden_size, heads, bias=False)
        # The paper draws e^A_log from U(0, 16); kept from 0, whose logarithm could not be trained.
        self.A_log = initial_A_log(heads, low=0.01)
        self.dt_bias = initial_dt_bias(heads)
        self.g_proj = nn.Linear(hidden_size, values, bias=False)

    def forward(self, x, cache=None):
        """Remember and read x [B, T, hidden_size], after the tokens in the cache, if any."""
        q, k, v, beta, tails = self.project(x, cache)
        q, k = (a.repeat_interleave(self.num_v_heads // self.num_heads, 2) for a in (q, k))
        # KDA's gate, with one channel a head.
        g = kda_log_decay(self.a_proj(x)[..., None], self.A_log, self.dt_bias).squeeze(-1)
        rule = recurrent_gated_delta_rule if x.shape[1] == 1 else chunk_gated_delta_rule
        o, S = rule(q, k, v, g=g, beta=beta, initial_state=None if cache is None else cache.S)
        if cache is not None:
            cache.update(tails, S, x.shape[1])
        return self.o_proj(self.o_norm(o).flatten(2) * F.silu(self.g_proj(x)))

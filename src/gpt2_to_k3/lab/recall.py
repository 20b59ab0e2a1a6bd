"""A model that is all memory, to compare what the rules of the ladder can recall."""

import math

import torch
from torch import nn

from .. import ops
from ..layers import RMSNorm
from ..layers._delta_layer import DeltaLayer, initial_A_log, initial_dt_bias
from ..layers.norm import check_sizes

RULES = ("softmax", "linear", "decay", "delta", "gated delta", "kda")
# How gates begin: e^A_log uniform from .. to, softplus(dt_bias) log-uniform from .. to. The
# published start is Mamba-2's and Kimi Linear's: half of the channels forget within a dozen tokens,
# until they learn not to.
GATES = {"published": ((1, 16), (1e-3, 0.1)), "slow": ((1, 1), (1e-3, 1e-2))}


class RecallMixer(DeltaLayer):
    """y = o_proj(RMSNorm(rule(q, k, v, ...)) * sigmoid(g_proj(x))): six rules, all else equal.

    q, k, v, beta are DeltaNet's; rules without its correction store beta v. The decays are
    kda_log_decay's, with one channel a head but for KDA. Softmax turns q and k by their position
    (RoPE) and learns how sharp it is: the scores of vectors of length 1 are too alike.
    """

    def __init__(self, rule, hidden_size, num_heads, head_dim, gates="slow"):
        super().__init__(hidden_size, num_heads, head_dim)
        if rule not in RULES:
            raise ValueError(f"rule: expected one of {RULES}, got {rule!r}")
        if gates not in GATES:
            raise ValueError(f"gates: expected one of {tuple(GATES)}, got {gates!r}")
        if rule == "softmax" and head_dim % 2:
            raise ValueError(f"head_dim: expected an even number for softmax, got {head_dim}")
        self.rule = rule
        self.g_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        if rule == "softmax":
            self.log_scale = nn.Parameter(torch.full((num_heads, 1), math.log(8.0)))
        if rule in ("decay", "gated delta", "kda"):
            channels = num_heads * (head_dim if rule == "kda" else 1)
            A, dt = GATES[gates]
            dt_bias = initial_dt_bias(channels, *dt)
            self.f_proj = nn.Linear(hidden_size, channels, bias=False)
            self.A_log = initial_A_log(num_heads, *A)
            self.dt_bias = dt_bias  # drawn before f_proj: the recorded runs were

    def forward(self, x):
        """Remember and read x [B, T, hidden_size]."""
        q, k, v, beta, _ = self.project(x, None)
        if self.rule in ("softmax", "linear", "decay"):
            v = beta[..., None] * v
        if self.rule == "softmax":
            q = rotate(q) * self.log_scale.exp()
            o = ops.softmax_attention(q, rotate(k), v, scale=1.0)
        elif self.rule == "linear":
            o, _ = ops.chunk_linear_attention(q, k, v, normalize=False)
        elif self.rule == "delta":
            o, _ = ops.chunk_delta_rule(q, k, v, beta=beta)
        else:
            z = self.f_proj(x).unflatten(-1, (self.num_heads, -1))
            g = ops.kda_log_decay(z, self.A_log, self.dt_bias)
            if self.rule == "kda":
                o, _ = ops.chunk_kda(q, k, v, g=g, beta=beta)
            elif self.rule == "gated delta":
                o, _ = ops.chunk_gated_delta_rule(q, k, v, g=g.squeeze(-1), beta=beta)
            else:
                o, _ = ops.chunk_decay(q, k, v, g=g.squeeze(-1))
        return self.o_proj(self.o_norm(o).flatten(2) * self.g_proj(x).sigmoid())


def rotate(x):
    """Turn channels (i, i + K/2) of x [B, T, H, K] by t 10000^(-2i/K): RoPE (arXiv 2104.09864)."""
    T, half = x.shape[1], x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = (torch.arange(T, device=x.device)[:, None] * rate)[:, None]
    a, b = x.split(half, -1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class RecallModel(nn.Module):
    """logits = head(norm(x)), where x is an embedding to which each mixer adds; there is no MLP.

    Shapes: tokens int64 [B, T] -> logits [B, T, vocab_size]; a head's state is head_dim x head_dim.
    Units: rule is one of RULES; gates, one of GATES, says how fast gated rules forget at the start.
    Errors: ValueError for another rule or gates, a size below 1, an odd head_dim with softmax.
    Weights are drawn from torch's global generator.
    Source: the setting of Kimi Linear (arXiv 2510.26692), 5.1, has 2 layers, 2 heads, head_dim 128.
    """

    def __init__(
        self, rule, vocab_size, *, hidden_size=64, layers=1, num_heads=1, head_dim=16, gates="slow"
    ):
        super().__init__()
        check_sizes(vocab_size=vocab_size, layers=layers)
        self.embedding = nn.Embedding(vocab_size, hidden_size)
        self.mixers = nn.ModuleList(
            RecallMixer(rule, hidden_size, num_heads, head_dim, gates) for _ in range(layers)
        )
        self.norms = nn.ModuleList(RMSNorm(hidden_size, 1e-5) for _ in range(layers))
        self.norm = RMSNorm(hidden_size, 1e-5)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, tokens):
        """Logits at every position of tokens [B, T]."""
        x = self.embedding(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(self.norm(x))

"""Feed-forward layers: SwiGLU, and a mixture of many of them of which each token uses a few."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..ops._check import full_precision
from .norm import at_least_float32, check_sizes


def route(logits, bias, top_k, *, scaling_factor=1.0):
    """T = top_k experts of s + bias, p_j = scaling_factor * s_j / (sum of s over T) (eq. 12.1).

    s = sigmoid(logits), the scores.
    The bias only selects: it balances the load, and has no part in the weights p nor a gradient.

    Shapes: logits [..., E], bias [E] -> p [..., top_k], experts int64 [..., top_k], in no order.
    Units: each row of p sums to scaling_factor (to less where every chosen s is below 1e-17).
    Dtype: computed in float32 (float64 for float64 logits), as is p.
    Errors: ValueError if bias is not [E], or if top_k is not an integer from 1 to E.
    Source: DeepSeek-V3 (arXiv 2412.19437), equations 13 to 16; Kimi K3 (arXiv 2607.24653),
    equation 13.
    """
    E = logits.shape[-1] if logits.ndim else 0
    if type(top_k) is not int or not 1 <= top_k <= E:
        raise ValueError(f"top_k must be an integer from 1 to {E} experts, got {top_k!r}")
    if bias.shape != (E,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected [{E}]")
    s = at_least_float32(logits).sigmoid()
    experts = (s + bias).topk(top_k, dim=-1, sorted=False).indices
    p = s.gather(-1, experts)
    return scaling_factor * p / (p.sum(-1, keepdim=True) + 1e-20), experts


class Router(nn.Module):
    """p, experts = route(x W^T, bias, top_k): which experts a token uses, and how much of each.

    Shapes: x [..., hidden_size] -> p [..., top_k], experts int64 [..., top_k]; weight W
    [num_experts, hidden_size]. The bias [num_experts] is a buffer: no optimizer moves it.
    Units: p sums to scaling_factor over the chosen experts.
    Dtype: computed in float32 (float64 for float64 weights); the bias stays in float32 also when
    the layer is made bfloat16, in which a step of 0.001 beside 1 is lost.
    Errors: ValueError for a size that is not an integer >= 1, for top_k > num_experts, for a
    scaling_factor that is not finite and > 0, or if x has another last axis.
    Source: as `route`.
    """

    def __init__(self, hidden_size, num_experts, top_k, *, scaling_factor=1.0):
        super().__init__()
        check_sizes(hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
        if top_k > num_experts:
            raise ValueError(f"top_k={top_k} is more than num_experts={num_experts}")
        if not 0 < scaling_factor < math.inf:
            raise ValueError(f"scaling_factor must be finite and > 0, got {scaling_factor!r}")
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.scaling_factor = scaling_factor
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        nn.init.uniform_(self.weight, -(hidden_size**-0.5), hidden_size**-0.5)  # as nn.Linear
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(num_experts, dtype=torch.float32)
        )

    def forward(self, x):
        """Choose top_k experts for each token of x [..., hidden_size]."""
        logits, bias = self.logits(x), self.e_score_correction_bias
        return route(logits, bias, self.top_k, scaling_factor=self.scaling_factor)

    def logits(self, x):
        """Return x W^T [..., num_experts], in float32 or float64."""
        if x.ndim < 1 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [..., {self.hidden_size}]")
        with full_precision(x.device):
            return F.linear(at_least_float32(x), at_least_float32(self.weight))

    def _apply(self, fn, recurse=True):
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        new = self.e_score_correction_bias
        if new.dtype in (torch.float16, torch.bfloat16):
            self.e_score_correction_bias = bias.to(new.device)
        return self


def swiglu(gate, up):
    """y = SiLU(gate) * up, elementwise."""
    return F.silu(gate) * up


class SwiGLU(nn.Module):
    """y = down_proj(SiLU(gate_proj(x)) * up_proj(x)).

    Shapes: x [..., hidden_size] -> y [..., hidden_size], intermediate_size channels inside.
    Dtype: the weights'. Errors: ValueError for a size that is not an integer >= 1.
    Source: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """

    activation = staticmethod(swiglu)

    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        """Return y [..., hidden_size]."""
        return self.down_proj(self.activation(self.gate_proj(x), self.up_proj(x)))


class Experts(nn.Module):
    """y = sum over the chosen experts e of p_e * SwiGLU_e(x), for each token by itself.

    Shapes: x [N, hidden_size], p [N, k], experts int64 [N, k] -> y [N, hidden_size]. The weights
    of all experts are three tensors: gate_proj and up_proj [num_experts, intermediate_size,
    hidden_size], down_proj [num_experts, hidden_size, intermediate_size].
    Dtype: each expert in the weights'; the sum in p's, rounded once, to x's.
    Errors: ValueError for a size that is not an integer >= 1.
    Source: Shazeer et al. 2017 (arXiv 1701.06538), equation 1.
    """

    activation = staticmethod(swiglu)

    def __init__(self, hidden_size, intermediate_size, num_experts):
        super().__init__()
        check_sizes(hidden_size=hidden_size, intermediate_size=intermediate_size)
        check_sizes(num_experts=num_experts)
        inner = (num_experts, intermediate_size, hidden_size)
        self.gate_proj = nn.Parameter(torch.empty(inner))
        self.up_proj = nn.Parameter(torch.empty(inner))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        for p in self.parameters():
            nn.init.uniform_(p, -(p.shape[-1] ** -0.5), p.shape[-1] ** -0.5)  # as nn.Linear

    def forward(self, x, p, experts):
        """Weigh the chosen experts' outputs for tokens x [N, hidden_size]."""
        y = torch.zeros_like(x, dtype=p.dtype)
        # Only experts that some token chose: each then works on its own tokens at once.
        for e in experts.unique().tolist():
            token, slot = (experts == e).nonzero(as_tuple=True)
            rows = x[token]
            gate, up = F.linear(rows, self.gate_proj[e]), F.linear(rows, self.up_proj[e])
            out = F.linear(self.activation(gate, up), self.down_proj[e])
            y = y.index_add(0, token, p[token, slot, None] * out)
        return y.to(x.dtype)


class MixtureOfExperts(nn.Module):
    """y = shared_experts(x) + sum over a token's top_k experts e of p_e * SwiGLU_e(x).

    Every token uses the shared expert, and the top_k of num_experts that its router chooses.
    num_shared_experts of them side by side are one SwiGLU as many times wider.

    Shapes: x [B, T, hidden_size] -> y [B, T, hidden_size]; B or T may be 0.
    Units: the p of a token sum to routed_scaling_factor.
    Dtype: the weights'; the router, its bias and the sum over experts in float32 (float64 for
    float64 weights).
    Errors: ValueError for a size that is not an integer >= 1, for top_k > num_experts, or if x has
    another shape.
    Source: DeepSeek-V3 (arXiv 2412.19437), equation 12; Kimi Linear's `modeling_kimi.py`.
    """

    def __init__(
        self, hidden_size, intermediate_size, *, num_experts, top_k, num_shared_experts=1,
        routed_scaling_factor=1.0,
    ):  # fmt: skip
        super().__init__()
        check_sizes(intermediate_size=intermediate_size, num_shared_experts=num_shared_experts)
        self.hidden_size = hidden_size
        self.gate = Router(hidden_size, num_experts, top_k, scaling_factor=routed_scaling_factor)
        self.experts = Experts(hidden_size, intermediate_size, num_experts)
        self.shared_experts = SwiGLU(hidden_size, num_shared_experts * intermediate_size)

    def forward(self, x):
        """Return y [B, T, hidden_size]."""
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, {self.hidden_size}]")
        rows = x.flatten(0, 1)
        return self.experts(rows, *self.gate(rows)).view_as(x) + self.shared_experts(x)

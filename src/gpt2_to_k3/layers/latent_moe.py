"""Kimi K3's feed-forward layer: SiTU-GLU, experts in a latent, two rules to balance their load."""

import math

import torch
from torch import nn

from ..ops._check import check_values, compute_dtype
from .moe import Experts, Router, SwiGLU
from .norm import RMSNorm, at_least_float32, check_sizes


def situ_glu(gate, up, beta1=4.0, beta2=25.0):
    """y = beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2), within beta1 beta2 of 0.

    Near 0, and for large betas everywhere, it is SwiGLU's SiLU(gate) * up, which has no bound.

    Shapes: gate, up [...], the same -> y [...].
    Dtype: computed in float32 (float64 for float64 inputs) and rounded once, to gate's.
    Errors: ValueError if gate and up differ in shape, dtype or device, or if a beta is not a finite
    number > 0.
    Source: Kimi K3 (arXiv 2607.24653), equation 12 and appendix B.
    """
    dtype = compute_dtype(gate=gate, up=up)
    if gate.shape != up.shape:
        raise ValueError(f"up has shape {tuple(up.shape)}, expected {list(gate.shape)} as gate")
    for name, beta in (("beta1", beta1), ("beta2", beta2)):
        if not 0 < beta < math.inf:
            raise ValueError(f"{name} must be a finite number > 0, got {beta!r}")
    a, b = gate.to(dtype), up.to(dtype)
    y = beta1 * (a / beta1).tanh() * a.sigmoid() * (beta2 * (b / beta2).tanh())
    return y.to(gate.dtype)


class SiTUGLU(SwiGLU):
    """y = down_proj(situ_glu(gate_proj(x), up_proj(x))): K3's dense layer, and its shared experts.

    Shapes, dtype, errors: as SwiGLU's; the activation in float32.
    Source: Kimi K3 (arXiv 2607.24653), equation 12.
    """

    activation = staticmethod(situ_glu)


class SiTUExperts(Experts):
    """y = sum over the chosen experts e of p_e * SiTUGLU_e(x), for each token by itself.

    Shapes, dtype, errors: as Experts; the activation in float32.
    Source: Kimi K3 (arXiv 2607.24653), equation 12.
    """

    activation = staticmethod(situ_glu)


class LatentMoE(nn.Module):
    """y = shared_experts(x) + up(RMSNorm(sum over a token's experts e of p_e SiTUGLU_e(down(x)))).

    Equation 12.2. The routed experts live in latent_size channels; the router and the shared
    experts read x at its full width. The bias of the router selects experts and does nothing else;
    it is a buffer, which balance moves.

    The norm takes the length of the sum away: only the ratios of a token's p matter, and neither
    their sum nor, but for eps, routed_scaling_factor.

    Shapes: x [B, T, hidden_size] -> y [B, T, hidden_size]; B or T may be 0.
    Dtype: the weights'; the router, its bias, the activation, the sum over experts and the norm in
    float32 (float64 for float64 weights).
    Errors: ValueError for a size that is not an integer >= 1, for top_k > num_experts, or if x has
    another shape.
    Source: Kimi K3 (arXiv 2607.24653), section 2.3; LatentMoE (arXiv 2601.18089).
    """

    def __init__(
        self, hidden_size, latent_size, intermediate_size, *, num_experts, top_k,
        num_shared_experts=2, routed_scaling_factor=1.0, norm_eps=1e-5,
    ):  # fmt: skip
        super().__init__()
        check_sizes(hidden_size=hidden_size, latent_size=latent_size)
        check_sizes(intermediate_size=intermediate_size, num_shared_experts=num_shared_experts)
        self.hidden_size = hidden_size
        self.gate = Router(hidden_size, num_experts, top_k, scaling_factor=routed_scaling_factor)
        self.routed_expert_down_proj = nn.Linear(hidden_size, latent_size, bias=False)
        self.experts = SiTUExperts(latent_size, intermediate_size, num_experts)
        self.routed_expert_norm = RMSNorm(latent_size, norm_eps)
        self.routed_expert_up_proj = nn.Linear(latent_size, hidden_size, bias=False)
        self.shared_experts = SiTUGLU(hidden_size, num_shared_experts * intermediate_size)

    def forward(self, x):
        """Return y [B, T, hidden_size]."""
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x has shape {tuple(x.shape)}, expected [B, T, {self.hidden_size}]")
        rows = x.flatten(0, 1)
        u = self.experts(self.routed_expert_down_proj(rows), *self.gate(rows))
        routed = self.routed_expert_up_proj(self.routed_expert_norm(u))
        return routed.view_as(x) + self.shared_experts(x)

    @torch.no_grad()
    def scores(self, x):
        """Return sigmoid(router logits) of x [..., hidden_size]: [..., num_experts], in float32.

        Errors: ValueError if x has another last axis.
        """
        return self.gate.logits(x).sigmoid()

    @torch.no_grad()
    def balance(self, x):
        """Set the router's bias by quantile_balancing on tokens x, for the next training step.

        Errors: as scores and quantile_balancing; where every token uses all experts, there is
        nothing to balance, and that is one.
        """
        bias = self.gate.e_score_correction_bias
        bias.copy_(quantile_balancing(self.scores(x), self.gate.top_k, bias))


def expert_load(scores, k, bias):
    """load_j = how many tokens have expert j among the k largest of scores + bias.

    Shapes: scores [..., E], bias [E] -> int64 [E], with sum tokens * k.
    Errors: ValueError if bias is not [E], if k is not an integer from 1 to E - 1, or if a score or
    a bias is not finite.
    """
    chosen = _biased(scores, k, bias).topk(k, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=bias.shape[0])


@torch.no_grad()
def quantile_balancing(scores, k, bias):
    """b_j = -(the (q+1)-th largest over tokens i of s_ij - a_i), less the mean of b (eq. 12.3).

    a_i is what expert j has to pass to be chosen by token i: the (k+1)-th largest of s_i + bias.
    q = tokens * k / E, rounded down, is an equal load: with these a_i no expert gets more. The new
    biases make other a_i, so it takes a few steps to come close. There is no step size.

    Shapes: scores [..., E], bias [E] -> the next bias [E].
    Units: as the scores, sigmoids in K3.
    Dtype: computed in float32 (float64 for float64 scores), the next bias in bias's. No gradient.
    Errors: as expert_load, and ValueError without a token.
    Source: Kimi K3 (arXiv 2607.24653), equation 14 and appendices C and D.
    """
    biased = _biased(scores, k, bias)
    tokens, E = biased.shape
    if tokens == 0:
        raise ValueError(f"scores has shape {tuple(scores.shape)}, expected at least one token")
    cutoff = biased.topk(k + 1, dim=-1).values[:, -1:]
    margins = at_least_float32(scores).reshape(tokens, E) - cutoff
    b = -margins.topk(tokens * k // E + 1, dim=0).values[-1]
    return (b - b.mean()).to(bias.dtype)


@torch.no_grad()
def sign_balancing(scores, k, bias, step=1e-3):
    """b_j = bias_j + step * sign(mean load - load_j): what quantile_balancing replaces.

    Shapes, errors: as expert_load, and ValueError for a step that is not finite; -> the next bias
    [E].
    Units: step is in the scores'; a bias that is off by 0.2 needs 200 steps.
    Dtype: bias's. No gradient.
    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; Wang et al. 2024 (arXiv 2408.15664),
    algorithm 1.
    """
    if not math.isfinite(step):
        raise ValueError(f"step must be a finite number, got {step!r}")
    load = expert_load(scores, k, bias)
    # load * E against its sum: whole numbers, of which none is rounded to a wrong side.
    return bias + step * (load.sum() - load * len(load)).sign().to(bias.dtype)


def _biased(scores, k, bias):
    """scores + bias, [tokens, E] in float32 or float64."""
    E = scores.shape[-1] if scores.ndim else 0
    if type(k) is not int or not 1 <= k < E:
        raise ValueError(f"k must be an integer from 1 to {E - 1}, below {E} experts, got {k!r}")
    if bias.shape != (E,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected [{E}]")
    compute_dtype(scores=scores)
    # One NaN would stay in the bias for good.
    for name, x in (("scores", scores), ("bias", bias)):
        check_values(name, x, torch.isfinite, "finite")
    return at_least_float32(scores).reshape(-1, E) + bias

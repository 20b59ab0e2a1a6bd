import numpy as np
import pytest
import torch
import torch.nn.functional as F
from random_tensors import normal

from gpt2_to_k3.layers import (
    LatentMoE,
    SiTUExperts,
    SiTUGLU,
    expert_load,
    quantile_balancing,
    situ_glu,
)

F64 = torch.float64
D, LATENT, INNER, E, K = 7, 5, 3, 6, 2


def make(dtype=F64, **options):
    torch.manual_seed(0)
    options = dict(num_experts=E, top_k=K) | options
    moe = LatentMoE(D, LATENT, INNER, **options).to(dtype)
    for p in moe.parameters():
        p.data.normal_(std=1.0 if p.ndim == 1 else p.shape[-1] ** -0.5)
    moe.gate.e_score_correction_bias.normal_(std=0.1)
    return moe


# SiTU-GLU


def test_situ_by_hand():
    gate, up = torch.tensor([0.0, 2.0, -1.0], dtype=F64), torch.tensor([3.0, -5.0, 1e9], dtype=F64)
    want = [
        0.0,
        4 * np.tanh(0.5) / (1 + np.exp(-2.0)) * 25 * np.tanh(-0.2),
        4 * np.tanh(-0.25) / (1 + np.exp(1.0)) * 25,
    ]
    torch.testing.assert_close(situ_glu(gate, up), torch.tensor(want, dtype=F64))
    want = 2 * np.tanh(1.0) / (1 + np.exp(-2.0)) * 3 * np.tanh(-5 / 3)
    assert situ_glu(gate, up, beta1=2, beta2=3)[1].item() == pytest.approx(want, rel=1e-14)


def test_situ_is_swiglu_near_0_and_for_large_betas_and_has_a_bound():
    gate, up = normal(1000), normal(1000, seed=1)
    small = 1e-3
    torch.testing.assert_close(
        situ_glu(small * gate, small * up), F.silu(small * gate) * small * up, rtol=1e-5, atol=0
    )
    torch.testing.assert_close(situ_glu(gate, up, 1e6, 1e6), F.silu(gate) * up, rtol=1e-10, atol=0)
    assert situ_glu(1e6 * gate, 1e6 * up).abs().max() == 100
    assert (F.silu(1e3 * gate) * 1e3 * up).abs().max() > 1e5


def test_situ_gradients():
    assert torch.autograd.gradcheck(
        situ_glu, (3 * normal(20).requires_grad_(), 30 * normal(20, seed=1).requires_grad_())
    )
    huge = torch.tensor([1e30, -1e30, 0.0], requires_grad=True)
    situ_glu(huge, huge.flip(0)).sum().backward()
    assert huge.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_situ_is_computed_in_float32_and_rounded_once(dtype):
    gate, up = 5 * normal(500, dtype=dtype), 5 * normal(500, seed=1, dtype=dtype)
    y = situ_glu(gate, up)
    assert y.dtype == dtype and torch.equal(y, situ_glu(gate.float(), up.float()).to(dtype))


def test_bad_arguments_of_situ_are_named():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^up has shape \(3,\), expected \[2, 3\] as gate"):
        situ_glu(x, x[0])
    with pytest.raises(ValueError, match="^up has dtype torch.float64, but gate has torch.float32"):
        situ_glu(x, x.double())
    with pytest.raises(ValueError, match="^gate must be a floating point tensor, got torch.int64"):
        situ_glu(x.long(), x)
    for name in ("beta1", "beta2"):
        for beta in (0, -1.0, float("inf"), float("nan")):
            with pytest.raises(
                ValueError, match=f"^{name} must be a finite number > 0, got {beta}"
            ):
                situ_glu(x, x, **{name: beta})


# The layer


def by_definition(moe, x):
    """Each token by itself, each of its experts by itself."""
    expert, shared, y = moe.experts, moe.shared_experts, []
    for t in x.flatten(0, 1):
        s = 1 / (1 + torch.exp(-(moe.gate.weight @ t)))
        chosen = (s + moe.gate.e_score_correction_bias).argsort(descending=True)[:K]
        latent, u = moe.routed_expert_down_proj.weight @ t, 0
        for e in chosen:
            h = situ_glu(expert.gate_proj[e] @ latent, expert.up_proj[e] @ latent)
            p = moe.gate.scaling_factor * s[e] / s[chosen].sum()
            u = u + p * (expert.down_proj[e] @ h)
        u = u / (u.square().mean() + moe.routed_expert_norm.eps).sqrt()
        u = moe.routed_expert_norm.weight * u
        h = situ_glu(shared.gate_proj.weight @ t, shared.up_proj.weight @ t)
        y.append(moe.routed_expert_up_proj.weight @ u + shared.down_proj.weight @ h)
    return torch.stack(y).view_as(x)


@pytest.mark.parametrize("shared", [1, 2])
def test_the_layer_is_its_definition(shared):
    moe, x = make(num_shared_experts=shared), normal(2, 9, D)
    torch.testing.assert_close(moe(x), by_definition(moe, x), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (0, 4), (2, 0)])
def test_few_tokens_or_none(shape):
    moe, x = make(), normal(*shape, D)
    assert moe(x).shape == x.shape
    if x.numel():
        torch.testing.assert_close(moe(x), by_definition(moe, x))


def test_a_token_depends_on_no_other():
    moe, x = make(), normal(3, 8, D)
    y = moe(x)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(moe(x[:, order]), y[:, order])
    torch.testing.assert_close(moe(x[1:2, 3:4]), y[1:2, 3:4])


def test_an_expert_without_tokens_does_not_crash_and_gets_no_gradient():
    """C52: 3 tokens and 2 of 6 experts; whatever was chosen learns, the rest stays."""
    moe, x = make(), normal(1, 3, D)
    with torch.no_grad():
        moe.gate.e_score_correction_bias.copy_(torch.tensor([0.0, 9, 0, 9, 0, 0]))
    moe(x).square().sum().backward()
    for p in moe.experts.parameters():
        moved = p.grad.flatten(1).abs().amax(1) > 0
        assert moved.tolist() == [False, True, False, True, False, False]


def test_gradients_reach_every_weight_and_not_the_bias():
    moe, x = make(), normal(2, 30, D).requires_grad_()
    assert expert_load(moe.scores(x), K, moe.gate.e_score_correction_bias).min() > 0
    (moe(x) * normal(2, 30, D, seed=1)).sum().backward()
    assert x.grad.abs().amax(-1).min() > 0
    for name, p in moe.named_parameters():
        assert (p.grad.flatten(1) if p.ndim == 3 else p.grad).abs().max() > 0, name
    assert all(p.grad.flatten(1).abs().amax(1).min() > 0 for p in moe.experts.parameters())
    bias = moe.gate.e_score_correction_bias
    assert (
        not bias.requires_grad and dict(moe.named_buffers())["gate.e_score_correction_bias"] is bias
    )
    assert "gate.e_score_correction_bias" in moe.state_dict()


def test_every_weight_counts():
    """C51: also the norm of the latent sum. It hides a factor common to all experts' down_proj."""
    moe, x = make(), normal(2, 9, D)
    with torch.no_grad():
        y = moe(x)
        for name, p in moe.named_parameters():
            half = p[: len(p) // 2]
            half.mul_(2)
            assert (moe(x) - y).abs().max() > 1e-3, name
            half.div_(2)
        moe.experts.down_proj.mul_(2)
        assert (moe(x) - y).abs().max() < 1e-3
        moe.gate.e_score_correction_bias.mul_(-1)
        assert (moe(x) - y).abs().max() > 1e-3


def test_gradcheck():
    moe, x = make(), normal(1, 2, D).requires_grad_()
    names, weights = zip(*moe.named_parameters(), strict=True)

    def f(x, *weights):
        return torch.func.functional_call(moe, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *weights))


def test_the_bias_selects_and_does_not_weigh():
    """A constant changes no choice, so nothing; a bias that does not change the choice neither."""
    moe, x = make(), normal(2, 9, D)
    bias, y = moe.gate.e_score_correction_bias, moe(x)
    bias.add_(3)
    torch.testing.assert_close(moe(x), y)
    bias.zero_()[:K] = 5.0
    y = moe(x)
    bias[:K] = 7.0
    assert torch.equal(moe(x), y)


def test_the_norm_takes_the_scale_of_the_routed_sum_away():
    """So routed_scaling_factor has no effect beyond eps: it and an expert's size are taken out."""
    x = normal(2, 9, D)
    y = make(norm_eps=1e-12)(x)
    torch.testing.assert_close(make(norm_eps=1e-12, routed_scaling_factor=2.5)(x), y)
    moe = make(norm_eps=0.5)
    assert (make(norm_eps=0.5, routed_scaling_factor=2.5)(x) - moe(x)).abs().max() > 1e-2


def test_with_one_expert_a_token_the_router_learns_nothing():
    """p = s / s = 1, whatever s is: renormalised top-1 gives the router no gradient."""
    moe = make(top_k=1)
    moe(normal(2, 9, D)).square().sum().backward()
    assert moe.gate.weight.grad.abs().max() < 1e-15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype):
    moe, x = make(torch.float32), normal(2, 9, D, dtype=dtype)
    bias = moe.gate.e_score_correction_bias.clone()
    moe.to(dtype)
    assert torch.equal(moe.gate.e_score_correction_bias, bias) and bias.dtype == torch.float32
    y = moe(x)
    assert y.dtype == dtype and moe.scores(x).dtype == torch.float32
    want = by_definition(moe.float(), x.float())
    assert (y.float() - want).abs().max() < 20 * torch.finfo(dtype).eps * want.abs().max()


def test_k3s_layer_has_the_published_count():
    """896 routed experts of 33,030,144, two shared ones, projections, norm and router."""
    with torch.device("meta"):
        moe = LatentMoE(7168, 3584, 3072, num_experts=896, top_k=16)
    assert sum(p.numel() for p in moe.experts.parameters()) == 896 * 33_030_144
    assert sum(p.numel() for p in moe.shared_experts.parameters()) == 132_120_576
    rest = 2 * 7168 * 3584 + 3584 + 7168 * 896
    total = sum(p.numel() for p in moe.parameters())
    assert total == 896 * 33_030_144 + 132_120_576 + rest
    assert moe.gate.e_score_correction_bias.numel() == 896


def test_the_plain_modules():
    ffn, x = SiTUGLU(D, INNER).double(), normal(2, D)
    want = ffn.down_proj(situ_glu(ffn.gate_proj(x), ffn.up_proj(x)))
    torch.testing.assert_close(ffn(x), want)
    one = SiTUExperts(D, INNER, 1).double()
    for name, p in one.named_parameters():
        p.data = ffn.get_submodule(name).weight.data[None]
    p, experts = torch.full((2, 1), 0.5, dtype=F64), torch.zeros(2, 1, dtype=torch.int64)
    torch.testing.assert_close(one(x, p, experts), want / 2)


@pytest.mark.parametrize("name", ["hidden_size", "latent_size", "intermediate_size"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_bad_size_is_named(name, size):
    sizes = dict(hidden_size=D, latent_size=LATENT, intermediate_size=INNER) | {name: size}
    with pytest.raises(ValueError, match=f"^{name} must be an integer >= 1, got {size!r}"):
        LatentMoE(**sizes, num_experts=E, top_k=K)


def test_bad_arguments_of_the_layer_are_named():
    for name in ("num_experts", "top_k", "num_shared_experts"):
        with pytest.raises(ValueError, match=f"^{name} must be an integer >= 1, got 0"):
            make(**{name: 0})
    with pytest.raises(ValueError, match="^top_k=7 is more than num_experts=6"):
        make(top_k=7)
    for shape in ((2, 3, D - 1), (3, D), (D,)):
        with pytest.raises(ValueError, match=r"^x has shape .*, expected \[B, T, 7\]"):
            make()(torch.ones(*shape, dtype=F64))


def test_balance_moves_the_bias_of_the_router_and_nothing_else():
    moe, x = make(torch.float32), 3 * normal(2, 60, D, dtype=torch.float32)
    before = {n: w.clone() for n, w in moe.state_dict().items()}
    scores = (x @ moe.gate.weight.mT).sigmoid()
    torch.testing.assert_close(moe.scores(x), scores)
    assert not moe.scores(x).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(moe.scores(x), scores)
    moe.balance(x)
    bias = moe.gate.e_score_correction_bias
    want = quantile_balancing(scores, K, before["gate.e_score_correction_bias"])
    torch.testing.assert_close(bias, want)
    before["gate.e_score_correction_bias"] = bias
    assert all(torch.equal(w, before[n]) for n, w in moe.state_dict().items())
    assert bias.dtype == torch.float32 and not bias.requires_grad

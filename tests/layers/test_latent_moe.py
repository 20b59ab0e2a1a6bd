from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_to_k3.layers import (
    LatentMoE,
    SiTUExperts,
    SiTUGLU,
    expert_load,
    quantile_balancing,
    sign_balancing,
    situ_glu,
)

F64 = torch.float64
D, LATENT, INNER, E, K = 7, 5, 3, 6, 2
RULES = [expert_load, quantile_balancing, sign_balancing]


def normal(*shape, seed=0, dtype=F64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=F64, generator=generator).to(dtype)


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


def test_the_layer_in_mlx(compare):
    try:
        import mlx.core as mx
        from mlx_lm.models import kimi_k3
    except ImportError:
        pytest.fail('mlx is missing: pip install "mlx[cpu]" mlx-lm', pytrace=False)
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # that would call a C++ compiler
    args = kimi_k3.TextArgs(
        hidden_size=D, rms_norm_eps=1e-5, num_experts=E, num_experts_per_token=K,
        num_shared_experts=2, moe_intermediate_size=INNER, routed_expert_hidden_size=LATENT,
        latent_moe_use_norm=True, activation_situ_beta=4.0, activation_situ_linear_beta=25.0,
    )  # fmt: skip
    theirs, ours = kimi_k3.KimiK3SparseMoE(args), make(torch.float32)
    weights = {
        n.replace("gate.e_score", "e_score"): w
        for n, w in ours.state_dict().items()
        if not n.startswith("experts.")
    }
    weights |= {f"switch_mlp.{n}.weight": p.data for n, p in ours.experts.named_parameters()}
    theirs.load_weights([(n, mx.array(w.numpy())) for n, w in weights.items()])
    x = 3 * normal(2, 50, D, dtype=torch.float32)
    want = torch.from_numpy(np.array(theirs(mx.array(x.numpy()))))
    compare("mlx", {"y": ours(x).detach()}, {"y": want}, loosen=5)


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


# The two balancing rules

# Scores, in hundredths, of a case like the report's: 8 tokens, 4 experts, one chosen.
TOY = """40 45 25 30  80 25 55 60  60 85 15 20  30 55 15 10
         80 25 65 50  50 35 65 30  60 45 15 10  80 55 35 40"""


def test_the_toy():
    """One Quantile step, 4 3 1 0 -> 2 2 2 2, for the step's own tokens."""
    scores = torch.tensor([int(s) for s in TOY.split()], dtype=F64).view(8, 4) / 100
    bias = torch.zeros(4, dtype=F64)
    assert expert_load(scores, 1, bias).tolist() == [4, 3, 1, 0]
    new = quantile_balancing(scores, 1, bias)
    torch.testing.assert_close(new, torch.tensor([-0.15, -0.05, 0.05, 0.15], dtype=F64))
    assert expert_load(scores, 1, new).tolist() == [2, 2, 2, 2]
    sign = sign_balancing(scores, 1, bias)
    torch.testing.assert_close(sign, torch.tensor([-1e-3, -1e-3, 1e-3, 1e-3], dtype=F64))
    assert expert_load(scores, 1, sign).tolist() == [4, 3, 1, 0]


def test_a_balanced_expert_stays_where_the_sign_rule_found_it():
    scores = torch.tensor([[3.0, 2, 1], [1, 3, 2], [3, 1, 2]], dtype=F64)
    bias = torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    new = sign_balancing(scores, 1, bias, step=0.5)
    torch.testing.assert_close(new, torch.tensor([-0.4, 0.2, 0.8], dtype=F64))


sizes = dict(E=st.integers(2, 9), k=st.integers(1, 8), tokens=st.integers(1, 30))


@settings(max_examples=60, deadline=None)
@given(**sizes, seed=st.integers(0, 99))
def test_quantile_balancing_is_its_definition(E, k, tokens, seed):
    """With the cutoffs held, q tokens at most are above them, and q + 1 at least are not below.

    Equal margins are common: where expert j is a token's own cutoff, its margin is -b_j.
    """
    k = min(k, E - 1)
    s, b = normal(tokens, E, seed=seed).sigmoid(), normal(E, seed=seed + 1)
    new = quantile_balancing(s, k, b)
    cutoff = (s + b).sort(1, descending=True).values[:, k : k + 1]
    ranked = (s - cutoff).sort(0, descending=True).values
    q = int(tokens * k / E + 1e-9)
    want = -ranked[q]
    assert ((s - cutoff > -want).sum(0) <= q).all() and ((s - cutoff >= -want).sum(0) > q).all()
    torch.testing.assert_close(new, want - want.mean(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(quantile_balancing(s, k, b + 5), new, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(quantile_balancing(s.flip(0), k, b), new, rtol=1e-12, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(**sizes)
def test_loads_and_the_sign_rule(E, k, tokens):
    k = min(k, E - 1)
    s, b = normal(tokens, E).sigmoid(), normal(E, seed=1)
    load = expert_load(s, k, b)
    chosen = [(row + b).argsort(descending=True)[:k] for row in s]
    want = torch.stack([sum((c == j).sum() for c in chosen) for j in range(E)])
    assert torch.equal(load, want) and load.sum() == tokens * k
    step = sign_balancing(s, k, b, step=0.25) - b
    for j in range(E):
        assert step[j].item() == pytest.approx(0.25 * np.sign(tokens * k - E * load[j].item()))


def test_one_quantile_step_does_what_hundreds_of_signs_do():
    """64 skewed experts, 4 of them for each of 4096 tokens: the largest load over the mean."""
    s = (normal(4096, 64) + normal(64, seed=1)).sigmoid()
    mean, bias = 4096 * 4 / 64, torch.zeros(64, dtype=F64)

    def worst(bias):
        return expert_load(s, 4, bias).max().item() / mean

    quantile = [bias]
    for _ in range(4):
        quantile.append(quantile_balancing(s, 4, quantile[-1]))
    assert worst(bias) > 4 and worst(quantile[1]) < 1.5 and worst(quantile[4]) < 1.15
    for _ in range(100):
        bias = sign_balancing(s, 4, bias)
    assert worst(bias) > 1.5


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


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_leave_their_inputs_and_take_any_axes_of_tokens(rule):
    s, b = normal(2, 6, 5).sigmoid().requires_grad_(), normal(5, seed=1)
    kept = s.detach().clone(), b.clone()
    new = rule(s, 2, b)
    assert torch.equal(s, kept[0]) and torch.equal(b, kept[1]) and not new.requires_grad
    torch.testing.assert_close(rule(s.flatten(0, 1), 2, b), new)
    narrow = rule(s.to(torch.bfloat16), 2, b.float())
    torch.testing.assert_close(narrow, rule(s.to(torch.bfloat16).float(), 2, b.float()))
    assert rule is expert_load or narrow.dtype == torch.float32
    assert rule(s[0, 0], 2, b).shape == (5,)  # one token


@pytest.mark.parametrize("rule", RULES)
def test_bad_arguments_of_the_rules_are_named(rule):
    s, b = normal(6, 5).sigmoid(), torch.zeros(5)
    for k in (0, -1, 5, 2.0, True):
        with pytest.raises(ValueError, match=f"^k must be an integer from 1 to 4, .*, got {k!r}"):
            rule(s, k, b)
    with pytest.raises(ValueError, match="^k must be an integer"):
        rule(torch.tensor(1.0), 1, b)
    with pytest.raises(ValueError, match=r"^bias has shape \(4,\), expected \[5\]"):
        rule(s, 2, b[:4])
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^scores must be finite, got {bad}"):
            rule(s.masked_fill(s == s[3, 1], bad), 2, b)
    none = partial(rule, s[:0], 2, b)
    if rule is quantile_balancing:
        with pytest.raises(ValueError, match=r"^scores has shape \(0, 5\), expected at least one"):
            none()
    else:
        assert torch.equal(none(), torch.zeros(5))

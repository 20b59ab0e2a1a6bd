import copy

import pytest
import torch
import torch.nn.functional as F

from gpt2_to_k3.layers import Experts, MixtureOfExperts, Router, SwiGLU, route

B, T, D, INNER, E, K = 2, 5, 6, 7, 4, 2
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def normal(*shape, seed=0):
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def make(dtype=F64):
    """A mixture whose experts differ, with a bias that changes who is chosen."""
    torch.manual_seed(0)
    layer = MixtureOfExperts(
        D, INNER, num_experts=E, top_k=K, num_shared_experts=3, routed_scaling_factor=1.7
    )
    for x in layer.state_dict().values():
        x.normal_(std=2 * x.shape[-1] ** -0.5 if x.ndim > 1 else 0.2)
    return layer.to(dtype)


@pytest.fixture
def x():
    return normal(B, T, D, seed=1)


@torch.no_grad()
def by_definition(layer, x):
    """A token at a time, an expert at a time, experts ranked by sorting."""
    w = {name: a.to(F64) for name, a in layer.state_dict().items()}

    def swiglu(x, gate, up, down):
        a = gate @ x
        return down @ (a * a.sigmoid() * (up @ x))

    y = torch.zeros_like(x)
    for b, t in torch.cartesian_prod(torch.arange(len(x)), torch.arange(x.shape[1])).tolist():
        row = x[b, t]
        s = (w["gate.weight"] @ row).sigmoid()
        ranked = sorted(range(E), key=lambda e: -(s[e] + w["gate.e_score_correction_bias"][e]))
        total = sum(s[e] for e in ranked[:K])
        y[b, t] = swiglu(
            row, *(w[f"shared_experts.{n}_proj.weight"] for n in ("gate", "up", "down"))
        )
        for e in ranked[:K]:
            out = swiglu(row, *(w[f"experts.{n}_proj"][e] for n in ("gate", "up", "down")))
            y[b, t] += 1.7 * s[e] / total * out
    return y


def by_expert(p, experts, n=E):
    """p [..., k] of experts [..., k] as a dense [..., n]."""
    return torch.zeros(*p.shape[:-1], n, dtype=p.dtype).scatter(-1, experts, p)


def test_route_by_hand():
    s = torch.tensor([[0.8, 0.4, 0.1, 0.2], [0.3, 0.6, 0.5, 0.5]])
    none = torch.zeros(4)
    p, experts = route(s.logit()[:1], none, 2)
    torch.testing.assert_close(by_expert(p, experts), torch.tensor([[2 / 3, 1 / 3, 0, 0]]))
    p, experts = route(s.logit(), torch.tensor([0, -1, 0, 0.5]), 2, scaling_factor=2.446)
    want = torch.tensor([[0.8, 0, 0, 0.2], [0, 0, 0.5, 0.5]]) * 2.446
    torch.testing.assert_close(by_expert(p, experts), want)


def test_the_bias_selects_and_has_no_part_in_the_weights():
    logits = normal(50, 8)
    plain, moved = route(logits, torch.zeros(8), 3), route(logits, normal(8, seed=2), 3)
    assert not torch.equal(by_expert(*plain, 8) > 0, by_expert(*moved, 8) > 0)
    s = logits.sigmoid()
    for p, experts in (plain, moved):
        chosen = s.gather(-1, experts)
        torch.testing.assert_close(p, chosen / chosen.sum(-1, keepdim=True))
    # The same constant for all experts changes nothing; the largest bias is always chosen.
    same = route(logits, torch.full((8,), -3.0), 3)
    assert torch.equal(by_expert(*same, 8), by_expert(*plain, 8))
    assert (route(logits, 9 * F.one_hot(torch.tensor(5), 8), 1)[1] == 5).all()


def test_gradients_of_route_go_to_the_chosen_logits_and_not_to_the_bias():
    logits, bias = normal(9, 5).requires_grad_(), torch.zeros(5, dtype=F64, requires_grad=True)
    p, experts = route(logits, bias, 2)
    (p * normal(9, 2, seed=3)).sum().backward()
    assert bias.grad is None
    assert torch.equal(logits.grad != 0, by_expert(torch.ones_like(p), experts, 5) > 0)


def test_route_computes_in_float32():
    """In bfloat16 the sigmoids of 6 and 6.5 are both 0.996, and p would be 1/2 and 1/2."""
    logits = torch.tensor([[6.0, 6.5, -9.0]], dtype=BF16)
    p, experts = route(logits, torch.tensor([0.0, 0.0, 1e-4]), 2)
    want = by_expert(*route(logits.double(), torch.zeros(3), 2), 3)
    assert p.dtype == F32
    torch.testing.assert_close(by_expert(p, experts, 3).double(), want, rtol=0, atol=1e-7)
    assert route(logits.double(), torch.zeros(3), 2)[0].dtype == F64


def test_scores_that_underflow_give_finite_weights():
    p, _ = route(torch.full((2, 4), -300.0), torch.zeros(4), 2)
    assert torch.equal(p, torch.zeros(2, 2))
    p, _ = route(torch.full((2, 4), -30.0), torch.zeros(4), 2)
    torch.testing.assert_close(p, torch.full((2, 2), 0.5))


@pytest.mark.parametrize("shape", [(3,), (2, 0, 3), (0, 3), (2, 4, 3)])
def test_route_takes_any_leading_axes(shape):
    p, experts = route(torch.zeros(shape), torch.zeros(3), 2)
    assert p.shape == experts.shape == (*shape[:-1], 2) and experts.dtype == torch.int64


@pytest.mark.parametrize("top_k", [0, 5, 2.0, True, -1])
def test_bad_calls_of_route_are_refused(top_k):
    with pytest.raises(ValueError, match=f"^top_k must be an integer from 1 to 4 .*got {top_k}"):
        route(torch.zeros(2, 4), torch.zeros(4), top_k)
    with pytest.raises(ValueError, match=r"^bias has shape \(1,\), expected \[4\]"):
        route(torch.zeros(2, 4), torch.zeros(1), 2)
    with pytest.raises(ValueError, match=r"^bias has shape \(2, 4\), expected \[4\]"):
        route(torch.zeros(2, 4), torch.zeros(2, 4), 2)


def test_swiglu_is_its_definition():
    layer, x = SwiGLU(D, INNER).double(), normal(3, D)
    gate, up, down = (p.detach() for p in layer.parameters())
    a = x @ gate.T
    torch.testing.assert_close(layer(x), (a * a.sigmoid() * (x @ up.T)) @ down.T)
    assert layer(x[:0]).shape == (0, D)


@pytest.mark.parametrize("dtype, atol", [(F64, 1e-12), (F32, 1e-4)])
def test_a_mixture_is_its_definition(x, dtype, atol):
    layer = make(dtype)
    got, want = layer(x.to(dtype)), by_definition(layer, x)
    assert got.dtype == dtype and want.std() > 0.5
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("top_k", [1, E])
def test_one_expert_or_all(x, top_k):
    torch.manual_seed(0)
    layer = MixtureOfExperts(D, INNER, num_experts=E, top_k=top_k).double()
    p, experts = layer.gate(x)
    outs = [
        F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        for gate, up, down in zip(*layer.experts.parameters(), strict=True)
    ]
    want = sum(by_expert(p, experts)[..., e, None] * out for e, out in enumerate(outs))
    torch.testing.assert_close(layer(x), want + layer.shared_experts(x))


def test_tokens_do_not_see_each_other(x):
    """C52: neither their order nor their company matters."""
    layer = make()
    want, order = layer(x), torch.tensor([3, 0, 4, 1, 2])
    torch.testing.assert_close(layer(x[:, order]), want[:, order], rtol=0, atol=1e-12)
    for b in range(B):
        for t in range(T):
            alone = layer(x[b : b + 1, t : t + 1])[0, 0]
            torch.testing.assert_close(alone, want[b, t], rtol=0, atol=1e-12)


def test_an_expert_without_a_token_does_not_crash_and_gets_no_gradient(x):
    """C52: selected experts get gradients, also through the router; the others none."""
    layer = make()
    layer.gate.e_score_correction_bias[:] = torch.tensor([5.0, -5.0, 0.0, 0.0])
    _, experts = layer.gate(x)
    used = set(experts.flatten().tolist())
    assert used == {0, 2, 3}
    layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        if name.startswith(("experts.", "gate.")):
            reached = {e for e in range(E) if (p.grad[e] != 0).any()}
            assert reached == used, name
        else:
            assert (p.grad != 0).all(), name
    assert layer(x[:1, :1]).shape == (1, 1, D)  # one token: two experts have none


def test_gradients_are_right(x):
    layer, x = make(), x.clone().requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def f(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *layer.parameters()), fast_mode=True)


def test_scaling_any_tensor_changes_the_output(x):
    """C51: the bias too."""
    layer = make()
    want = layer(x)
    for name, w in layer.state_dict().items():
        w.mul_(4)
        assert (layer(x) - want).abs().max() > 1e-3, name
        w.div_(4)


def test_the_bias_is_saved_but_not_trained():
    """C52."""
    layer = make()
    assert "gate.e_score_correction_bias" in layer.state_dict()
    assert not any("bias" in name for name, _ in layer.named_parameters())
    assert (Router(D, E, K).e_score_correction_bias == 0).all()


def test_the_module_changes_nothing_of_the_callers(x):
    layer, before = make(), x.clone()
    state = copy.deepcopy(layer.state_dict())
    assert torch.equal(layer(x), layer(x)) and torch.equal(x, before)
    assert all(torch.equal(w, state[name]) for name, w in layer.state_dict().items())


@pytest.mark.parametrize("shape", [(B, 0, D), (0, T, D)])
def test_an_empty_sequence_or_batch(shape):
    layer, x = make(), torch.zeros(shape, dtype=F64, requires_grad=True)
    y = layer(x)
    assert y.shape == shape
    y.sum().backward()
    assert x.grad.shape == shape


@pytest.mark.parametrize("dtype, limit", [(BF16, 0.05), (F16, 0.01)])
def test_16_bit_weights_keep_a_float32_router(x, dtype, limit):
    layer = make(F32)
    bias = layer.gate.e_score_correction_bias.clone()
    torch.nn.Sequential(layer).to(dtype)
    layer = copy.deepcopy(layer).to(dtype)
    assert torch.equal(layer.gate.e_score_correction_bias, bias) and bias.dtype == F32
    assert {p.dtype for p in layer.parameters()} == {dtype}
    p, _ = layer.gate(x.to(dtype))
    assert p.dtype == F32
    torch.testing.assert_close(p.sum(-1), torch.full((B, T), 1.7))
    y = layer(x.to(dtype))
    assert y.dtype == dtype
    want = layer.double()(x.to(dtype).double())  # the same rounded weights
    assert (y.double() - want).abs().max() < limit * want.abs().max()
    assert layer.gate.e_score_correction_bias.dtype == F64
    assert layer.to("meta", dtype).gate.e_score_correction_bias.device.type == "meta"


def test_autocast_does_not_narrow_the_router(x):
    router = make(F32).gate
    want, x = router(x.float())[0], x.float()
    with torch.autocast("cpu", BF16):
        got = router(x)[0]
    assert torch.equal(got, want)


def test_outputs_of_experts_are_summed_in_float32():
    """In bfloat16 each of 40 experts' 1/256 beside 1 would be lost."""
    experts = Experts(1, 1, 41).to(BF16)
    for p in experts.parameters():
        p.data.fill_(1)
    one = F.silu(torch.ones(()))
    p = torch.full((1, 41), 1 / 256) / one
    p[0, 0] = 1 / one
    y = experts(torch.ones(1, 1, dtype=BF16), p, torch.arange(41)[None])
    assert y.dtype == BF16 and y.item() == pytest.approx(1 + 40 / 256, rel=0.01)


def test_weights_start_finite_and_as_in_nn_linear():
    torch.manual_seed(0)
    layer = MixtureOfExperts(64, 49, num_experts=E, top_k=K)
    for name, p in layer.named_parameters():
        bound = p.shape[-1] ** -0.5
        assert p.abs().max() <= bound and p.std() > 0.5 * bound, name
    assert layer.shared_experts.up_proj.weight.shape == (49, 64)
    assert make().shared_experts.up_proj.weight.shape == (3 * INNER, D)


def test_bad_sizes_and_inputs_are_refused(x):
    sizes = dict(
        hidden_size=D, intermediate_size=INNER, num_experts=E, top_k=K, num_shared_experts=1
    )
    for name in sizes:
        for bad in (0, 1.0, True):
            with pytest.raises(ValueError, match=f"^{name} must be an integer >= 1, got {bad}"):
                MixtureOfExperts(**(sizes | {name: bad}))
    with pytest.raises(ValueError, match="^top_k=5 is more than num_experts=4"):
        MixtureOfExperts(**(sizes | dict(top_k=5)))
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"scaling_factor must be finite and > 0, got {bad}"):
            MixtureOfExperts(**sizes, routed_scaling_factor=bad)
    with pytest.raises(ValueError, match="^num_experts must be"):
        Experts(D, INNER, 0)
    layer = make()
    with pytest.raises(ValueError, match=r"^x has shape \(2, 5, 5\), expected \[B, T, 6\]"):
        layer(x[..., :-1])
    with pytest.raises(ValueError, match=r"^x has shape \(5, 6\), expected \[B, T, 6\]"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"^x has shape \(2, 5, 5\), expected \[..., 6\]"):
        layer.gate(x[..., :-1])

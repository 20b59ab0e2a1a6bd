"""What DeltaNet, GatedDeltaNet and KimiDeltaAttention owe alike, and each its formula."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gpt2_to_k3.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, LatentCache

B, T, D, H, K = 2, 71, 12, 3, 5  # more than one chunk; H * K is not D
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64

K3 = partial(KimiDeltaAttention, lower_bound=-5.0, use_full_rank_gate=True)
LAYERS = {
    "DeltaNet": DeltaNet,
    "GatedDeltaNet": partial(GatedDeltaNet, num_v_heads=6, head_v_dim=7),
    "KimiLinear": KimiDeltaAttention,
    "KimiK3": K3,
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def make(name, dtype=F64):
    """A layer whose beta, decay and gates differ much from token to token."""
    torch.manual_seed(0)
    layer = LAYERS[name](D, H, K)
    for name, p in layer.named_parameters():
        if name.endswith("conv1d.weight"):
            p.data.normal_()
        elif p.ndim > 1:
            p.data.normal_(std=2 * p.shape[1] ** -0.5)
        else:
            p.data.add_(torch.randn_like(p), alpha=0.3)
    return layer.to(dtype)


@pytest.fixture
def x():
    return torch.randn(B, T, D, dtype=F64, generator=torch.Generator().manual_seed(1))


def run(layer, x, lengths, cache=None):
    cache = layer.init_cache(len(x)) if cache is None else cache
    with torch.no_grad():
        y = torch.cat([layer(piece, cache) for piece in x.split(lengths, dim=1)], dim=1)
    return y, cache


@torch.no_grad()
def by_definition(layer, x):
    """The layer as its papers write it: a token at a time, a head at a time, row vectors."""
    w = {name: p.to(F64) for name, p in layer.named_parameters()}
    H, K, HV, V = layer.num_heads, layer.head_dim, layer.num_v_heads, layer.head_v_dim
    y = torch.zeros_like(x)
    for b, rows in enumerate(x):
        mixed = []
        for n in "qkv":
            a = F.pad((rows @ w[f"{n}_proj.weight"].T).T, (3, 0))
            a = F.conv1d(a, w[f"{n}_conv1d.weight"], groups=len(a)).T
            mixed.append(a * a.sigmoid())
        S = [torch.zeros(K, V, dtype=F64) for _ in range(HV)]
        for t, x_t in enumerate(rows):
            if "g_proj.weight" in w:
                gate = w["g_proj.weight"] @ x_t
            elif "g_a_proj.weight" in w:
                gate = w["g_b_proj.weight"] @ (w["g_a_proj.weight"] @ x_t)
            heads = []
            for h in range(HV):
                of, at = h // (HV // H), slice(h * V, h * V + V)
                q, k = (a[t, of * K : of * K + K] for a in mixed[:2])
                q, k = (a / (a @ a + 1e-6).sqrt() for a in (q, k))
                beta = (w["b_proj.weight"][h] @ x_t).sigmoid()
                if "a_proj.weight" in w:
                    z = (w["a_proj.weight"][h] @ x_t + w["dt_bias"][h]).reshape(1)
                elif "f_a_proj.weight" in w:
                    z = w["f_b_proj.weight"][h * K : h * K + K] @ (w["f_a_proj.weight"] @ x_t)
                    z = z + w["dt_bias"][h * K : h * K + K]
                if "A_log" in w:
                    rate = w["A_log"][h].exp()
                    bound = getattr(layer, "lower_bound", None)
                    g = bound * (rate * z).sigmoid() if bound else -rate * (1 + z.exp()).log()
                    S[h] = g.exp()[:, None] * S[h]
                S[h] = S[h] + beta * torch.outer(k, mixed[2][t, at] - k @ S[h])
                o = q @ S[h] / K**0.5
                o = w["o_norm.weight"] * o / ((o @ o) / V + 1e-5).sqrt()
                if type(layer) is GatedDeltaNet:
                    o = o * gate[at] * gate[at].sigmoid()
                elif type(layer) is KimiDeltaAttention:
                    o = o * gate[at].sigmoid()
                heads.append(o)
            y[b, t] = w["o_proj.weight"] @ torch.cat(heads)
    return y


@every_layer
@pytest.mark.parametrize("dtype, atol", [(F64, 1e-12), (F32, 2e-5)])
def test_it_is_its_definition(name, x, dtype, atol):
    layer = make(name, dtype)
    got, want = layer(x.to(dtype)), by_definition(layer, x)
    assert got.dtype == dtype and want.std() > 0.5
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


SPLITS = [[n, T - n] for n in (0, 1, 2, 3, 4, 63, 64, 65, 70, T)]
SPLITS += [[1] * T, [2, 0, 1, 1, 60, 7], [3, 4, 64]]


@every_layer
@pytest.mark.parametrize("dtype, atol", [(F64, 1e-12), (F32, 2e-5)])
@pytest.mark.parametrize("split", SPLITS, ids=lambda s: f"{s[:6]}")
def test_every_split_equals_one_pass(name, x, dtype, atol, split):
    layer, x = make(name, dtype), x.to(dtype)
    (y, cache), (_, whole) = run(layer, x, split), run(layer, x, [T])
    torch.testing.assert_close(y, layer(x), rtol=0, atol=atol)
    torch.testing.assert_close(cache.S, whole.S, rtol=0, atol=atol)
    for tail, want in zip(cache.tails, whole.tails, strict=True):
        # A projection of one row may round otherwise than one of many.
        torch.testing.assert_close(tail, want, rtol=0, atol=atol)
    assert cache.length == T


@every_layer
@pytest.mark.parametrize("split", [[T], [64, 7], [1] * T])
def test_a_later_token_does_not_move_earlier_outputs(name, x, split):
    layer, changed = make(name), x.clone()
    changed[:, 66] += 1
    before, after = run(layer, x, split)[0], run(layer, changed, split)[0]
    torch.testing.assert_close(before[:, :66], after[:, :66], rtol=0, atol=1e-12)
    assert ((before - after)[:, 66:].abs() > 1e-6).all()


@every_layer
def test_each_sequence_of_a_batch_is_on_its_own(name, x):
    layer = make(name)
    alone = torch.cat([run(layer, x[i : i + 1], [66, 1, 4])[0] for i in range(B)])
    torch.testing.assert_close(run(layer, x, [66, 1, 4])[0], alone, rtol=0, atol=1e-12)


@every_layer
def test_the_module_holds_no_state_and_changes_none_of_the_callers(name, x):
    layer = make(name)
    kept, weights = x.clone(), copy.deepcopy(layer.state_dict())
    first, cache = run(layer, x, [66, 1, 4])
    assert torch.equal(run(layer, x, [66, 1, 4])[0], first)
    assert torch.equal(x, kept) and not list(layer.buffers())
    assert all(torch.equal(w, weights[n]) for n, w in layer.state_dict().items())
    state, tails = cache.S, cache.tails  # a caller's snapshot must outlive the next call
    kept = state.clone(), [tail.clone() for tail in tails]
    run(layer, x[:, :3], [1, 2, 0], cache)
    assert torch.equal(state, kept[0]) and all(map(torch.equal, tails, kept[1]))
    assert cache.length == T + 3


@every_layer
@pytest.mark.parametrize("shape", [(B, 0, D), (0, T, D), (0, 1, D)])
def test_an_empty_sequence_or_batch(name, shape):
    layer, x = make(name), torch.zeros(shape, dtype=F64)
    cache = layer.init_cache(shape[0])
    assert layer(x).shape == layer(x, cache).shape == shape
    assert cache.length == shape[1] and (cache.S == 0).all()


@every_layer
def test_no_tokens_leave_the_memory_as_it_was(name, x):
    layer = make(name)
    _, cache = run(layer, x, [T])
    before = copy.deepcopy(cache)
    run(layer, x[:, :0], [0], cache)
    assert torch.equal(cache.S, before.S) and all(map(torch.equal, cache.tails, before.tails))


@every_layer
@pytest.mark.parametrize("dtype", [F32, F64])
def test_zero_input_gives_zero_with_finite_gradients(name, dtype):
    """Zero keys have no direction, and the norm of a zero output none either."""
    layer = make(name, dtype)
    x = torch.zeros(B, T, D, dtype=dtype, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, torch.zeros_like(y))
    y.sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())


@every_layer
def test_gradients_reach_every_weight_and_are_right(name, x):
    """C36, C51: each weight moves the output as its gradient says."""
    layer, x = make(name), x[:1, :9].clone().requires_grad_()
    weigh = torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(2))
    (layer(x) * weigh).sum().backward()
    for p in [x, *layer.parameters()]:
        assert (p.grad != 0).any(-1).all()
        step = 1e-6 * torch.randn(p.shape, dtype=F64, generator=torch.Generator().manual_seed(3))
        with torch.no_grad():
            moved = [(layer(p.add_(s) if p is x else (p.add_(s), x)[1]) * weigh).sum().item()
                     for s in (step, -2 * step)]  # fmt: skip
            p.add_(step)
        want = (p.grad * step).sum().item()
        assert abs((moved[0] - moved[1]) / 2 - want) <= 1e-5 * max(abs(want), 1e-6)


@every_layer
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_16_bit_weights_keep_a_float32_state_and_decay(name, x, dtype):
    """C28, C9: also through parents, copies and a second conversion."""
    layer = make(name, F32)
    exact = {n: p.detach().clone() for n, p in layer.named_parameters(recurse=False)}
    assert set(exact) == (set() if name == "DeltaNet" else {"A_log", "dt_bias"})
    layer(x.float()).sum().backward()
    torch.nn.Sequential(layer).to(dtype)
    for n, p in layer.named_parameters():
        assert p.dtype == p.grad.dtype == (F32 if n in exact else dtype), n
    layer = copy.deepcopy(layer).to(dtype)
    assert all(torch.equal(layer.get_parameter(n), p) for n, p in exact.items())
    y, cache = run(layer, x.to(dtype), [66, 1, 4])
    assert y.dtype == dtype and cache.S.dtype == F32
    assert all(tail.dtype == dtype for tail in cache.tails)
    want = layer.double()(x.to(dtype).double())  # the same rounded weights
    assert (y.double() - want).abs().max() < (0.1 if dtype == BF16 else 0.02) * want.abs().max()
    assert all(p.dtype == F64 for p in layer.parameters())
    assert layer.init_cache(1).S.dtype == F64
    assert {p.device.type for p in layer.to("meta", dtype).parameters()} == {"meta"}
    assert layer.init_cache(1).S.device.type == "meta"


def test_the_decay_is_computed_in_float32():
    """C9: in bfloat16 the decay 0.999 is 1, and nothing is ever forgotten."""
    torch.manual_seed(0)
    layer = GatedDeltaNet(D, 1, K).bfloat16()
    for p in layer.parameters():
        p.data.fill_(0.1)
    layer.a_proj.weight.data.zero_()
    layer.A_log.data.zero_()
    layer.dt_bias.data.fill_(-6.9)
    x = torch.cat([torch.ones(1, 1, D), torch.zeros(1, 1003, D)], 1).bfloat16()
    S = [run(layer, x[:, :n], [n])[1].S for n in (4, 1004)]
    torch.testing.assert_close(S[1], S[0] * 2.718281828 ** (-1000 * 0.0010072), rtol=1e-3, atol=0)


def test_beta_is_computed_in_float32():
    """In bfloat16 sigmoid(6.5) is 1: nothing of the old value would remain."""
    layer = make("DeltaNet", BF16)
    layer.b_proj.weight.data.zero_()
    layer.b_proj.weight.data[:, 0] = 6.5
    x = torch.zeros(1, 1, D, dtype=BF16)
    x[..., 0] = 1
    *_, beta, _ = layer.project(x, None)
    assert beta.dtype == F32
    torch.testing.assert_close(beta, torch.full((1, 1, H), 6.5).sigmoid())


@every_layer
def test_the_cache_has_one_size(name, x):
    layer = make(name, F32)
    cache = layer.init_cache(B)
    HV, V = (6, 7) if name == "GatedDeltaNet" else (H, K)
    assert cache.S.shape == (B, HV, K, V) and cache.batch_size == B and cache.length == 0
    want = 4 * B * (HV * K * V + 3 * (2 * H * K + HV * V))
    assert cache.nbytes == want
    for length in (T, 1, 0):
        run(layer, x[:, :length].float(), [length], cache)
        held = [cache.S, *cache.tails]
        assert cache.nbytes == sum(t.untyped_storage().nbytes() for t in held) == want


@every_layer
def test_a_bad_call_is_refused_and_leaves_the_cache_as_it_was(name, x):
    layer = make(name)
    _, cache = run(layer, x, [T])
    before = copy.deepcopy(cache)
    nan = torch.full_like(x, torch.nan)  # refused by the rule, after the convolutions have run
    for bad, message in [
        (x[..., :-1], r"^x has shape \(2, 71, 11\), expected \[B, T, 12\]"),
        (x[0], r"^x has shape \(71, 12\), expected \[B, T, 12\]"),
        (x[:1], r"^tail has shape \(2, 3, 15\), expected \[1, 3, 15\]"),
        (nan, r"must be .*, got nan"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(layer, bad, [bad.shape[1]], cache)
        assert torch.equal(cache.S, before.S) and all(map(torch.equal, cache.tails, before.tails))
        assert cache.length == T


def test_a_cache_of_another_layer_is_refused(x):
    layer = make("DeltaNet")
    with pytest.raises(ValueError, match=r"^tail has shape \(2, 3, 18\), expected \[2, 3, 15\]"):
        layer(x, DeltaNet(D, H, 6).double().init_cache(B))
    with pytest.raises(ValueError, match=r"^initial_state has shape \(2, 5, 3, 3\)"):
        layer(x, DeltaNet(D, 5, 3).double().init_cache(B))
    other = LatentCache(B, 80, 4, dtype=torch.float64, device="cpu")
    with pytest.raises(
        ValueError, match="^cache must be a RecurrentCache or None, got LatentCache"
    ):
        layer(x, other)
    with pytest.raises(ValueError, match="^tail is torch.float32 on cpu, but x is torch.float64"):
        layer(x, make("DeltaNet", F32).init_cache(B))

import copy

import pytest
import torch

from gpt2_to_k3.layers import KVCache, MultiHeadLatentAttention

B, T, D, H = 2, 7, 12, 3
SIZES = dict(kv_lora_rank=9, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=5, n_ctx=10)
F64 = torch.float64
KINDS = {
    "KimiLinear": {},
    "KimiK3": dict(q_lora_rank=8, output_gate=True),
    "lora": dict(q_lora_rank=8),
    "gate": dict(output_gate=True),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, dtype=F64):
    """A layer whose scores, gates and norms differ much from token to token."""
    torch.manual_seed(0)
    layer = MultiHeadLatentAttention(D, H, **SIZES, **KINDS[kind])
    for p in layer.parameters():
        if p.ndim > 1:
            p.data.normal_(std=2 * p.shape[1] ** -0.5)
        else:
            p.data.add_(torch.randn_like(p), alpha=0.3)
    return layer.to(dtype)


@pytest.fixture
def x():
    return torch.randn(B, T, D, dtype=F64, generator=torch.Generator().manual_seed(1))


def run(layer, x, lengths):
    """Feed x in pieces of these lengths through one cache."""
    cache = layer.init_cache(len(x))
    with torch.no_grad():
        y = torch.cat([layer(piece, cache) for piece in x.split(lengths, dim=1)], dim=1)
    assert cache.length == sum(lengths)
    return y


@torch.no_grad()
def by_definition(layer, x):
    """A token at a time, a head at a time, a key at a time."""
    w = {name: p.to(F64) for name, p in layer.named_parameters()}

    def norm(a, name):
        return w[f"{name}.weight"] * a / (a.square().mean() + 1e-6).sqrt()

    y = torch.zeros_like(x)
    for b, tokens in enumerate(x):
        kv = []
        for t, x_t in enumerate(tokens):
            if layer.q_lora_rank:
                q = w["q_b_proj.weight"] @ norm(w["q_a_proj.weight"] @ x_t, "q_a_layernorm")
            else:
                q = w["q_proj.weight"] @ x_t
            a = w["kv_a_proj_with_mqa.weight"] @ x_t
            kv.append((w["kv_b_proj.weight"] @ norm(a[:9], "kv_a_layernorm"), a[9:]))
            heads = []
            for h in range(H):
                q_h = q[h * 6 : h * 6 + 6]
                keys = [torch.cat([up[h * 9 : h * 9 + 4], shared]) for up, shared in kv]
                p = torch.stack([(q_h @ k) / 6**0.5 for k in keys]).exp()
                values = torch.stack([up[h * 9 + 4 : h * 9 + 9] for up, _ in kv])
                heads.append(p @ values / p.sum())
            o = torch.cat(heads)
            if layer.output_gate:
                o = o * (w["g_proj.weight"] @ x_t).sigmoid()
            y[b, t] = w["o_proj.weight"] @ o
    return y


@every_kind
@pytest.mark.parametrize("dtype, atol", [(F64, 1e-12), (torch.float32, 2e-5)])
def test_it_is_its_definition(kind, x, dtype, atol):
    layer = make(kind, dtype)
    got, want = layer(x.to(dtype)), by_definition(layer, x)
    assert got.dtype == dtype and want.std() > 0.5
    torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


@pytest.mark.parametrize("held", range(T + 1))
def test_both_forms_are_equal_for_any_tokens_after_any_cached(x, held):
    """C48: nope, rope, v and the rank all differ."""
    layer = make("KimiK3")
    q, rows = layer.project(x)
    want = layer.naive(q, rows)[:, held:]
    assert want.shape == (B, T - held, H, 5)
    for form in (layer.naive, layer.absorbed):
        torch.testing.assert_close(form(q[:, held:], rows), want, rtol=0, atol=1e-12)


@every_kind
@pytest.mark.parametrize("form", ["naive", "absorbed", None])
@pytest.mark.parametrize("split", [[n, T - n] for n in range(T + 1)] + [[1] * T, [2, 2, 3]])
def test_prefill_and_decode_equal_one_pass_at_every_split(kind, x, form, split, monkeypatch):
    layer = make(kind)
    want = layer(x)
    if form:  # this one alone, whatever the piece's length
        monkeypatch.setattr(layer, "naive", getattr(layer, form))
        monkeypatch.setattr(layer, "absorbed", getattr(layer, form))
    torch.testing.assert_close(run(layer, x, split), want, rtol=0, atol=1e-12)


def test_decoding_expands_no_cached_row(x):
    """The point of the absorbed form: work and memory of a step do not grow by keys and values."""
    layer, calls = make("KimiK3"), []
    layer.kv_b_proj.register_forward_hook(lambda *_: calls.append(1))
    run(layer, x, [1] * T)
    assert calls == []
    run(layer, x, [5, 1, 1])
    assert calls == [1]


def test_the_order_of_cached_tokens_does_not_matter(x):
    """C48, NoPE: a query sees a set."""
    layer = make("KimiLinear")
    cache = layer.init_cache(B)
    with torch.no_grad():
        layer(x[:, :6], cache)
        shuffled = copy.deepcopy(cache)
        shuffled.rows[:, :6] = cache.rows[:, [3, 0, 5, 1, 4, 2]]
        want, got = layer(x[:, 6:], cache), layer(x[:, 6:], shuffled)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("split", [None, [2, 2], [1, 3], [0, 4], [1, 1, 1, 1]])
def test_the_last_token_does_not_move_earlier_outputs(x, split):
    """C21: also when a piece arrives with a cache that is not empty."""
    layer, x = make("KimiK3"), x[:, :4]
    changed = x.clone()
    changed[:, -1] += 1
    f = layer if split is None else lambda x: run(layer, x, split)
    before, after = f(x), f(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert (before[:, -1] != after[:, -1]).all()


@every_kind
def test_each_sequence_of_a_batch_is_on_its_own(kind, x):
    layer = make(kind)
    alone = torch.cat([run(layer, x[i : i + 1], [3, 1, 3]) for i in range(B)])
    torch.testing.assert_close(run(layer, x, [3, 1, 3]), alone, rtol=0, atol=1e-12)


def test_the_module_holds_no_state_and_changes_no_input(x):
    layer, before = make("KimiK3"), x.clone()
    weights = copy.deepcopy(layer.state_dict())
    first = run(layer, x, [3, 1, 3])
    assert torch.equal(run(layer, x, [3, 1, 3]), first) and not list(layer.buffers())
    assert torch.equal(x, before)
    assert all(torch.equal(w, weights[n]) for n, w in layer.state_dict().items())


@every_kind
@pytest.mark.parametrize("shape", [(B, 0, D), (0, T, D), (0, 1, D)])
def test_an_empty_sequence_or_batch(kind, shape):
    layer, x = make(kind), torch.zeros(shape, dtype=F64)
    assert layer(x).shape == shape
    assert layer(x, layer.init_cache(shape[0])).shape == shape
    assert layer.absorbed(*layer.project(x)).shape == (*shape[:2], H, 5)


@every_kind
@pytest.mark.parametrize("length", [1, T])
def test_gradients_reach_every_weight_and_are_right(kind, x, length):
    """C51: each weight moves the output as its gradient says, in either form."""
    layer, x = make(kind), x[:, :length].clone().requires_grad_()
    names = [name for name, _ in layer.named_parameters()]

    def f(x, *weights):
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), (x,))

    assert torch.autograd.gradcheck(f, (x, *layer.parameters()), fast_mode=True)
    layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        # One token alone has weight 1: nothing asks for keys or queries.
        idle = length == 1 and name.startswith("q_")
        assert (p.grad.abs().sum() > 1e-9) != idle, name


@every_kind
def test_scaling_any_weight_changes_the_output(kind, x):
    """C51. Half of its rows: RMSNorm takes back a factor of all of q_a_proj."""
    layer = make(kind)
    want = layer(x)
    for name, p in layer.named_parameters():
        half = p.data[: len(p) // 2]
        half.mul_(2)
        assert (layer(x) - want).abs().max() > 1e-3, name
        half.div_(2)


@pytest.mark.parametrize("dtype, limit", [(torch.bfloat16, 0.1), (torch.float16, 0.01)])
@pytest.mark.parametrize("split", [[T], [1] * T])
def test_16_bit_weights(x, dtype, limit, split):
    layer = make("KimiK3", dtype)
    y = run(layer, x.to(dtype), split)
    assert y.dtype == layer.init_cache(1).rows.dtype == dtype
    want = layer.double()(x.to(dtype).double())  # the same rounded weights
    assert (y.double() - want).abs().max() < limit * want.abs().max()


def test_kimi_linear_keeps_576_numbers_a_token():
    sizes = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    with torch.device("meta"):
        layer = MultiHeadLatentAttention(2304, 32, **sizes, n_ctx=1048576).bfloat16()
    cache = layer.init_cache(1, capacity=1)
    assert cache.rows.shape == (1, 1, 576) and cache.nbytes == 576 * 2
    assert layer.init_cache(3).rows.shape == (3, 1048576, 576)
    assert sum(p.numel() for p in layer.parameters()) == 29_114_880
    # Keys and values of 32 heads would be 10,240.
    assert sum(32 * n for n in (128 + 64, 128)) == 10_240


def test_a_layer_of_kimi_k3_counts_as_published():
    sizes = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    with torch.device("meta"):
        layer = MultiHeadLatentAttention(
            7168, 96, **sizes, q_lora_rank=1536, output_gate=True, n_ctx=1048576
        )
    assert sum(p.numel() for p in layer.parameters()) == 232_196_096


@pytest.mark.parametrize("split", [[4, 3], [4, 1, 1], [6], [5, 0, 1]])
def test_an_overflow_is_refused_before_anything_is_lost(x, split):
    """C25."""
    layer = make("KimiK3")
    cache = layer.init_cache(B, capacity=5)
    *fits, too_many = x[:, : sum(split)].split(split, 1)
    with torch.no_grad():
        for piece in fits:
            layer(piece, cache)
        before, length = cache.rows.clone(), cache.length
        with pytest.raises(ValueError, match=f"capacity 5, length {length}, new tokens"):
            layer(too_many, cache)
        assert cache.length == length and torch.equal(cache.rows, before)
        layer(x[:, length:5], cache)
    assert cache.length == cache.capacity == 5


def test_bad_sizes_and_inputs_are_refused(x):
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "n_ctx"):
        for bad in (0, 2.0, True):
            with pytest.raises(ValueError, match=f"^{name} must be an integer >= 1, got {bad}"):
                MultiHeadLatentAttention(D, H, **(SIZES | {name: bad}))
    with pytest.raises(ValueError, match="^q_lora_rank must be"):
        MultiHeadLatentAttention(D, H, **SIZES, q_lora_rank=0)
    with pytest.raises(ValueError, match="^num_heads must be"):
        MultiHeadLatentAttention(D, 0, **SIZES)
    layer = make("KimiK3")
    with pytest.raises(ValueError, match=r"^x has shape \(2, 7, 11\), expected \[B, T, 12\]"):
        layer(x[..., :-1])
    with pytest.raises(ValueError, match=r"^x has shape \(7, 12\)"):
        layer(x[0])
    with pytest.raises(ValueError, match="^cache must be a LatentCache or None, got KVCache"):
        layer(x, KVCache(2, 9, 3, 4, dtype=torch.float64, device="cpu"))
    with pytest.raises(ValueError, match=r"^rows has shape \(2, 7, 11\), expected \[3, any, 11\]"):
        layer(x, layer.init_cache(3))

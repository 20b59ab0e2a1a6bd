import pytest
import torch

from gpt2_to_k3.layers import CausalSelfAttention

B, T, D, H = 2, 7, 12, 3


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return CausalSelfAttention(D, H, n_ctx=10).double()


@pytest.fixture
def x(layer):
    return torch.randn(B, T, D, dtype=torch.float64)


def run(layer, x, lengths):
    """Feed x in pieces of these lengths through one cache."""
    cache = layer.init_cache(len(x))
    with torch.no_grad():
        y = torch.cat([layer(piece, cache) for piece in x.split(lengths, dim=1)], dim=1)
    assert cache.length == sum(lengths)
    return y


def test_equals_multihead_attention_of_torch(layer, x):
    peer = torch.nn.MultiheadAttention(D, H, batch_first=True, dtype=torch.float64)
    weights = {
        "in_proj_weight": layer.c_attn.weight,
        "in_proj_bias": layer.c_attn.bias,
        "out_proj.weight": layer.c_proj.weight,
        "out_proj.bias": layer.c_proj.bias,
    }
    peer.load_state_dict(weights)
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    want, _ = peer(x, x, x, attn_mask=hidden, need_weights=False)
    torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("split", [[n, T - n] for n in range(T + 1)] + [[1] * T, [2, 2, 3]])
def test_prefill_and_decode_equal_one_pass_at_every_split(layer, x, split):
    torch.testing.assert_close(run(layer, x, split), layer(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("split", [None, [2, 2], [1, 3], [0, 4], [1, 1, 1, 1]])
def test_the_last_token_does_not_move_earlier_outputs(layer, x, split):
    """C21: also when a piece arrives with a cache that is not empty."""
    x = x[:, :4]
    changed = x.clone()
    changed[:, -1] += 1
    f = layer if split is None else lambda x: run(layer, x, split)
    before, after = f(x), f(changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert (before[:, -1] != after[:, -1]).all()


def test_each_sequence_of_a_batch_is_on_its_own(layer, x):
    alone = torch.cat([run(layer, x[i : i + 1], [3, 4]) for i in range(B)])
    torch.testing.assert_close(run(layer, x, [3, 4]), alone, rtol=0, atol=1e-12)


def test_the_module_holds_no_state_of_a_sequence(layer, x):
    first = run(layer, x, [3, 4])
    assert torch.equal(run(layer, x, [3, 4]), first)
    assert not list(layer.buffers())


def test_the_input_is_unchanged(layer, x):
    before = x.clone()
    run(layer, x, [3, 4])
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(B, 0, D), (0, T, D)])
def test_an_empty_sequence_or_batch(layer, shape):
    x = torch.zeros(shape, dtype=torch.float64)
    assert layer(x).shape == shape
    assert layer(x, layer.init_cache(shape[0])).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_init_cache_follows_the_weights_and_n_ctx(layer, dtype):
    cache = layer.to(dtype).init_cache(5)
    assert cache.k.shape == cache.v.shape == (5, 10, H, D // H)
    assert cache.k.dtype == dtype and cache.length == 0
    assert layer.init_cache(5, capacity=4).capacity == 4
    assert layer.to("meta").init_cache(1).k.device.type == "meta"


def test_gradients_reach_every_weight(layer, x):
    layer(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in layer.parameters())


def test_an_overflow_is_refused(layer, x):
    """C25."""
    cache = layer.init_cache(B, capacity=5)
    with torch.no_grad():
        layer(x[:, :4], cache)
        with pytest.raises(ValueError, match="capacity 5, length 4, new tokens 3"):
            layer(x[:, 4:], cache)
    assert cache.length == 4


def test_bad_sizes_are_refused(layer, x):
    with pytest.raises(ValueError, match="n_embd=10.*n_head=3"):
        CausalSelfAttention(10, 3, 4)
    with pytest.raises(ValueError, match="n_head=0"):
        CausalSelfAttention(10, 0, 4)
    with pytest.raises(ValueError, match=r"^x has shape \(2, 7, 11\), expected \[B, T, 12\]"):
        layer(x[..., :-1])
    with pytest.raises(ValueError, match=r"^x has shape \(7, 12\)"):
        layer(x[0])
    with pytest.raises(ValueError, match=r"^k has shape \(2, "):
        layer(x, layer.init_cache(3))

import pytest
import torch

from gpt2_to_k3.layers import KVCache

B, CAPACITY, H, K, V = 2, 7, 3, 5, 11


def make(**changes):
    sizes = dict(batch_size=B, capacity=CAPACITY, n_head=H, key_dim=K, value_dim=V)
    return KVCache(**(sizes | dict(dtype=torch.float32, device="cpu") | changes))


def rows(T, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, H, K, generator=g), torch.randn(B, T, H, V, generator=g)


def test_append_returns_everything_held_in_order():
    cache, (k, v) = make(), rows(CAPACITY)
    for start, end in [(0, 3), (3, 3), (3, 4), (4, 7)]:
        k_all, v_all = cache.append(k[:, start:end], v[:, start:end])
        assert cache.length == end
        assert torch.equal(k_all, k[:, :end]) and torch.equal(v_all, v[:, :end])


def test_value_dim_defaults_to_key_dim():
    assert make(value_dim=None).v.shape == (B, CAPACITY, H, K)


@pytest.mark.parametrize("held, new", [(0, 8), (5, 3), (7, 1), (1, 7)])
def test_overflow_is_refused_and_leaves_the_cache_as_it_was(held, new):
    """C25: the old length counts, not the new tokens alone."""
    cache = make()
    cache.append(*rows(held))
    before = cache.k.clone(), cache.v.clone()
    with pytest.raises(ValueError, match=f"capacity 7, length {held}, new tokens {new}"):
        cache.append(*rows(new, seed=1))
    assert cache.length == held
    assert torch.equal(cache.k, before[0]) and torch.equal(cache.v, before[1])
    cache.append(*rows(7 - held))
    assert cache.length == 7


def test_a_cache_may_be_filled_to_the_last_row():
    cache = make()
    cache.append(*rows(7))
    cache.append(*rows(0))
    assert cache.length == cache.capacity == 7


def test_bytes_allocated_and_used():
    cache = make(dtype=torch.float16)
    cache.append(*(x.half() for x in rows(3)))
    assert cache.nbytes == B * CAPACITY * H * (K + V) * 2
    assert cache.used_bytes == B * 3 * H * (K + V) * 2


def test_a_gpt2_layer_keeps_3072_bytes_a_token_in_fp16():
    cache = KVCache(1, 1, 12, 64, dtype=torch.float16, device="meta")
    assert 12 * cache.nbytes == 36_864


def test_the_cache_does_not_alias_the_callers_tensors():
    cache, (k, v) = make(), rows(2)
    kept = k.clone(), v.clone()
    k_all, v_all = cache.append(k, v)
    k.zero_(), v.zero_()
    assert torch.equal(k_all, kept[0]) and torch.equal(v_all, kept[1])
    k_all.fill_(7)
    assert (k == 0).all()


def test_two_caches_do_not_alias_each_other():
    a, b = make(), make()
    a.append(*rows(2))
    assert b.length == 0 and (b.k == 0).all() and (b.v == 0).all()


def test_the_rows_are_never_reallocated():
    cache = make()
    start = cache.k.data_ptr(), cache.v.data_ptr()
    for _ in range(CAPACITY):
        k_all, v_all = cache.append(*rows(1))
    assert (k_all.data_ptr(), v_all.data_ptr()) == start


def test_append_does_not_build_a_graph_under_no_grad():
    cache, (k, v) = make(), rows(1)
    with torch.no_grad():
        k_all, _ = cache.append(k.requires_grad_(), v.requires_grad_())
    assert not k_all.requires_grad and not cache.k.requires_grad


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: x[:1], r"has shape \(1, 2, 3, .*expected \[2, any, 3,"),
        (lambda x: x[:, :, :1], r"has shape \(2, 2, 1, .*expected \[2, any, 3,"),
        (lambda x: x[..., :1], r"has shape \(2, 2, 3, 1\), expected \[2, any, 3,"),
        (lambda x: x[0], r"has shape \(2, 3, .*expected \[2, any, 3,"),
        (lambda x: x.double(), "has dtype torch.float64, expected torch.float32"),
        (lambda x: x.half(), "has dtype torch.float16, expected torch.float32"),
        (lambda x: x.to("meta"), "is on meta, expected cpu"),
    ],
)
def test_rows_that_do_not_match_are_refused_and_nothing_is_written(name, change, message):
    cache, new = make(), dict(zip("kv", rows(2), strict=True))
    with pytest.raises(ValueError, match=f"^{name} {message}"):
        cache.append(**(new | {name: change(new[name])}))
    assert cache.length == 0 and (cache.k == 0).all() and (cache.v == 0).all()


@pytest.mark.parametrize("T", [1, 3])
def test_k_and_v_must_bring_the_same_number_of_tokens(T):
    """With T=1 a plain assignment would broadcast the one value over both rows."""
    cache = make()
    with pytest.raises(ValueError, match=f"^v has shape .*{T} tokens, but k has 2"):
        cache.append(rows(2)[0], rows(T)[1])
    assert cache.length == 0 and (cache.k == 0).all()


@pytest.mark.parametrize("name", ["batch_size", "capacity", "n_head", "key_dim", "value_dim"])
@pytest.mark.parametrize("size", [-1, 2.0, True])
def test_a_bad_size_is_named(name, size):
    with pytest.raises(ValueError, match=f"^{name} must be an integer"):
        make(**{name: size})


def test_a_dtype_that_is_not_floating_point_is_refused():
    with pytest.raises(ValueError, match="^dtype"):
        make(dtype=torch.int8)

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_to_k3.ops import softmax_attention


def make(B=2, Tq=7, Tk=7, H=3, K=5, V=11, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(B, Tq, H, K, generator=g), torch.randn(B, Tk, H, K, generator=g)
    return q.to(dtype), k.to(dtype), torch.randn(B, Tk, H, V, generator=g).to(dtype)


def band(Tq, Tk, window=None):
    """True where row i, at position Tk - Tq + i, may see key j: written as the two loops it is."""
    mask = torch.zeros(Tq, Tk, dtype=torch.bool)
    for i in range(Tq):
        p = Tk - Tq + i
        for j in range(Tk):
            mask[i, j] = j <= p and (window is None or j >= p - window + 1)
    return mask


def reference(q, k, v, mask=None, scale=None):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


def by_hand(q, k, v, mask):
    """A row at a time over its own keys alone, so that no masked value takes part at all."""
    o = torch.zeros(*q.shape[:3], v.shape[-1], dtype=v.dtype)
    for i in range(q.shape[1]):
        keys = mask[i].nonzero()[:, 0]
        if len(keys):
            s = torch.einsum("bhk,bjhk->bhj", q[:, i], k[:, keys]) / q.shape[-1] ** 0.5
            o[:, i] = torch.einsum("bhj,bjhv->bhv", s.softmax(-1), v[:, keys])
    return o


def with_grads(f, *inputs):
    inputs = [x.clone().requires_grad_() for x in inputs]
    o = f(*inputs)
    weight = torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape)
    return o.detach(), *torch.autograd.grad((o * weight).sum(), inputs)


def assert_all_close(got, want, tol):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


# C14: axes that differ pairwise, so that a swap cannot hide.
sizes = st.lists(st.integers(1, 9), min_size=6, max_size=6, unique=True)


@settings(deadline=None, max_examples=40)
@given(sizes, st.booleans(), st.sampled_from([(torch.float64, 1e-12), (torch.float32, 1e-6)]))
def test_equals_torch_forward_and_backward(sizes, causal, precision):
    (dtype, tol), (B, Tq, Tk, H, K, V) = precision, sizes
    qkv = make(B, Tq, Tk, H, K, V, dtype)
    mask = band(Tq, Tk) if causal else torch.ones(Tq, Tk, dtype=torch.bool)
    got = with_grads(lambda q, k, v: softmax_attention(q, k, v, causal=causal), *qkv)
    want = with_grads(lambda q, k, v: reference(q, k, v, mask), *qkv)
    if causal and Tq > Tk:  # such rows may be NaN in a reference backward: compare by hand
        want = with_grads(lambda q, k, v: by_hand(q, k, v, mask), *qkv)
    # Gradients of k and v are sums over up to B * Tq rows of weight 1.
    assert_all_close(got[:1], want[:1], tol)
    assert_all_close(got[1:], want[1:], 4 * tol)


@settings(deadline=None, max_examples=40)
@given(sizes, st.integers(1, 12))
def test_window_equals_a_band_mask(sizes, window):
    B, Tq, Tk, H, K, V = sizes
    qkv, mask = make(B, Tq, Tk, H, K, V), band(Tq, Tk, window)
    got = with_grads(lambda q, k, v: softmax_attention(q, k, v, window=window), *qkv)
    assert_all_close(got, with_grads(lambda q, k, v: by_hand(q, k, v, mask), *qkv), 1e-12)


def test_prompt_longer_than_the_window_is_finite_and_banded():
    """C24: W=4, T=6 in one call."""
    q, k, v = make(Tq=6, Tk=6)
    o = softmax_attention(q, k, v, window=4)
    torch.testing.assert_close(o, reference(q, k, v, band(6, 6, 4)), rtol=0, atol=1e-12)


def test_the_token_after_a_full_window_drops_the_first_key():
    """C24: T exactly W, then one more."""
    q, k, v = make(Tq=5, Tk=5)
    full = softmax_attention(q[:, :4], k[:, :4], v[:, :4], window=4)
    torch.testing.assert_close(full, softmax_attention(q[:, :4], k[:, :4], v[:, :4]))
    last = softmax_attention(q[:, 4:], k, v, window=4)
    want = softmax_attention(q[:, 4:], k[:, 1:], v[:, 1:])
    torch.testing.assert_close(last, want, rtol=0, atol=1e-12)


def test_rows_are_aligned_to_the_last_key():
    """C21: 2 cached + 2 new tokens; the last key reaches the last row only."""
    q, k, v = make(Tq=2, Tk=4)
    o = softmax_attention(q, k, v)
    k[:, -1] += 1
    v[:, -1] += 1
    moved = softmax_attention(q, k, v)
    assert torch.equal(moved[:, 0], o[:, 0])
    assert (moved[:, 1] != o[:, 1]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 2])
def test_rows_without_a_key_give_zero_and_finite_gradients(dtype, window):
    qkv = make(Tq=6, Tk=2, dtype=dtype)
    with torch.autograd.set_detect_anomaly(True):  # no NaN on the way back either
        o, *grads = with_grads(lambda q, k, v: softmax_attention(q, k, v, window=window), *qkv)
    assert (o[:, :4] == 0).all() and (o[:, 4:] != 0).all()
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :4] == 0).all()


@pytest.mark.parametrize("Tq, Tk", [(2, 3), (3, 2)])
def test_gradcheck(Tq, Tk):
    qkv = [x.requires_grad_() for x in make(2, Tq, Tk, 1, 2, 3)]
    assert torch.autograd.gradcheck(lambda q, k, v: softmax_attention(q, k, v, window=2), qkv)


@pytest.mark.parametrize("dtype, tol", [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_precision_in_and_out_with_float32_inside(dtype, tol):
    q, k, v = make(Tk=50, Tq=50, dtype=dtype)
    o = softmax_attention(q, k, v)
    want = softmax_attention(q.double(), k.double(), v.double())
    assert o.dtype == dtype
    torch.testing.assert_close(o.double(), want, rtol=tol, atol=tol)
    # float32 inside: only the last rounding is left, so the result is the rounded exact one.
    assert (o == want.to(dtype)).double().mean() > 0.99


def test_autocast_does_not_narrow_the_computation():
    q, k, v = make(dtype=torch.float32)
    want = softmax_attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = softmax_attention(q, k, v)
    assert o.dtype == torch.float32 and torch.equal(o, want)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores_stay_finite(size):
    q, k, v = make(dtype=torch.float32)
    q = q * size
    o, *grads = with_grads(softmax_attention, q, k, v)
    assert o.isfinite().all() and all(g.isfinite().all() for g in grads)
    torch.testing.assert_close(o, reference(q, k, v, band(7, 7)), rtol=0, atol=2e-3)


def test_hidden_keys_have_no_weight_even_when_their_scores_are_huge():
    q, k, v = (x.abs() for x in make(dtype=torch.float32))
    o = softmax_attention(q, k, v)
    k[:, -1] *= 1e4
    assert torch.equal(softmax_attention(q, k, v)[:, :-1], o[:, :-1])


def test_default_scale_is_one_over_root_k_and_multiplies_the_scores():
    """C40: K=4, so that a missing scale doubles the score."""
    q = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4)
    k = torch.stack([2 * q[:, 0], 0 * q[:, 0]], dim=1)
    v = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    weight = torch.sigmoid(torch.tensor([1.0, 2.0, 0.0]))  # scores 2 * scale against 0
    got = [softmax_attention(q, k, v, scale=s).item() for s in (None, 1.0, 0.0)]
    assert got == pytest.approx(weight.tolist(), abs=1e-6)
    assert softmax_attention(q, k, v, scale=0.5).item() == pytest.approx(got[0])


def test_inputs_are_unchanged_and_a_second_call_agrees():
    """C19, and with a stride of 0."""
    q, k, v = make(B=1)
    qkv = [q, k, v.expand(1, 7, 3, 11)]
    qkv = [x.expand(4, *x.shape[1:]) for x in qkv]
    before = [x.clone() for x in qkv]
    first = softmax_attention(*qkv, window=3)
    assert torch.equal(first, softmax_attention(*qkv, window=3))
    assert all(torch.equal(x, y) for x, y in zip(qkv, before, strict=True))


@pytest.mark.parametrize("axis", ["B", "Tq", "Tk", "H", "V"])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}])
def test_an_axis_of_size_zero(axis, options):
    qkv = make(**{axis: 0})
    o, *grads = with_grads(lambda q, k, v: softmax_attention(q, k, v, **options), *qkv)
    q, _, v = qkv
    assert o.shape == (*q.shape[:3], v.shape[-1])
    assert (o == 0).all() and all((g == 0).all() for g in grads)


@pytest.mark.parametrize(
    "name, change",
    [
        ("q", dict(q=torch.zeros(2, 7, 3))),
        ("q", dict(q=torch.zeros(2, 7, 3, 0), k=torch.zeros(2, 7, 3, 0))),
        ("k", dict(k=torch.zeros(2, 7, 3, 4))),
        ("k", dict(k=torch.zeros(2, 7, 4, 5))),
        ("k", dict(k=torch.zeros(1, 7, 3, 5))),
        ("k", dict(k=torch.zeros(7, 3, 5))),
        ("v", dict(v=torch.zeros(2, 6, 3, 11))),
        ("v", dict(v=torch.zeros(1, 7, 3, 11))),
        ("v", dict(v=torch.zeros(2, 7, 1, 11))),
    ],
)
def test_a_bad_shape_names_the_argument_and_both_shapes(name, change):
    q, k, v = make(dtype=torch.float32)
    inputs = dict(q=q, k=k, v=v) | change
    with pytest.raises(ValueError, match=rf"^{name} has shape") as error:
        softmax_attention(**inputs)
    assert str(tuple(inputs[name].shape)) in str(error.value)
    if name != "q":
        other = {"k": "q", "v": "k"}[name]
        assert str(tuple(inputs[other].shape)) in str(error.value)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a_dtype_that_is_not_floating_point_is_refused(name, dtype):
    inputs = dict(zip("qkv", make(), strict=True))
    with pytest.raises(ValueError, match=f"^{name} must be a floating point tensor"):
        softmax_attention(**(inputs | {name: inputs[name].to(dtype)}))


@pytest.mark.parametrize("name", ["k", "v"])
def test_mixed_dtypes_and_devices_are_refused(name):
    inputs = dict(zip("qkv", make(), strict=True))
    with pytest.raises(ValueError, match=f"^{name} has dtype torch.float32.*torch.float64"):
        softmax_attention(**(inputs | {name: inputs[name].float()}))
    with pytest.raises(ValueError, match=f"^{name} is on meta.*cpu"):
        softmax_attention(**(inputs | {name: inputs[name].to("meta")}))


def test_what_is_not_a_tensor_is_refused():
    q, k, _ = make()
    with pytest.raises(ValueError, match="^v must be a tensor, got list"):
        softmax_attention(q, k, [[1.0]])


@pytest.mark.parametrize("window", [0, -1, 1.0, True])
def test_a_bad_window_is_refused(window):
    with pytest.raises(ValueError, match="^window"):
        softmax_attention(*make(), window=window)


def test_a_window_needs_a_causal_mask():
    with pytest.raises(ValueError, match="^window=3.*causal"):
        softmax_attention(*make(), window=3, causal=False)


def test_options_are_keyword_only():
    """C39."""
    with pytest.raises(TypeError):
        softmax_attention(*make(), 1.0)

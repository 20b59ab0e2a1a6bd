import math
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2_to_k3.ops import (
    flash_attention,
    flash_hbm_bytes,
    softmax_attention,
    standard_hbm_bytes,
)

F32, F64 = torch.float32, torch.float64


def make(B=2, Tq=7, Tk=7, H=3, K=5, V=11, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = dict(q=(B, Tq, H, K), k=(B, Tk, H, K), v=(B, Tk, H, V))
    return {name: torch.randn(*shape, generator=g) for name, shape in shapes.items()}


def flash(**options):
    return lambda **x: (flash_attention(**x, **options),)


def plain(**options):
    return lambda **x: (softmax_attention(**x, **options),)


def fused(causal):
    """torch's own, with the mask written out: row i stands at position Tk - Tq + i."""

    def f(q, k, v):
        Tq, Tk = q.shape[1], k.shape[1]
        mask = torch.ones(Tq, Tk, dtype=torch.bool)
        mask = mask.tril(Tk - Tq) if causal else mask
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return (F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2),)

    return f


blocks = st.one_of(st.integers(1, 9), st.sampled_from([64, 1000]))


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 13), min_size=6, max_size=6, unique=True),
    block_q=blocks,
    block_k=blocks,
    causal=st.booleans(),
)
def test_equals_softmax_attention_and_torch_forward_and_backward(
    sizes, block_q, block_k, causal, with_grads, compare
):
    """C14, C21: Tq < Tk, Tq > Tk; any two block sizes, larger than T too."""
    x = make(*sizes)
    Tq, Tk = sizes[1:3]
    peers = {"softmax_attention": plain(causal=causal)}
    if not causal or Tq <= Tk:  # rows that see nothing may be NaN in a reference
        peers["torch"] = fused(causal)
    for dtype in (F64, F32):
        got = with_grads(flash(causal=causal, block_q=block_q, block_k=block_k), x, dtype)
        for peer, f in peers.items():
            case = f"{peer}, {sizes}, blocks {block_q}, {block_k}, causal={causal}, {dtype}"
            # Where a row sees one key those of q and k vanish, as sums of terms of about sqrt(V).
            compare(case, got, with_grads(f, x), floor=4.0)


def test_every_pair_of_block_sizes(with_grads, compare):
    x = make(1, 7, 8, 2, 3, 5)
    for causal in (True, False):
        want = with_grads(plain(causal=causal), x)
        for block_q, block_k in product(range(1, 10), range(1, 10)):
            got = with_grads(flash(causal=causal, block_q=block_q, block_k=block_k), x)
            compare(f"blocks {block_q}, {block_k}, causal={causal}", got, want)


def test_a_long_sequence_in_tiles_of_the_default_size(with_grads, compare):
    x = make(1, 257, 300, 2, 37, 53)
    want = with_grads(plain(), x)
    for dtype in (F64, F32):
        compare(f"default blocks, {dtype}", with_grads(flash(), x, dtype), want)


@pytest.mark.parametrize("size", [1e2, 1e4])
@pytest.mark.parametrize("causal", [True, False])
def test_huge_scores_stay_finite_and_exact(size, causal, with_grads, compare):
    """Scores up to 1e4, whose exponentials overflow; each rounds to eps * 1e4, and so does o."""
    x = make(2, 11, 13)
    scores = torch.einsum("bihk,bjhk->bhij", x["q"], x["k"]) / math.sqrt(5)
    x["q"] = x["q"] * size / scores.abs().max()
    want = with_grads(plain(causal=causal), x)
    for dtype, (block_q, block_k) in product((F64, F32), [(1, 1), (2, 3), (64, 64)]):
        got = with_grads(flash(causal=causal, block_q=block_q, block_k=block_k), x, dtype)
        case = f"scores {size}, blocks {block_q}, {block_k}, {dtype}"
        compare(case, got, want, loosen=size, floor=1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
@pytest.mark.parametrize("blocks", [(1, 1), (3, 2), (64, 64)])
def test_rows_without_a_key_give_zero_and_finite_gradients(dtype, blocks):
    x = {n: y.to(dtype).requires_grad_() for n, y in make(Tq=6, Tk=2).items()}
    with torch.autograd.set_detect_anomaly(True):
        o = flash_attention(**x, block_q=blocks[0], block_k=blocks[1])
        dq, *grads = torch.autograd.grad(o.float().square().sum(), x.values())
    assert (o[:, :4] == 0).all() and (o[:, 4:] != 0).all()
    assert (dq[:, :4] == 0).all() and all(g.isfinite().all() for g in (dq, *grads))


@pytest.mark.parametrize("axis", ["B", "Tq", "Tk", "H", "V"])
@pytest.mark.parametrize("causal", [True, False])
def test_an_axis_of_size_zero(axis, causal):
    """Gradients are zero there, not missing."""
    x = {n: y.requires_grad_() for n, y in make(**{axis: 0}).items()}
    o = flash_attention(**x, causal=causal)
    assert o.shape == (*x["q"].shape[:3], x["v"].shape[-1]) and (o == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(o.sum(), x.values()))


@pytest.mark.parametrize("Tq, Tk", [(3, 4), (4, 3)])
def test_gradcheck(Tq, Tk):
    x = [y.double().requires_grad_() for y in make(1, Tq, Tk, 2, 2, 3).values()]
    assert torch.autograd.gradcheck(partial(flash_attention, block_q=2, block_k=2), x)


def test_the_last_key_reaches_the_last_row_only():
    """C21: 2 cached + 2 new tokens."""
    x = make(Tq=2, Tk=4)
    o = flash_attention(**x, block_k=3)
    x["k"][:, -1] += 1
    x["v"][:, -1] += 1
    moved = flash_attention(**x, block_k=3)
    assert torch.equal(moved[:, 0], o[:, 0]) and (moved[:, 1] != o[:, 1]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_dtypes_autocast_layouts_and_the_callers_tensors(dtype):
    x = {n: y.to(dtype) for n, y in make(Tq=50, Tk=50).items()}
    before = {n: y.clone() for n, y in x.items()}
    o = flash_attention(**x, block_q=8, block_k=16)
    want = softmax_attention(**{n: y.double() for n, y in x.items()})
    assert o.dtype == dtype and all(torch.equal(x[n], y) for n, y in before.items())
    torch.testing.assert_close(o, want.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flash_attention(**x, block_q=8, block_k=16), o)
    swapped = {n: y.transpose(1, 2).contiguous().transpose(1, 2) for n, y in x.items()}
    torch.testing.assert_close(flash_attention(**swapped), o)


def test_scale_multiplies_the_scores_and_is_one_over_root_k_by_default():
    """C40: K=4, so that a missing scale doubles the score."""
    q = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4)
    k = torch.stack([2 * q[:, 0], 0 * q[:, 0]], dim=1)
    v = torch.tensor([1.0, 0.0]).view(1, 2, 1, 1)
    got = [flash_attention(q, k, v, scale=s, block_k=1).item() for s in (None, 1.0, 0.0)]
    assert got == pytest.approx([1 / (1 + math.exp(-x)) for x in (1, 2, 0)], abs=1e-6)


class Watched(torch.Tensor):
    """Counts the numbers in every slice taken of the tensors in `memory`."""

    memory, moved = (), 0

    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        result = super().__torch_function__(f, types, args, kwargs or {})
        if f is torch.Tensor.__getitem__ and result.untyped_storage().data_ptr() in cls.memory:
            cls.moved += result.numel()
        return result


@settings(deadline=None, max_examples=30)
@given(
    Tq=st.integers(1, 17),
    Tk=st.integers(1, 17),
    block_q=st.integers(1, 9),
    block_k=st.integers(1, 9),
    causal=st.booleans(),
)
def test_the_byte_count_is_what_the_tiles_load(Tq, Tk, block_q, block_k, causal):
    B, H, K, V = 2, 3, 5, 7
    x = {n: y.as_subclass(Watched) for n, y in make(B, Tq, Tk, H, K, V).items()}
    Watched.memory = {y.untyped_storage().data_ptr() for y in x.values()}
    Watched.moved = 0
    options = dict(causal=causal, block_q=block_q, block_k=block_k)
    written = flash_attention(**x, **options).numel()
    for number_bytes in (2, 4):
        count = flash_hbm_bytes(Tq, Tk, K, V, **options, number_bytes=number_bytes)
        assert B * H * count == (Watched.moved + written) * number_bytes


def walk(Tq, Tk, K, V, causal, block_q, block_k):
    """Numbers moved by a walk over all tiles: a key block counts if any row may see any of its keys."""
    moved = Tq * K + Tq * V
    for i, j in product(range(0, Tq, block_q), range(0, Tk, block_k)):
        rows, columns = range(i, min(i + block_q, Tq)), range(j, min(j + block_k, Tk))
        if not causal or any(c <= Tk - Tq + r for r, c in product(rows, columns)):
            moved += len(columns) * K + len(columns) * V
    return moved


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(*[st.integers(0, 23)] * 2, *[st.integers(1, 9)] * 2),
    st.booleans(),
    st.integers(1, 30),
    st.integers(1, 30),
)
def test_the_byte_count_skips_the_tiles_that_a_mask_hides(sizes, causal, block_q, block_k):
    options = dict(causal=causal, block_q=block_q, block_k=block_k)
    assert flash_hbm_bytes(*sizes, **options) == 2 * walk(*sizes, **options)


def test_byte_counts_by_hand():
    # Q 8, K 12, S 6; S 6, P 6; P 6, V 15, O 10.
    assert standard_hbm_bytes(2, 3, 4, 5, number_bytes=1) == 8 + 12 + 6 + 6 + 6 + 6 + 15 + 10
    assert standard_hbm_bytes(2, 3, 4, 5) == 2 * 69
    # Two query blocks of 2 and 1 rows; the first sees one key block of two, the second both.
    count = flash_hbm_bytes(3, 3, 4, 5, block_q=2, block_k=2, number_bytes=1)
    assert count == 3 * (4 + 5) + 2 * (4 + 5) + 3 * (4 + 5)


def test_bytes_grow_with_the_square_of_t_and_fall_with_block_q():
    """Theta(N^2 d^2 / M), as block_q grows like M / d; a mask halves it. The standard count is N^2."""
    count = partial(flash_hbm_bytes, K=64, V=64, causal=False, block_k=64)
    standard = partial(standard_hbm_bytes, K=64, V=64)
    T = 2**14
    assert count(2 * T, 2 * T, block_q=64) / count(T, T, block_q=64) == pytest.approx(4, rel=0.01)
    assert standard(2 * T, 2 * T) / standard(T, T) == pytest.approx(4, rel=0.01)
    assert count(T, T, block_q=64) / count(T, T, block_q=128) == pytest.approx(2, rel=0.01)
    masked = flash_hbm_bytes(T, T, 64, 64, block_q=64, block_k=64)
    assert masked / count(T, T, block_q=64) == pytest.approx(0.5, rel=0.01)
    # 2 N^2 d / block_q against 4 N^2 numbers.
    assert standard(T, T) / count(T, T, block_q=64) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("name", ["block_q", "block_k"])
@pytest.mark.parametrize("bad", [0, -1, 2.0, True, None])
def test_block_sizes_below_one_are_refused(name, bad):
    for Tq in (0, 7):
        with pytest.raises(ValueError, match=rf"^{name} must be an integer >= 1, got"):
            flash_attention(**make(Tq=Tq), **{name: bad})
    with pytest.raises(ValueError, match=rf"^{name} must be an integer >= 1, got"):
        flash_hbm_bytes(7, 7, 5, 5, **{name: bad})


@pytest.mark.parametrize(
    "name, change",
    [
        ("q", dict(q=torch.zeros(2, 7, 3))),
        ("q", dict(q=torch.zeros(2, 7, 3, 0), k=torch.zeros(2, 7, 3, 0))),
        ("q", dict(q=torch.zeros(2, 7, 3, 5, dtype=torch.int64))),
        ("k", dict(k=torch.zeros(2, 7, 3, 4))),
        ("k", dict(k=torch.zeros(2, 7, 4, 5))),
        ("k", dict(k=torch.zeros(2, 7, 3, 5, dtype=F64))),
        ("k", dict(k=torch.zeros(2, 7, 3, 5, device="meta"))),
        ("v", dict(v=torch.zeros(2, 6, 3, 11))),
        ("v", dict(v=torch.zeros(7, 3, 11))),
        ("v", dict(v=None)),
    ],
)
def test_bad_input_names_the_argument(name, change):
    with pytest.raises(ValueError, match=rf"^{name} "):
        flash_attention(**make() | change)

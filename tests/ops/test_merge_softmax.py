import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_to_k3.ops import merge_softmax

F64 = torch.float64


def readings(*sizes, shape=(3, 5), V=7, size=1.0, seed=0):
    """(o, lse) of softmax over each of several disjoint sets of keys, and over their union."""
    g = torch.Generator().manual_seed(seed)
    scores = [size * torch.randn(*shape, n, generator=g, dtype=F64) for n in sizes]
    values = [torch.randn(*shape, n, V, generator=g, dtype=F64) for n in sizes]
    parts = list(zip(scores, values, strict=True))
    parts.append((torch.cat(scores, -1), torch.cat(values, -2)))
    return [((s.softmax(-1)[..., None, :] @ v).squeeze(-2), s.logsumexp(-1)) for s, v in parts]


def assert_equal(got, want, tol=0.0):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(1, 6), min_size=2, max_size=6),
    st.sampled_from([1.0, 30.0, 1e4]),
    st.integers(0, 9),
)
def test_merging_in_any_grouping_reads_the_union(sizes, size, seed):
    """Associative, commutative to the bit, and the softmax over all keys together."""
    *parts, union = readings(*sizes, size=size, seed=seed)
    left, right = parts[0], parts[-1]
    for part in parts[1:]:
        assert_equal(merge_softmax(*left, *part), merge_softmax(*part, *left))
        left = merge_softmax(*left, *part)
    for part in parts[-2::-1]:
        right = merge_softmax(*part, *right)
    assert_equal(left, union, 1e-12)
    assert_equal(right, left, 1e-12)


def test_an_empty_side_leaves_the_other_exactly_and_two_are_empty():
    part, _ = readings(4)
    empty = torch.zeros(3, 5, 7, dtype=F64), torch.full((3, 5), -torch.inf, dtype=F64)
    assert_equal(merge_softmax(*part, *empty), part)
    assert_equal(merge_softmax(*empty, *part), part)
    assert_equal(merge_softmax(*empty, *empty), empty)


@pytest.mark.parametrize("shift", [-1e30, -1e4, 0.0, 1e4, 1e30])
def test_huge_logarithms_of_sums(shift):
    """e^lse overflows or underflows; equal sides are averaged, a far larger one wins alone."""
    (o_a, lse), (o_b, _), _ = readings(4, 4)
    lse = torch.full_like(lse, shift)
    assert_equal(merge_softmax(o_a, lse, o_b, lse), ((o_a + o_b) / 2, lse + math.log(2)), 1e-15)
    far = lse + max(1e3, abs(shift) / 2)
    assert_equal(merge_softmax(o_a, lse, o_b, far), (o_b, far))


def test_gradients_of_a_merge():
    (o_a, a), (o_b, b), _ = readings(2, 3, shape=(2,), V=2)
    inputs = [x.requires_grad_() for x in (o_a, a, o_b, b)]
    assert torch.autograd.gradcheck(merge_softmax, inputs)
    empty = torch.full((2,), -torch.inf, dtype=F64, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        for sides in ((o_a, a, o_b, empty), (o_a, empty, o_b, empty)):
            o, lse = merge_softmax(*sides)
            loss = o.sum() + lse.masked_fill(lse == -torch.inf, 0.0).sum()
            assert all(g.isfinite().all() for g in torch.autograd.grad(loss, sides))

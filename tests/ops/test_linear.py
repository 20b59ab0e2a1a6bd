import math
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2_to_k3.ops import (
    chunk_linear_attention,
    elu_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)

F32, F64 = torch.float32, torch.float64
CHUNKS = (1, 2, 16, 32, 64)
FORMS = {"recurrent": recurrent_linear_attention, "parallel": parallel_linear_attention}
FORMS |= {f"chunk {C}": partial(chunk_linear_attention, chunk_size=C) for C in CHUNKS}
each_form = pytest.mark.parametrize("form", FORMS)
either_kind = pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "plain"])


def flat(f, **options):
    """With the state's pair as two arguments and two results."""

    def rule(S=None, z=None, **x):
        o, state = f(**x, initial_state=None if S is None else (S, z), **options)
        return o, *state

    return rule


@pytest.fixture
def inputs(random_inputs):
    """Features through the map, so positive, and a state such as earlier tokens leave behind."""

    def make(B, T, H, K, V, state=True, seed=0):
        x = random_inputs(B, T, H, K, V, seed=seed)
        x["q"], x["k"] = elu_feature_map(x["q"]), elu_feature_map(3 * x["k"])
        if state:
            past = random_inputs(B, 4, H, K, V, seed=seed + 50)
            k = elu_feature_map(past["k"])
            x["S"], x["z"] = torch.einsum("bthk,bthv->bhkv", k, past["v"]), k.sum(1)
        return x

    return make


def by_definition(q, k, v, S=None, z=None, normalize=True):
    """A row at a time: weights q_t k_i over i <= t, and the state as one more token."""
    o = []
    for t in range(q.shape[1]):
        weights = torch.einsum("bhk,bihk->bhi", q[:, t], k[:, : t + 1])
        read, total = torch.einsum("bhi,bihv->bhv", weights, v[:, : t + 1]), weights.sum(-1)
        if S is not None:
            read = read + torch.einsum("bhk,bhkv->bhv", q[:, t], S)
            total = total + torch.einsum("bhk,bhk->bh", q[:, t], z)
        o.append(read / total[..., None] if normalize else read * q.shape[-1] ** -0.5)
    S = torch.einsum("bthk,bthv->bhkv", k, v) + (0 if S is None else S)
    return torch.stack(o, 1), S, k.sum(1) + (0 if z is None else z)


def test_the_feature_map_is_elu_plus_one_and_stays_positive():
    """F.elu(x) + 1 is 0 in float32 below -17."""
    x = torch.cat([torch.linspace(-80, 80, 161), torch.tensor([-30.0, 0.0, -0.0, 1e-7])])
    want = torch.where(x > 0, x.double() + 1, x.double().exp())
    torch.testing.assert_close(elu_feature_map(x).double(), want, rtol=3e-7, atol=0)
    assert (elu_feature_map(x) > 0).all()
    assert (torch.nn.functional.elu(torch.tensor(-30.0)) + 1) == 0


def test_the_gradient_of_the_feature_map():
    """1 above 0, e^x below, also where e^x would overflow; the two meet at 0."""
    x = torch.tensor([-30.0, -1.0, -1e-6, 0.0, 1.0, 800.0], dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(elu_feature_map(x).sum(), x)
    want = torch.tensor([-30.0, -1.0, -1e-6, 0, 0, 0], dtype=F64).exp()
    torch.testing.assert_close(grad, want, rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(elu_feature_map, torch.randn(7, dtype=F64, requires_grad=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_the_feature_map_keeps_shape_and_dtype(dtype):
    x = torch.zeros(2, 3, 5, dtype=dtype)
    assert elu_feature_map(x).dtype == dtype and elu_feature_map(x).shape == x.shape


def cancelling(x, normalize):
    """An average of few values hardly depends on q and k: their gradients are differences of terms of
    about sqrt(V) / q that cancel, all of it for one token. Errors are relative to those.
    """
    return (x["v"].shape[-1] ** 0.5 / x["q"].amax(-1)).max().item() if normalize else 0.0


@either_kind
@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_every_form_and_length_is_the_definition(normalize, state, inputs, with_grads, compare):
    for T in (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 75, 257):
        B, H, K, V = [p for p in (2, 3, 5, 7, 11) if p != T][:4]
        x = inputs(B, T, H, K, V, state)
        want = with_grads(partial(by_definition, normalize=normalize), x)
        for (form, f), dtype in product(FORMS.items(), (F64, F32)):
            got = with_grads(flat(f, normalize=normalize), x, dtype)
            # Plain sums of T positive terms, one at a time, round T times.
            loosen = 2.0 if dtype == F32 and T == 257 else 1.0
            case = f"{form}, T={T}, normalize={normalize}, {dtype}"
            compare(case, got, want, loosen, floor=cancelling(x, normalize))


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.permutations((2, 3, 5, 7, 11, 13)),
    chunk_size=st.integers(1, 20),
    normalize=st.booleans(),
    state=st.booleans(),
)
def test_any_shape(sizes, chunk_size, normalize, state, inputs, with_grads, compare):
    x = inputs(*sizes[:5], state)
    want = with_grads(partial(by_definition, normalize=normalize), x)
    forms = FORMS | {f"chunk {chunk_size}": partial(chunk_linear_attention, chunk_size=chunk_size)}
    for form, f in forms.items():
        for dtype in (F64, F32):
            got = with_grads(flat(f, normalize=normalize), x, dtype)
            case = f"{form}, {sizes[:5]}, normalize={normalize}"
            compare(case, got, want, floor=cancelling(x, normalize))


@either_kind
def test_every_split_between_calls_in_every_mix_of_forms(normalize, inputs, with_grads, compare):
    T = 13
    x = inputs(2, T, 3, 5, 7)
    want = with_grads(partial(by_definition, normalize=normalize), x)
    forms = {name: FORMS[name] for name in ("recurrent", "parallel", "chunk 2")}
    for split, a, b in product(range(T + 1), forms, forms):

        def in_two(S, z, split=split, a=a, b=b, **x):
            left, right = ({n: y[:, s] for n, y in x.items()} for s in halves(split))
            first, state = forms[a](**left, initial_state=(S, z), normalize=normalize)
            second, state = forms[b](**right, initial_state=state, normalize=normalize)
            return torch.cat([first, second], 1), *state

        for dtype in (F64, F32):
            got = with_grads(in_two, x, dtype)
            compare(f"{a} {split} + {b} {T - split}", got, want)


def halves(split):
    return slice(None, split), slice(split, None)


@each_form
def test_the_weights_of_a_row_sum_to_one(form, inputs):
    """C44: a constant value comes back, from a state too."""
    x = inputs(2, 37, 3, 5, 7, state=False)
    x = {n: y.double() for n, y in x.items()}
    x["v"] = torch.full_like(x["v"], 3.0)
    for state in (None, (3 * x["k"].sum(1)[..., None].expand(2, 3, 5, 7), x["k"].sum(1))):
        o, _ = FORMS[form](**x, initial_state=state)
        torch.testing.assert_close(o, x["v"], rtol=0, atol=1e-14)
    first, _ = FORMS[form](
        x["q"], x["k"], torch.arange(37.0).double().view(1, 37, 1, 1).expand(2, 37, 3, 7)
    )
    assert (first[:, 0] == 0).all() and (first[:, 1:] > 0).all()  # the first row sees itself alone
    assert (first <= torch.arange(37.0).view(1, 37, 1, 1)).all()


@each_form
@pytest.mark.parametrize("name", ["q", "k"])
def test_negative_features_are_refused_only_where_they_are_weighed(form, name, inputs):
    """C44: k = (1, 0), (-1, 0), q = (1, 0) would divide by 0."""
    x = inputs(1, 2, 1, 2, 3, state=False)
    x[name] = torch.tensor([1.0, 0.0, -1.0, 0.0]).view(1, 2, 1, 2)
    with pytest.raises(ValueError, match=rf"^{name} must be a feature >= 0"):
        FORMS[form](**x)
    o, _ = FORMS[form](**x, normalize=False)
    want, *_ = by_definition(**x, normalize=False)
    torch.testing.assert_close(o, want)
    with pytest.raises(ValueError, match=rf"^{name} must be a feature >= 0.* got nan"):
        FORMS[form](**x | {name: torch.full_like(x[name], math.nan)})


@each_form
@pytest.mark.parametrize("zero", ["q", "k", "both"])
def test_weights_that_are_all_zero_give_zero_and_finite_gradients(form, zero, inputs):
    """Features of -200 underflow. The loss is weighed so that 1 / tiny times it would overflow."""
    x = inputs(2, 5, 1, 2, 3, state=False)
    for name in "qk" if zero == "both" else zero:
        x[name] = elu_feature_map(torch.full_like(x[name], -200.0))
        assert (x[name] == 0).all()
    x = {n: y.requires_grad_() for n, y in x.items()}
    with torch.autograd.set_detect_anomaly(True):
        o, _ = FORMS[form](**x)
        grads = torch.autograd.grad((100 * o).sum(), x.values())
    assert (o == 0).all() and all(g.isfinite().all() for g in grads)


@each_form
def test_small_features_whose_products_underflow_still_average(form):
    """phi(-60) squared is 1e-52, 0 in float32; the quotient does not feel it."""
    x = elu_feature_map(torch.full((1, 3, 1, 2), -60.0)).requires_grad_()
    v = torch.tensor([1.0, 3.0, 5.0]).view(1, 3, 1, 1)
    o, _ = FORMS[form](x, x, v)
    torch.testing.assert_close(o.flatten(), torch.tensor([1.0, 2.0, 3.0]))
    (grad,) = torch.autograd.grad(100 * o.sum(), x)
    assert grad.isfinite().all()


@each_form
@pytest.mark.parametrize("scale", [-1.0, 0.0, 1e-30, 1e30])
def test_the_quotient_does_not_feel_the_scale(form, scale, inputs):
    x = inputs(2, 17, 3, 5, 7)
    f = flat(FORMS[form])
    torch.testing.assert_close(f(**x), flat(FORMS[form], scale=scale)(**x), rtol=1e-6, atol=1e-6)


@each_form
def test_without_normaliser_the_scale_multiplies_and_is_one_over_root_k(form, inputs):
    """C40."""
    x = inputs(1, 3, 1, 4, 2, state=False)
    default, _ = FORMS[form](**x, normalize=False)
    for scale in (-1.0, 0.0, 2.0):
        o, _ = FORMS[form](**x, normalize=False, scale=scale)
        torch.testing.assert_close(o, default * 2 * scale, rtol=1e-6, atol=1e-7)


@either_kind
@pytest.mark.parametrize("form", ["recurrent", "parallel", "chunk 2"])
def test_gradcheck(form, normalize, inputs):
    """C46: through the normaliser's sum of keys as well."""
    x = inputs(1, 5, 2, 2, 3)
    names, values = zip(*x.items(), strict=True)
    values = [y.double().requires_grad_() for y in values]
    f = flat(FORMS[form], normalize=normalize)
    assert torch.autograd.gradcheck(lambda *x: f(**dict(zip(names, x, strict=True))), values)


@each_form
def test_two_tokens_by_hand(form):
    """Weights 1 and 3 of values 2 and 6: (2 + 18) / 4 = 5."""
    q = torch.tensor([1.0, 1.0]).view(1, 2, 1, 1)
    k = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1)
    v = torch.tensor([2.0, 6.0]).view(1, 2, 1, 1)
    o, (S, z) = FORMS[form](q, k, v)
    assert o.flatten().tolist() == [2.0, 5.0] and S.item() == 20 and z.item() == 4


@each_form
@either_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
def test_dtypes_and_no_token(form, normalize, dtype, inputs):
    for T in (0, 9):
        x = {n: y.to(dtype) for n, y in inputs(2, T, 3, 5, 7).items()}
        before = {n: y.clone() for n, y in x.items()}
        o, S, z = flat(FORMS[form], normalize=normalize)(**x)
        assert o.dtype == dtype and S.dtype == z.dtype == (F64 if dtype == F64 else F32)
        assert o.shape == x["v"].shape and z.shape == x["z"].shape and S.shape == x["S"].shape
        assert all(torch.equal(y, before[n]) for n, y in x.items())
        if T == 0:
            assert torch.equal(S, x["S"].to(S)) and torch.equal(z, x["z"].to(z))
        else:
            want = by_definition(**{n: y.double() for n, y in x.items()}, normalize=normalize)[0]
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(o.double(), want, rtol=eps, atol=4 * eps * want.max().item())


@each_form
@either_kind
def test_autocast_changes_nothing_and_no_output_depends_on_a_later_token(form, normalize, inputs):
    x, y = inputs(2, 37, 3, 5, 7), inputs(2, 37, 3, 5, 7, state=False, seed=1)
    f = flat(FORMS[form], normalize=normalize)
    want = f(**x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(f(**x), want, strict=True))
    for t in (0, 1, 15, 16, 36):
        moved = {n: torch.cat([x[n][:, :t], 100 * y[n][:, t:]], 1) for n in y}
        assert torch.equal(f(**x | moved)[0][:, :t], want[0][:, :t])


@each_form
def test_a_state_of_stride_0_and_inputs_of_any_layout(form, inputs):
    """C19, C57."""
    x = {n: y.double() for n, y in inputs(2, 13, 3, 5, 7).items()}
    x["S"], x["z"] = x["S"][:1].expand(2, 3, 5, 7), x["z"][:1].expand(2, 3, 5)
    f, before = flat(FORMS[form]), {n: y.clone() for n, y in x.items()}
    want = f(**before)
    torch.testing.assert_close(f(**x), want, rtol=0, atol=1e-13)
    assert all(torch.equal(x[n], y) for n, y in before.items())
    swapped = {n: y.transpose(1, 2).contiguous().transpose(1, 2) for n, y in before.items()}
    torch.testing.assert_close(f(**swapped), want, rtol=0, atol=1e-13)

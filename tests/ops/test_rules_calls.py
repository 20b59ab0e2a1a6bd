"""The rules over several calls, dtypes and layouts: what a caller may rely on beside the numbers."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from rule_cases import (
    F32,
    F64,
    GATES,
    call,
    each_rule,
    gated_rules,
)


def in_pieces(pieces):
    """The rule that hands its state from one (form, length) to the next."""

    def f(initial_state=None, **x):
        o, state, start = [], initial_state, 0
        for form, length in pieces:
            piece = {n: y[:, start : start + length] for n, y in x.items()}
            part, state = form(**piece, initial_state=state)
            o.append(part)
            start += length
        return torch.cat(o, 1), state

    return f


@each_rule
@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
def test_every_split_between_calls_in_every_mix_of_forms(rule, dtype, inputs, with_grads, compare):
    T = 13
    forms = rule.forms(4)
    for state in (False, True):
        x = inputs(rule, T, state=state)
        if rule.gates:
            x["g"] = GATES["zeros between"](x["g"])
        want = with_grads(rule.recurrent, x)
        for split, a, b in product(range(T + 1), forms, forms):
            f = in_pieces([(forms[a], split), (forms[b], T - split)])
            case = f"{rule.name}, {a} {split} + {b} {T - split}"
            compare(case, with_grads(f, x, dtype), want)


@each_rule
def test_every_split_point_over_several_chunks(rule, inputs, compare):
    x = inputs(rule, 75)
    if rule.gates:
        x["g"] = GATES["mixed"](x["g"])
    want = call(rule.recurrent, x)
    chunk = partial(rule.chunk, chunk_size=16)
    for split, dtype in product(range(76), (F64, F32)):
        got = call(in_pieces([(chunk, split), (chunk, 75 - split)]), x, dtype)
        compare(f"{rule.name}, chunk {split} + {75 - split}", got, want)


@each_rule
def test_decode_steps_after_a_prompt(rule, inputs, with_grads, compare):
    x = inputs(rule, 13)
    r, c = rule.recurrent, partial(rule.chunk, chunk_size=4)
    want = with_grads(r, x)
    for pieces in (
        [(r, 1)] * 13,
        [(c, 1)] * 13,
        [(c, 9)] + [(r, 1)] * 4,
        [(c, 6), (r, 1), (c, 0), (r, 0), (c, 1), (r, 3), (c, 2)],
    ):
        for dtype in (F64, F32):
            got = with_grads(in_pieces(pieces), x, dtype)
            compare(f"{rule.name}, {[n for _, n in pieces]}", got, want)


@each_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_no_token_returns_the_state(rule, dtype, state, inputs):
    x = {n: y.to(dtype) for n, y in inputs(rule, 0, state=state).items()}
    B, _, H, K = x["q"].shape
    for f in rule.forms(1, 64).values():
        o, S = f(**x)
        assert o.shape == x["v"].shape and o.dtype == dtype
        assert S.dtype == (F64 if dtype == F64 else F32)
        assert torch.equal(S, x["initial_state"].to(S) if state else S.new_zeros(B, H, K, 7))


@each_rule
@pytest.mark.parametrize("axis", range(4), ids=["B", "H", "V", "B, H and V"])
def test_other_axes_of_size_zero(rule, axis, inputs, with_grads):
    B, H, V = (0 if axis in (i, 3) else n for i, n in enumerate((2, 3, 7)))
    for f in rule.forms(4).values():
        got = with_grads(f, inputs(rule, 6, (B, H, 5, V)))
        assert got["o"].shape == (B, 6, H, V) and got["state"].shape == (B, H, 5, V)
        assert all((y == 0).all() for y in got.values())


def layouts(x):
    """The same numbers stored otherwise: axes swapped, every second entry, a reversed order of axes."""
    yield {n: y.transpose(1, 2).contiguous().transpose(1, 2) for n, y in x.items()}
    yield {n: torch.stack([y, y + 1], -1)[..., 0] for n, y in x.items()}
    back = {n: list(reversed(range(y.ndim))) for n, y in x.items()}
    yield {n: y.permute(back[n]).contiguous().permute(back[n]) for n, y in x.items()}


@each_rule
def test_inputs_and_incoming_gradients_of_any_layout(rule, inputs, compare):
    """C57."""
    x = {n: y.double() for n, y in inputs(rule, 13).items()}

    def run(f, x, weights):
        x = {n: y.detach().requires_grad_() for n, y in x.items()}
        results = f(**x)
        grads = torch.autograd.grad(results, x.values(), weights)
        names = ("o", "state", *(f"d{n}" for n in x))
        return {n: y.detach() for n, y in zip(names, (*results, *grads), strict=True)}

    for form, f in rule.forms(4, 64).items():
        weights = dict(o=x["v"].cos(), state=x["initial_state"].cos())
        want = run(f, x, list(weights.values()))
        for other, w in zip(layouts(x), layouts(weights), strict=True):
            assert not any(y.is_contiguous() for y in (*other.values(), *w.values()))
            got = run(f, other, list(w.values()))
            assert got["o"].is_contiguous()
            compare(f"{rule.name}, {form}", got, want)
        # Sums hand back an expanded gradient, of stride 0.
        ones = [torch.ones((), dtype=F64).expand_as(y) for y in weights.values()]
        got, want = run(f, x, ones), run(f, x, [y.contiguous() for y in ones])
        compare(f"{rule.name}, {form}, expanded gradient", got, want)


@each_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, F32, F64])
def test_the_callers_tensors_are_unchanged_and_a_second_call_agrees(rule, dtype, inputs):
    """C19, with an initial state of stride 0 as well."""
    x = {n: y.to(dtype) for n, y in inputs(rule, 13).items()}
    B, H, K, V = x["initial_state"].shape
    for shared in (False, True):
        if shared:
            x["initial_state"] = x["initial_state"][:1, :1].expand(B, H, K, V)
        before = {n: y.clone() for n, y in x.items()}
        for f in rule.forms(1, 4, 64).values():
            first, second = f(**x), f(**x)
            assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            assert all(torch.equal(y, before[n]) for n, y in x.items())
            want = f(**before)  # the state laid out in full
            torch.testing.assert_close(first, want, rtol=1e-5, atol=1e-6)


@each_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
@pytest.mark.parametrize("gate_dtype", ["as q", "float32"])
def test_dtypes_of_results_and_the_precision_inside(rule, dtype, gate_dtype, inputs, compare):
    """o in v's dtype, the state in float32 (float64 for float64); only o's last rounding is left."""
    x = {n: y.to(dtype) for n, y in inputs(rule, 37).items()}
    if gate_dtype == "float32":
        x |= {n: x[n].to(F32) for n in ("g", "beta", "initial_state") if n in x}
    want = call(rule.recurrent, x)
    for form, f in rule.forms(16).items():
        o, state = f(**x)
        assert o.dtype == dtype and o.is_contiguous()
        assert state.dtype == (F64 if dtype == F64 else F32)
        case = f"{rule.name}, {form}, {dtype}"
        compare(case, {"state": state}, {"state": want["state"]})
        if dtype in (F32, F64):
            compare(case, {"o": o}, {"o": want["o"]})
        else:
            rounded = want["o"].to(dtype)
            assert (o == rounded).double().mean() > 0.99, case
            torch.testing.assert_close(o, rounded, rtol=torch.finfo(dtype).eps, atol=1e-5)


@each_rule
def test_4096_tokens_in_bfloat16_with_the_state_in_float32(rule, random_inputs, compare):
    """C28: K=V=32, unit keys, g about -5e-4; a state in bfloat16 would be off by 1e-2."""
    x = random_inputs(1, 4096, 2, 32, 31, rule.gates, rule.beta)
    x = {n: y if n == "g" else y.bfloat16() for n, y in x.items()}
    if rule.gates:
        x["g"] = x["g"] / 600
    want = call(rule.recurrent, x)
    for form, f in rule.forms(64).items():
        o, state = f(**x)
        assert o.dtype == torch.bfloat16 and state.dtype == F32
        # A delta rule erases its rounding; decay alone keeps that of 2000 steps of e^g.
        loosen = 1.0 if rule.beta else 10.0
        compare(f"{rule.name}, {form}", {"state": state}, {"state": want["state"]}, loosen)
        assert (o == want["o"].bfloat16()).double().mean() > 0.99
        torch.testing.assert_close(o.double(), want["o"], rtol=2**-8, atol=1e-4)


@gated_rules
def test_a_decay_of_0_999_forgets_although_it_is_1_in_bfloat16(rule):
    """C9: one write, then 999 steps; 0.999^999 is 0.37."""
    T = 1000
    k = torch.zeros(1, T, 1, 2, dtype=torch.bfloat16)
    k[:, 0, :, 0] = 1
    v = torch.ones(1, T, 1, 1, dtype=torch.bfloat16)
    g = torch.full((1, T, 1, 2), math.log(0.999))
    x = dict(q=k[:, :1].expand(1, T, 1, 2), k=k, v=v, g=g if rule.gates == "channel" else g[..., 0])
    if rule.beta:
        x["beta"] = torch.ones(1, T, 1)
    assert torch.tensor(0.999).bfloat16() == 1
    for f in rule.forms(64).values():
        o, state = f(**x, scale=1.0)
        assert state[0, 0, 0].item() == pytest.approx(0.999**999, rel=1e-4)
        assert o[0, -1].item() == pytest.approx(0.368, abs=2e-3)


@each_rule
def test_autocast_changes_nothing(rule, inputs):
    for dtype in (F32, torch.bfloat16):
        x = {n: y.to(dtype) for n, y in inputs(rule, 37).items()}
        for f in rule.forms(16).values():
            want = f(**x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = f(**x)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
            assert [y.dtype for y in got] == [y.dtype for y in want]

"""The delta rule, decay, the gated delta rule and KDA: every form against the float64 recurrence."""

import math
from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2_to_k3.ops import (
    chunk_decay,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    recurrent_decay,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
    recurrent_kda,
)


class Rule(NamedTuple):
    name: str
    recurrent: callable
    chunk: callable
    gates: str | None
    beta: bool

    def forms(self, *chunk_sizes):
        chunks = {f"chunk {C}": partial(self.chunk, chunk_size=C) for C in chunk_sizes}
        return {"recurrent": self.recurrent} | chunks


RULES = [
    Rule("delta_rule", recurrent_delta_rule, chunk_delta_rule, None, True),
    Rule("decay", recurrent_decay, chunk_decay, "head", False),
    Rule("gated_delta_rule", recurrent_gated_delta_rule, chunk_gated_delta_rule, "head", True),
    Rule("kda", recurrent_kda, chunk_kda, "channel", True),
]
by_name = lambda rule: rule.name  # noqa: E731
each_rule = pytest.mark.parametrize("rule", RULES, ids=by_name)
gated_rules = pytest.mark.parametrize("rule", [r for r in RULES if r.gates], ids=by_name)
delta_rules = pytest.mark.parametrize("rule", [r for r in RULES if r.beta], ids=by_name)
CHUNKS = (1, 2, 16, 32, 64)
F32, F64 = torch.float32, torch.float64
PRIMES = (2, 3, 5, 7, 11, 13)


@pytest.fixture
def inputs(random_inputs):
    """inputs(rule, T, sizes, state): sizes B, H, K, V are primes that differ pairwise and from T (C14)."""

    def make(rule, T, sizes=None, state=True, seed=0):
        B, H, K, V = sizes or [p for p in PRIMES if p != T][:4]
        return random_inputs(B, T, H, K, V, rule.gates, rule.beta, state, seed)

    return make


def call(f, x, dtype=F64):
    return dict(zip(("o", "state"), f(**{n: y.to(dtype) for n, y in x.items()}), strict=True))


def every(n, value, g):
    """`value` at every n-th token, almost no decay elsewhere."""
    last = torch.arange(g.shape[1]).view(-1, *[1] * (g.ndim - 2)) % n == n - 1
    return torch.where(last, value, torch.full_like(g, -0.01))


def pick(values, g):
    values = torch.tensor(values)
    return values[torch.randint(len(values), g.shape, generator=torch.Generator().manual_seed(3))]


LEVELS = (0.0, -1e-3, -1.0, -2.0, -5.0, -20.0, -1e4, -math.inf)
GATES = {f"g={x}": partial(lambda x, g: torch.full_like(g, x), x) for x in LEVELS} | {
    "mixed": partial(pick, LEVELS),
    "zeros between": lambda g: g * pick([0.0, 1.0], g),
    "reset -inf": partial(every, 16, -math.inf),
    "reset -1e4": partial(every, 16, -1e4),
    "reset -80": partial(every, 16, -80.0),
    "bursts": lambda g: torch.where(every(64, -1.0, g).cumsum(1) % 1 < 0.33, -20.0, -0.01),
}


def by_definition(q, k, v, g=None, beta=None, initial_state=None):
    """S <- (I - beta k k^T) Diag(e^g) S + beta k v^T, o = S^T q / sqrt(K), the transition as a matrix."""
    B, T, H, K = q.shape
    o, states = [], []
    for b, h in product(range(B), range(H)):
        S = q.new_zeros(K, v.shape[-1]) if initial_state is None else initial_state[b, h]
        for t in range(T):
            a = q.new_zeros(K) if g is None else g[b, t, h].expand(K)
            erase = 0.0 if beta is None else beta[b, t, h]
            write = 1.0 if beta is None else beta[b, t, h]
            kt = k[b, t, h]
            S = (torch.eye(K) - erase * torch.outer(kt, kt)) @ torch.diag(a.exp()) @ S
            S = S + write * torch.outer(kt, v[b, t, h])
            o.append(S.T @ q[b, t, h] / K**0.5)
        states.append(S)
    return torch.stack(o).view(B, H, T, -1).transpose(1, 2), torch.stack(states).view(B, H, K, -1)


@each_rule
@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_both_forms_are_the_published_formula(rule, state, inputs, with_grads, compare):
    x = inputs(rule, 11, state=state)
    want = with_grads(lambda **x: by_definition(**{n: y.double() for n, y in x.items()}), x)
    for form, f in rule.forms(1, 4, 64).items():
        compare(f"{rule.name}, {form}", with_grads(f, x), want)


@each_rule
@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_every_length_and_chunk_size(rule, state, inputs, with_grads, compare):
    """C1, C12, C15, C18, C35: T around each chunk size, gates mild and mixed."""
    lengths = {C: {0, 1, 2, C - 1, C, C + 1, 75, 257} for C in CHUNKS}
    for T, gate in product(sorted(set.union(*lengths.values())), ("mild", "mixed")):
        if gate == "mixed" and not rule.gates:
            continue
        x = inputs(rule, T, state=state, seed=T)
        if gate == "mixed":
            x["g"] = GATES[gate](x["g"])
        want = with_grads(rule.recurrent, x)
        forms = rule.forms(*(C for C in CHUNKS if T in lengths[C]))
        for (form, f), dtype in product(forms.items(), (F64, F32)):
            got = with_grads(f, x, dtype)
            compare(f"{rule.name}, {form}, T={T}, {gate} gates, {dtype}", got, want)


@gated_rules
@pytest.mark.parametrize("gate", GATES)
def test_every_gate_forward_and_backward(rule, gate, inputs, with_grads, compare):
    """C1, C3, C5: from no decay to a reset, constant and mixed, nothing but finite numbers."""
    for T, chunks in ((75, CHUNKS), (257, (16, 64))):
        x = inputs(rule, T)
        x["g"] = GATES[gate](x["g"])
        want = with_grads(rule.recurrent, x)
        forms = rule.forms(*chunks)
        if T == 257:  # at -1e-3 the same rounding of e^g adds up over 257 steps: 2e-6
            del forms["recurrent"]
        for (form, f), dtype in product(forms.items(), (F64, F32)):
            got = with_grads(f, x, dtype)
            compare(f"{rule.name}, {form}, T={T}, {gate}, {dtype}", got, want)


KEYS = {
    "unit": lambda k: k,
    "every third zero": lambda k: k * (torch.arange(k.shape[1]) % 3 > 0)[:, None, None],
    "all zero": torch.zeros_like,
    "equal": lambda k: k[:, :1].expand_as(k),
    "opposite": lambda k: k[:, :1] * (1 - 2 * (torch.arange(k.shape[1]) % 2))[:, None, None],
}
BETAS = {f"beta={x}": partial(lambda x, b: torch.full_like(b, x), x) for x in (0.0, 1.0, 2.0)} | {
    "beta mixed": partial(pick, [0.0, 1.0, 2.0])
}


def condition(k, beta):
    """Of the triangular system that all tokens of the sequence form, the largest of any head."""
    k, beta = k.double().transpose(1, 2), beta.double().transpose(1, 2)
    L = (beta[..., None] * (k @ k.mT)).tril(-1)
    return torch.linalg.cond(L + torch.eye(L.shape[-1], dtype=F64)).max().item()


@delta_rules
@pytest.mark.parametrize("beta", BETAS)
def test_every_write_strength_and_kind_of_key(rule, beta, inputs, with_grads, compare):
    """Float64 always to 1e-12. Float32 to one rounding (6e-8) times the condition number where that
    is more than 1e-6: where keys (nearly) repeat; 9e3 for equal keys at beta=2.
    """
    for keys, decays in product(KEYS, (False, True) if rule.gates else (False,)):
        x = inputs(rule, 75)
        x["k"], x["beta"] = KEYS[keys](x["k"]).clone(), BETAS[beta](x["beta"])
        if rule.gates and not decays:
            x["g"] = torch.zeros_like(x["g"])
        want = with_grads(rule.recurrent, x)
        loosen = max(1.0, 0.06 * condition(x["k"], x["beta"]))
        for form, f in rule.forms(*CHUNKS).items():
            case = f"{rule.name}, {form}, {keys} keys, {beta}, decay {decays}"
            compare(f"{case}, float64", with_grads(f, x), want)
            compare(f"{case}, float32", with_grads(f, x, F32), want, loosen)


@each_rule
@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.permutations((2, 3, 5, 7, 11, 13, 17, 19, 23)),
    T=st.sampled_from((1, 29, 31, 37, 61, 67)),
    chunk_size=st.integers(1, 80),
    gate=st.sampled_from(["mild", *GATES]),
    state=st.booleans(),
)
def test_any_shape(rule, sizes, T, chunk_size, gate, state, inputs, with_grads, compare):
    """C14, C15: B, T, H, K, V pairwise different, so that swapped axes cannot hide."""
    B, H = sorted(sizes[:2])
    x = inputs(rule, T, (min(B, 5), min(H, 7), *sizes[2:4]), state)
    if rule.gates and gate != "mild":
        x["g"] = GATES[gate](x["g"])
    want = with_grads(rule.recurrent, x)
    for form, f in rule.forms(chunk_size).items():
        case = f"{rule.name}, {form}, {gate}, { {n: tuple(y.shape) for n, y in x.items()} }"
        compare(case, with_grads(f, x), want)
        # Short chunks multiply the state by a K x K matrix T / chunk_size times, rounding each time.
        compare(case, with_grads(f, x, F32), want, loosen=3.0)


@each_rule
def test_wide_channels(rule, inputs, with_grads, compare):
    x = inputs(rule, 75, (2, 1, 37, 53))
    want = with_grads(rule.recurrent, x)
    for form, f in rule.forms(*CHUNKS).items():
        compare(f"{rule.name}, {form}, K=37, V=53", with_grads(f, x), want)
        loosen = 3.0 if form in ("chunk 1", "chunk 2") else 1.0  # as in test_any_shape
        compare(f"{rule.name}, {form}, K=37, V=53", with_grads(f, x, F32), want, loosen)


@each_rule
def test_chunk_size_does_not_change_the_result(rule, inputs, with_grads, compare):
    """C12: T=96, and every size up to beyond T."""
    for T, sizes in ((96, (*CHUNKS, 3, 48, 95, 96, 97, 1000)), (13, range(1, 18))):
        x = inputs(rule, T)
        want = with_grads(rule.recurrent, x)
        for C in sizes:
            got = with_grads(rule.chunk, x, chunk_size=C)
            compare(f"{rule.name}, T={T}, chunk {C}", got, want)


def test_a_chunk_far_longer_than_the_sequence_costs_no_memory(inputs):
    for rule in RULES:
        x = inputs(rule, 3)
        a, b = call(partial(rule.chunk, chunk_size=2**40), x), call(rule.recurrent, x)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@each_rule
@pytest.mark.parametrize("chunk_size", [1, 3, 4])
def test_gradcheck(rule, chunk_size, inputs):
    """With an initial state, a zero key, and gates of -0.5 and -20."""
    x = inputs(rule, 5, (1, 2, 2, 3))
    x["k"][:, 2] = 0
    if rule.gates:
        x["g"] = pick([-0.5, -20.0], x["g"])
    names, values = zip(*x.items(), strict=True)
    values = [y.double().requires_grad_() for y in values]
    for f in (rule.recurrent, partial(rule.chunk, chunk_size=chunk_size)):
        assert torch.autograd.gradcheck(
            lambda *x, f=f: f(**dict(zip(names, x, strict=True))), values
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


@each_rule
def test_the_state_is_keys_by_values_and_the_read_comes_after_the_write(rule):
    """C15, C18, C40: one token, K=4, V=3; o = q S / sqrt(4) already holds the token's own value."""
    x = dict(q=[1.0, 2, 3, 4], k=[0.0, 1, 0, 0], v=[5.0, 6, 7])
    x = {n: torch.tensor(y).view(1, 1, 1, -1) for n, y in x.items()}
    if rule.gates:
        x["g"] = torch.zeros(1, 1, 1, 4) if rule.gates == "channel" else torch.zeros(1, 1, 1)
    if rule.beta:
        x["beta"] = torch.ones(1, 1, 1)
    S = torch.zeros(4, 3)
    S[1] = x["v"]
    for f in rule.forms(1, 64).values():
        o, state = f(**x)
        assert torch.equal(state[0, 0], S)
        assert torch.equal(o.flatten(), torch.tensor([5.0, 6, 7]))  # q_1 = 2, times 1/2
        for scale in (0.0, 1.0, -3.0):
            o, state = f(**x, scale=scale)
            assert torch.equal(o, scale * 2 * x["v"]) and torch.equal(state[0, 0], S)


@gated_rules
def test_a_token_reads_the_decayed_state_but_writes_its_own_value_undecayed(rule):
    """S0 = 1, decay 1/2, k = q = 1: decay alone 1/2 + v; the delta rule erases 1/2, not 1."""
    one = torch.ones(1, 1, 1, 1, dtype=F64)
    g = one * math.log(0.5) if rule.gates == "channel" else one[..., 0] * math.log(0.5)
    x = dict(q=one, k=one, v=3 * one, g=g, initial_state=one)
    if rule.beta:
        x["beta"] = 0.5 * one[..., 0]
    want = 0.5 + 0.5 * (3 - 0.5) if rule.beta else 0.5 + 3
    for f in rule.forms(1, 4).values():
        o, state = f(**x)
        assert o.item() == state.item() == pytest.approx(want, abs=1e-15)


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


@each_rule
def test_no_output_depends_on_a_later_token(rule, inputs):
    """Every later token changed at once, and by a lot; each earlier output is the same to the bit."""
    T = 37
    x, y = inputs(rule, T), inputs(rule, T, seed=1)
    y["v"] = 1e4 * y["v"]
    del y["initial_state"]
    for f in rule.forms(4, 16, 64).values():
        o, _ = f(**x)
        for t in range(T):
            moved = {n: torch.cat([x[n][:, :t], y[n][:, t:]], 1) for n in y}
            other, _ = f(**x | moved)
            assert torch.equal(other[:, :t], o[:, :t])
            assert not torch.equal(other[:, t], o[:, t])


@gated_rules
def test_minus_infinity_clears_the_state_exactly(rule, inputs):
    """After it, nothing of what came before is left, in the results or in the gradients."""
    T = 37
    x, y = inputs(rule, T), inputs(rule, T, seed=1)
    for f, t in product(rule.forms(4, 16, 64).values(), (0, 1, 7, 15, 16, 36)):
        x["g"], y["g"] = inputs(rule, T)["g"], inputs(rule, T, seed=1)["g"]
        x["g"][:, t] = -math.inf
        before = {n: torch.cat([y[n][:, :t], x[n][:, t:]], 1) for n in x if n != "initial_state"}
        o, state = f(**x)
        other, other_state = f(**before, initial_state=y["initial_state"])
        assert torch.equal(other[:, t:], o[:, t:]) and torch.equal(other_state, state)

        leaves = {n: z.clone().requires_grad_() for n, z in x.items()}
        o, state = f(**leaves)
        (o[:, t:].sum() + state.sum()).backward()
        assert (leaves.pop("initial_state").grad == 0).all()
        assert all((z.grad[:, :t] == 0).all() and z.grad.isfinite().all() for z in leaves.values())


def test_minus_infinity_clears_one_channel_of_kda_alone(inputs):
    x = inputs(RULES[3], 1)
    x["g"], x["beta"] = torch.zeros_like(x["g"]), torch.zeros_like(x["beta"])
    x["g"][..., 2] = -math.inf
    for f in RULES[3].forms(1, 4).values():
        _, state = f(**x)
        assert (state[:, :, 2] == 0).all()
        rest = [0, 1, 3, 4]
        assert torch.equal(state[:, :, rest], x["initial_state"][:, :, rest])


@delta_rules
def test_writing_a_unit_key_twice_leaves_exactly_the_last_value(rule):
    """C37: beta = 1. Whole numbers, so that no rounding can excuse a difference."""
    k = torch.eye(5)[2].expand(1, 2, 1, 5)
    v = torch.tensor([[3.0, -8.0, 5.0], [7.0, 2.0, -4.0]]).view(1, 2, 1, 3)
    x = dict(q=k, k=k, v=v, beta=torch.ones(1, 2, 1), initial_state=torch.full((1, 1, 5, 3), 9.0))
    if rule.gates:
        x["g"] = torch.zeros(1, 2, 1, 5) if rule.gates == "channel" else torch.zeros(1, 2, 1)
    for f in rule.forms(1, 2, 64).values():
        o, state = f(**x, scale=1.0)
        assert torch.equal(o, v) and torch.equal(state[0, 0, 2], v[0, 1, 0])
        assert (state[0, 0, [0, 1, 3, 4]] == 9).all()


@delta_rules
def test_beta_two_on_unit_keys_stays_bounded(rule, random_inputs):
    """C37: a reflection keeps lengths; beta |k|^2 = 2 is the edge."""
    x = random_inputs(1, 257, 1, 7, 5, rule.gates, True, True)
    x["v"], x["beta"] = 0 * x["v"], 2 * torch.ones_like(x["beta"])
    if rule.gates:
        x["g"] = 0 * x["g"]
    for f in rule.forms(16, 64).values():
        _, state = f(**{n: y.double() for n, y in x.items()})
        assert state.norm().item() == pytest.approx(x["initial_state"].norm().item(), rel=1e-6)


@each_rule
@pytest.mark.parametrize("sign", [1, -1])
def test_huge_and_tiny_values_stay_finite(rule, sign, inputs, compare):
    """The rules are linear in v and the state together: a power of two scales every result exactly."""
    x = inputs(rule, 75)
    if rule.gates:
        x["g"] = GATES["mixed"](x["g"])
    size = 2.0 ** (sign * 60)
    y = x | {"v": x["v"] * size, "initial_state": x["initial_state"] * size}
    for form, f in rule.forms(16, 64).items():
        want = {n: z * size for n, z in call(f, x, F32).items()}
        compare(f"{rule.name}, {form}", call(f, y, F32), want)

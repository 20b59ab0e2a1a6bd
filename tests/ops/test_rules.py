"""The delta rule, decay, the gated delta rule and KDA: every form against the float64 recurrence."""

from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_cases import (
    CHUNKS,
    F32,
    F64,
    GATES,
    RULES,
    call,
    delta_rules,
    each_rule,
    gated_rules,
    pick,
)


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

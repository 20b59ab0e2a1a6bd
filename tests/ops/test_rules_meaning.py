"""What each rule does to a memory: order of decay, read and write, resets, overwriting, causality."""

import math
from itertools import product

import pytest
import torch
from rule_cases import (
    F32,
    F64,
    GATES,
    RULES,
    call,
    delta_rules,
    each_rule,
    gated_rules,
)


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

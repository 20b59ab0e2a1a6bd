"""expert_load, and the two rules that move the router's bias to make it even."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import normal

from gpt2_to_k3.layers import expert_load, quantile_balancing, sign_balancing

F64 = torch.float64
RULES = [expert_load, quantile_balancing, sign_balancing]
# Scores, in hundredths, of a case like the report's: 8 tokens, 4 experts, one chosen.
TOY = """40 45 25 30  80 25 55 60  60 85 15 20  30 55 15 10
         80 25 65 50  50 35 65 30  60 45 15 10  80 55 35 40"""


def test_the_toy():
    """One Quantile step, 4 3 1 0 -> 2 2 2 2, for the step's own tokens."""
    scores = torch.tensor([int(s) for s in TOY.split()], dtype=F64).view(8, 4) / 100
    bias = torch.zeros(4, dtype=F64)
    assert expert_load(scores, 1, bias).tolist() == [4, 3, 1, 0]
    new = quantile_balancing(scores, 1, bias)
    torch.testing.assert_close(new, torch.tensor([-0.15, -0.05, 0.05, 0.15], dtype=F64))
    assert expert_load(scores, 1, new).tolist() == [2, 2, 2, 2]
    sign = sign_balancing(scores, 1, bias)
    torch.testing.assert_close(sign, torch.tensor([-1e-3, -1e-3, 1e-3, 1e-3], dtype=F64))
    assert expert_load(scores, 1, sign).tolist() == [4, 3, 1, 0]


def test_a_balanced_expert_stays_where_the_sign_rule_found_it():
    scores = torch.tensor([[3.0, 2, 1], [1, 3, 2], [3, 1, 2]], dtype=F64)
    bias = torch.tensor([0.1, 0.2, 0.3], dtype=F64)
    new = sign_balancing(scores, 1, bias, step=0.5)
    torch.testing.assert_close(new, torch.tensor([-0.4, 0.2, 0.8], dtype=F64))


sizes = dict(E=st.integers(2, 9), k=st.integers(1, 8), tokens=st.integers(1, 30))


@settings(max_examples=60, deadline=None)
@given(**sizes, seed=st.integers(0, 99))
def test_quantile_balancing_is_its_definition(E, k, tokens, seed):
    """With the cutoffs held, q tokens at most are above them, and q + 1 at least are not below.

    Equal margins are common: where expert j is a token's own cutoff, its margin is -b_j.
    """
    k = min(k, E - 1)
    s, b = normal(tokens, E, seed=seed).sigmoid(), normal(E, seed=seed + 1)
    new = quantile_balancing(s, k, b)
    cutoff = (s + b).sort(1, descending=True).values[:, k : k + 1]
    ranked = (s - cutoff).sort(0, descending=True).values
    q = int(tokens * k / E + 1e-9)
    want = -ranked[q]
    assert ((s - cutoff > -want).sum(0) <= q).all() and ((s - cutoff >= -want).sum(0) > q).all()
    torch.testing.assert_close(new, want - want.mean(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(quantile_balancing(s, k, b + 5), new, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(quantile_balancing(s.flip(0), k, b), new, rtol=1e-12, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(**sizes)
def test_loads_and_the_sign_rule(E, k, tokens):
    k = min(k, E - 1)
    s, b = normal(tokens, E).sigmoid(), normal(E, seed=1)
    load = expert_load(s, k, b)
    chosen = [(row + b).argsort(descending=True)[:k] for row in s]
    want = torch.stack([sum((c == j).sum() for c in chosen) for j in range(E)])
    assert torch.equal(load, want) and load.sum() == tokens * k
    step = sign_balancing(s, k, b, step=0.25) - b
    for j in range(E):
        assert step[j].item() == pytest.approx(0.25 * np.sign(tokens * k - E * load[j].item()))


def test_one_quantile_step_does_what_hundreds_of_signs_do():
    """64 skewed experts, 4 of them for each of 4096 tokens: the largest load over the mean."""
    s = (normal(4096, 64) + normal(64, seed=1)).sigmoid()
    mean, bias = 4096 * 4 / 64, torch.zeros(64, dtype=F64)

    def worst(bias):
        return expert_load(s, 4, bias).max().item() / mean

    quantile = [bias]
    for _ in range(4):
        quantile.append(quantile_balancing(s, 4, quantile[-1]))
    assert worst(bias) > 4 and worst(quantile[1]) < 1.5 and worst(quantile[4]) < 1.15
    for _ in range(100):
        bias = sign_balancing(s, 4, bias)
    assert worst(bias) > 1.5


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_leave_their_inputs_and_take_any_axes_of_tokens(rule):
    s, b = normal(2, 6, 5).sigmoid().requires_grad_(), normal(5, seed=1)
    kept = s.detach().clone(), b.clone()
    new = rule(s, 2, b)
    assert torch.equal(s, kept[0]) and torch.equal(b, kept[1]) and not new.requires_grad
    torch.testing.assert_close(rule(s.flatten(0, 1), 2, b), new)
    narrow = rule(s.to(torch.bfloat16), 2, b.float())
    torch.testing.assert_close(narrow, rule(s.to(torch.bfloat16).float(), 2, b.float()))
    assert rule is expert_load or narrow.dtype == torch.float32
    assert rule(s[0, 0], 2, b).shape == (5,)  # one token


@pytest.mark.parametrize("rule", RULES)
def test_bad_arguments_of_the_rules_are_named(rule):
    s, b = normal(6, 5).sigmoid(), torch.zeros(5)
    for k in (0, -1, 5, 2.0, True):
        with pytest.raises(ValueError, match=f"^k must be an integer from 1 to 4, .*, got {k!r}"):
            rule(s, k, b)
    with pytest.raises(ValueError, match="^k must be an integer"):
        rule(torch.tensor(1.0), 1, b)
    with pytest.raises(ValueError, match=r"^bias has shape \(4,\), expected \[5\]"):
        rule(s, 2, b[:4])
    for bad in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^scores must be finite, got {bad}"):
            rule(s.masked_fill(s == s[3, 1], bad), 2, b)
        with pytest.raises(ValueError, match=f"^bias must be finite, got {bad}"):
            rule(s, 2, b + bad)
        if rule is sign_balancing:
            with pytest.raises(ValueError, match=f"^step must be a finite number, got {bad}"):
                rule(s, 2, b, step=bad)
    with pytest.raises(
        ValueError, match="^scores must be a floating point tensor, got torch.int64"
    ):
        rule(s.long(), 2, b)
    none = partial(rule, s[:0], 2, b)
    if rule is quantile_balancing:
        with pytest.raises(ValueError, match=r"^scores has shape \(0, 5\), expected at least one"):
            none()
    else:
        assert torch.equal(none(), torch.zeros(5))

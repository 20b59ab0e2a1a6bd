"""Targets against slow oracles that read a row token by token: a dict, a list as a stack."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_to_k3.lab import tasks

SIZE = st.integers(1, 9)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def check(batch, answers, T, vocabulary):
    """Compare each row with the list that `answers(row)` gives: None where nothing is asked."""
    tokens, targets, mask = batch
    assert tokens.dtype == targets.dtype == torch.int64 and mask.dtype == torch.bool
    assert tokens.shape == targets.shape == mask.shape and tokens.shape[1] == T
    assert 0 <= tokens.min() and tokens.max() < vocabulary
    for row, target, scored in zip(tokens.tolist(), targets.tolist(), mask.tolist(), strict=True):
        want = answers(row)
        assert scored == [answer is not None for answer in want]
        assert target == [tasks.NO_TARGET if answer is None else answer for answer in want]


def recall(row, told, clear=None, default=None):
    """Read `told` pairs into a dict, then answer key by key."""
    memory = {}
    for key, value in zip(row[:told:2], row[1:told:2], strict=True):
        if clear and key in clear:
            memory = {k: v for k, v in memory.items() if k not in clear[key]}
        else:
            memory[key] = value
    return [None] * told + [memory.get(key, default) for key in row[told:]]


@given(B=SIZE, sizes=st.lists(SIZE, min_size=3, max_size=3).map(sorted), values=SIZE)
@settings(max_examples=40, deadline=None)
def test_mqar(B, sizes, values):
    queries, pairs, keys = sizes
    batch = tasks.mqar(B, pairs, queries, generator(), keys=keys, values=values)
    check(batch, lambda row: recall(row, 2 * pairs), 2 * pairs + queries, values + keys)
    assert batch.mask.sum() == B * queries
    for row in batch.tokens.tolist():
        told, asked = row[: 2 * pairs : 2], row[2 * pairs :]
        assert len(set(told)) == pairs and len(set(asked)) == queries
        assert min(told) >= values and max(row[1 : 2 * pairs : 2]) < values


@given(B=SIZE, writes=SIZE, keys=SIZE, values=SIZE)
@settings(max_examples=40, deadline=None)
def test_overwrite_mqar(B, writes, keys, values):
    batch = tasks.overwrite_mqar(B, writes, keys, generator(), values=values)
    check(batch, lambda row: recall(row, 2 * writes), 2 * writes + keys, values + keys)
    for row in batch.tokens.tolist():
        assert sorted(row[2 * writes :]) == list(range(values, values + keys))


def test_overwrite_mqar_writes_keys_again_and_leaves_some_out():
    batch = tasks.overwrite_mqar(50, 12, 12, generator())
    written = [set(row[:24:2]) for row in batch.tokens.tolist()]
    assert all(len(keys) < 12 for keys in written)
    assert batch.mask.sum() == sum(map(len, written))


@given(B=SIZE, writes=SIZE, resets=SIZE, keys=SIZE, values=SIZE)
@settings(max_examples=40, deadline=None)
def test_selective_reset(B, writes, resets, keys, values):
    batch = tasks.selective_reset(B, writes, resets, keys, generator(), values=values)
    first = values + 1  # after the value "empty"
    last = first + 2 * keys
    clear = {last: range(first, first + keys), last + 1: range(first + keys, last)}
    told = 2 * (writes + resets)
    check(batch, lambda row: recall(row, told, clear, default=values), told + 2 * keys, last + 2)
    for row in batch.tokens.tolist():
        assert sum(token in clear for token in row[:told:2]) == resets
        assert all((row[i + 1] == values) == (row[i] in clear) for i in range(0, told, 2))
        assert sorted(row[told:]) == list(range(first, last))


def test_selective_reset_clears_both_groups_and_spares_the_other():
    batch = tasks.selective_reset(64, 20, 4, 3, generator(), values=5)
    assert {12, 13} <= set(batch.tokens.flatten().tolist())
    answers = batch.targets[batch.mask]
    assert 0.1 < (answers == 5).float().mean() < 0.9


@given(B=SIZE, length=SIZE, values=SIZE)
@settings(max_examples=40, deadline=None)
def test_palindrome(B, length, values):
    def answers(row):
        string = row[:length]
        assert row[length] == values and row[length + 1 :] == string[:0:-1]
        return [None] * length + string[::-1]

    batch = tasks.palindrome(B, length, generator(), values=values)
    check(batch, answers, 2 * length, values + 1)


@given(B=SIZE, count=SIZE, operations=st.integers(1, 40), values=SIZE)
@settings(max_examples=40, deadline=None)
def test_stacks(B, count, operations, values):
    def answers(row):
        piles, out = [[] for _ in range(count)], []
        for action, value in zip(row[::2], row[1::2], strict=True):
            pop, s = divmod(action - values, count)
            out += [piles[s][-1] if pop else None, None]
            if pop:
                assert piles[s].pop() == value  # the right answer is shown afterwards
            else:
                piles[s].append(value)
        return out

    batch = tasks.stacks(B, count, operations, generator(), values=values)
    check(batch, answers, 2 * operations, values + 2 * count)


def test_stacks_are_popped_about_as_often_as_pushed_and_get_deep():
    batch = tasks.stacks(64, 2, 100, generator())
    assert 0.35 < batch.mask[:, ::2].float().mean() < 0.5
    two_pops = (batch.mask[:, :-4:2] & batch.mask[:, 4::2]).sum()
    assert two_pops > 100


@given(B=SIZE, length=st.integers(3, 30), values=SIZE, words=SIZE)
@settings(max_examples=40, deadline=None)
def test_needle(B, length, values, words):
    def answers(row):
        at = row.index(values + words)
        assert at < length - 2 and row[-1] == values + words
        assert all(values <= t < values + words for t in row[:at] + row[at + 2 : -1])
        return [None] * (length - 1) + [row[at + 1]]

    batch = tasks.needle(B, length, generator(), values=values, words=words)
    check(batch, answers, length, values + words + 1)


def test_the_needle_lies_everywhere():
    tokens = tasks.needle(400, 8, generator()).tokens
    assert set((tokens[:, :-1] == 48).nonzero()[:, 1].tolist()) == set(range(6))


MAKERS = {
    "mqar": lambda g: tasks.mqar(4, 6, 3, g),
    "overwrite": lambda g: tasks.overwrite_mqar(4, 6, 3, g),
    "reset": lambda g: tasks.selective_reset(4, 6, 2, 3, g),
    "palindrome": lambda g: tasks.palindrome(4, 6, g),
    "stacks": lambda g: tasks.stacks(4, 3, 6, g),
    "needle": lambda g: tasks.needle(4, 9, g),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_seed_says_what_is_drawn(name):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    g, make = generator(3), MAKERS[name]
    first, second = make(g), make(g)
    assert all(map(torch.equal, first, make(generator(3))))
    assert not torch.equal(first.tokens, second.tokens)
    assert not torch.equal(first.tokens, make(generator(4)).tokens)
    assert len({tuple(row) for row in first.tokens.tolist()}) == 4
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("writes, keys, values", [(1, 1, 3), (4, 2, 2), (5, 2, 3), (3, 3, 2)])
def test_order_blind_accuracy_is_that_of_all_cases_counted(writes, keys, values):
    right = asked = 0
    pairs = itertools.product(range(keys), range(values))
    for row in itertools.product(pairs, repeat=writes):
        written = [value for key, value in row if key == 0]
        if written:
            asked += 1
            right += max(Counter(written).values()) / len(written)
    assert tasks.order_blind_accuracy(writes, keys, values) == pytest.approx(right / asked)


def test_order_blind_accuracy_of_many_writes_is_quick_and_falls():
    few, many = (tasks.order_blind_accuracy(n, 64, 64) for n in (64, 512))
    assert 0 < many < 0.25 < few < 1
    assert tasks.order_blind_accuracy(1, 4, 4) == 1


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda g: tasks.mqar(0, 2, 1, g), "batch_size"),
        (lambda g: tasks.mqar(1, 2, 3, g), "queries <= pairs"),
        (lambda g: tasks.mqar(1, 5, 3, g, keys=4), "pairs <= keys"),
        (lambda g: tasks.overwrite_mqar(1, 0, 2, g), "writes"),
        (lambda g: tasks.overwrite_mqar(1, 2, 2.0, g), "keys"),
        (lambda g: tasks.selective_reset(1, 2, 0, 2, g), "resets"),
        (lambda g: tasks.palindrome(1, 2, g, values=0), "values"),
        (lambda g: tasks.stacks(1, 0, 4, g), "count"),
        (lambda g: tasks.stacks(1, 1, True, g), "operations"),
        (lambda g: tasks.needle(1, 2, g), "length.*3.*2"),
        (lambda g: tasks.needle(1, 5, g, words=0), "words"),
        (lambda g: tasks.order_blind_accuracy(0, 1, 1), "writes"),
    ],
)
def test_sizes_that_make_no_sense_are_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call(generator())

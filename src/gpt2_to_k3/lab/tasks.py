"""Tasks that ask what a memory holds; each answer is fixed by the tokens before it.

A task is a pure function of sizes and a torch.Generator, and returns a Batch on its device. Tokens
are numbered in the order of "Vocabulary", values first.
"""

import math
from typing import NamedTuple

import torch

from ..layers.norm import check_sizes

NO_TARGET = -100  # what F.cross_entropy leaves out


class Batch(NamedTuple):
    """What a model reads, what it should answer (NO_TARGET: nothing is asked), where it is scored.

    Shapes: tokens, targets int64 [B, T]; mask bool [B, T]. targets[:, t] is for the output at t,
    which has seen tokens[:, :t + 1]: nothing is shifted afterwards.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor


def mqar(batch_size, pairs, queries, generator, *, keys=64, values=16):
    """Pairs key value key value ..., then keys alone, each to be answered with its value.

    The keys of a row are distinct, and so are its queries.
    Shapes: T = 2 pairs + queries. Vocabulary: values, keys.
    Errors: ValueError for a size below 1, or unless queries <= pairs <= keys.
    Source: multi-query associative recall, Arora et al. 2023 (arXiv 2312.04927); Kimi Linear
    (arXiv 2510.26692), section 5.1.
    """
    check_sizes(batch_size=batch_size, pairs=pairs, queries=queries, keys=keys, values=values)
    if not queries <= pairs <= keys:
        raise ValueError(
            "queries, pairs, keys: expected queries <= pairs <= keys, "
            f"got {queries}, {pairs}, {keys}"
        )
    key = values + _orders(batch_size, keys, generator)[:, :pairs]
    value = _integers(values, (batch_size, pairs), generator)
    asked = _orders(batch_size, pairs, generator)[:, :queries]
    return _then_ask(key, value, key.gather(1, asked), value.gather(1, asked))


def overwrite_mqar(batch_size, writes, keys, generator, *, values=16):
    """Pairs of a random key and value; then every key is asked, and its last value counts.

    A key that no pair wrote is read like the others, but not scored.
    Shapes: T = 2 writes + keys. Vocabulary: values, keys.
    Errors: ValueError for a size below 1.
    Source: ours, after Schlag et al. 2021 (arXiv 2102.11174), section 6.1, setting 2.
    """
    check_sizes(batch_size=batch_size, writes=writes, keys=keys, values=values)
    key = _integers(keys, (batch_size, writes), generator)
    value = _integers(values, (batch_size, writes), generator)
    asked = _orders(batch_size, keys, generator)
    answer = _last_values(key, value, keys).gather(1, asked)
    return _then_ask(values + key, value, values + asked, answer)


def selective_reset(batch_size, writes, resets, keys, generator, *, values=16):
    """Pairs of a random key and value, and resets, which clear a group of keys; then all are asked.

    There are two groups. A cleared key is answered like one never written: with the value "empty".
    Shapes: T = 2 (writes + resets) + 2 keys, with `keys` keys in each group; a reset is the token
    of its group, then "empty". Vocabulary: values, "empty", the keys of both groups, 2 resets.
    Errors: ValueError for a size below 1.
    Source: ours; a decay of one head forgets both groups.
    """
    check_sizes(batch_size=batch_size, writes=writes, resets=resets, keys=keys, values=values)
    empty, steps = values, writes + resets
    is_reset = _orders(batch_size, steps, generator) < resets
    key = _integers(2 * keys, (batch_size, steps), generator)
    value = _integers(values, (batch_size, steps), generator)
    group = torch.where(is_reset, key % 2, key // keys)
    written = torch.where(is_reset, empty, value)
    at = torch.arange(steps, device=key.device)
    last_reset = [
        torch.where(is_reset & (group == g), at, -1).amax(1, keepdim=True) for g in (0, 1)
    ]
    asked = _orders(batch_size, 2 * keys, generator)
    write_key = torch.where(is_reset, -1, key)
    last = _last_places(write_key, 2 * keys).gather(1, asked)
    reset = torch.where(asked // keys == 0, *last_reset)
    answer = torch.where(last > reset, value.gather(1, last.clamp(min=0)), empty)
    token = values + 1 + torch.where(is_reset, 2 * keys + group, key)
    return _then_ask(token, written, values + 1 + asked, answer)


def palindrome(batch_size, length, generator, *, values=16):
    """A random string, a separator, and the string backwards, each of its tokens to be foretold.

    Shapes: T = 2 length. Vocabulary: values, separator.
    Errors: ValueError for a size below 1.
    Source: Kimi Linear (arXiv 2510.26692), 5.1.
    """
    check_sizes(batch_size=batch_size, length=length, values=values)
    string = _integers(values, (batch_size, length), generator)
    back = string.flip(1)
    separator = torch.full_like(string[:, :1], values)
    tokens = torch.cat([string, separator, back[:, :-1]], 1)
    return _batch(tokens, torch.cat([torch.full_like(string, NO_TARGET), back], 1))


def stacks(batch_size, count, operations, generator, *, values=16):
    """Push a value on one of `count` stacks, or pop one, and foretell the value that comes off.

    Each operation is two tokens: which stack is pushed or popped, then the value. A stack is chosen
    at random, then push or pop by a coin; an empty stack is pushed.
    Shapes: T = 2 operations. Vocabulary: values, `count` pushes, `count` pops.
    Errors: ValueError for a size below 1.
    Source: Kimi Linear (arXiv 2510.26692), 5.1, with 64 stacks.
    """
    check_sizes(batch_size=batch_size, count=count, operations=operations, values=values)
    stack = _integers(count, (batch_size, operations), generator)
    coin = _integers(2, (batch_size, operations), generator)
    value = _integers(values, (batch_size, operations), generator)
    rows = torch.arange(batch_size, device=stack.device)
    depth = torch.zeros(batch_size, count, dtype=torch.int64, device=stack.device)
    held = torch.zeros(batch_size, count, operations + 1, dtype=torch.int64, device=stack.device)
    pops, shown = [], []
    for s, c, v in zip(stack.unbind(1), coin.unbind(1), value.unbind(1), strict=True):
        height = depth[rows, s]
        pop = (c == 1) & (height > 0)
        v = torch.where(pop, held[rows, s, height], v)
        held[rows, s, height + 1] = v  # after a pop it lies above the top, where nobody looks
        depth[rows, s] = height + 1 - 2 * pop.long()
        pops.append(pop)
        shown.append(v)
    pop, value = torch.stack(pops, 1), torch.stack(shown, 1)
    token = values + stack + count * pop.long()
    target = torch.where(pop, value, NO_TARGET)
    return _batch(_pairs(token, value), _pairs(target, torch.full_like(value, NO_TARGET)))


def needle(batch_size, length, generator, *, values=16, words=32):
    """One marked value somewhere in a hay of words; at the end the marker asks for it.

    Shapes: T = length >= 3. Vocabulary: values, words, marker.
    Errors: ValueError for a size below 1, or a length below 3.
    Source: after "needle in a haystack", as RULER (arXiv 2404.06654) has it: one key, one value.
    """
    check_sizes(batch_size=batch_size, length=length, values=values, words=words)
    if length < 3:
        raise ValueError(f"length: expected at least 3 (marker, value, marker), got {length}")
    marker = values + words
    tokens = values + _integers(words, (batch_size, length), generator)
    value = _integers(values, (batch_size, 1), generator)
    at = _integers(length - 2, (batch_size, 1), generator)
    tokens.scatter_(1, at, marker).scatter_(1, at + 1, value)
    tokens[:, -1] = marker
    targets = torch.full_like(tokens, NO_TARGET)
    targets[:, -1:] = value
    return _batch(tokens, targets)


def order_blind_accuracy(writes, keys, values):
    """The best accuracy on overwrite_mqar of a memory that knows every write, but not their order.

    Every task has one right answer at each scored position, so the best accuracy is 1. A sum of
    writes, such as one layer of linear attention, reaches less: of a key's n values it can but
    name the most frequent one, and that is the last with probability (its count) / n. n is
    binomial, given n >= 1. A short convolution before the sum sees the last pair beside the
    first question and may mark it, so that one key more can be right.
    Errors: ValueError for a size below 1.
    """
    check_sizes(writes=writes, keys=keys, values=values)
    ever, right = keys**writes - (keys - 1) ** writes, 0.0
    for n in range(1, writes + 1):
        chance = math.comb(writes, n) * (keys - 1) ** (writes - n) / ever
        if chance > 1e-12:  # the count takes n^3 values steps
            right += chance * _mean_largest_count(n, values) / n
    return right


def _mean_largest_count(n, values):
    """Mean count of the most frequent of n random values: the sum over m of P(it exceeds m)."""
    mean = 0.0
    for m in range(n):
        ways = [1] + [0] * n  # of filling j places with the values so far, none more than m times
        for _ in range(values):
            ways = [
                sum(math.comb(j, c) * ways[j - c] for c in range(min(m, j) + 1))
                for j in range(n + 1)
            ]
        mean += 1 - ways[n] / values**n
    return mean


def _integers(high, shape, generator):
    return torch.randint(high, shape, generator=generator, device=generator.device)


def _orders(batch_size, n, generator):
    """A random order of 0 .. n-1 for each row."""
    return torch.rand(batch_size, n, generator=generator, device=generator.device).argsort(1)


def _pairs(first, second):
    """[B, N] and [B, N] -> [B, 2 N], one from each in turn."""
    return torch.stack([first, second], -1).flatten(1)


def _last_places(key, keys):
    """Where each of 0 .. keys-1 comes last in key [B, N]; -1 if it does not -> [B, keys]."""
    at = torch.arange(key.shape[1], device=key.device)
    here = key[:, :, None] == torch.arange(keys, device=key.device)
    return torch.where(here, at[:, None], -1).amax(1)


def _last_values(key, value, keys):
    last = _last_places(key, keys)
    return torch.where(last < 0, NO_TARGET, value.gather(1, last.clamp(min=0)))


def _then_ask(key, value, asked, answer):
    told = _pairs(key, value)
    return _batch(
        torch.cat([told, asked], 1), torch.cat([torch.full_like(told, NO_TARGET), answer], 1)
    )


def _batch(tokens, targets):
    return Batch(tokens, targets, targets != NO_TARGET)

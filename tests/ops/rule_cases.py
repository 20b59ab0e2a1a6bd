"""The rules under test, their gates, and how they are called: shared by the tests of the rules."""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch

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

import pytest
from rule_cases import PRIMES


@pytest.fixture
def inputs(random_inputs):
    """inputs(rule, T, sizes, state): sizes B, H, K, V are primes that differ pairwise and from T (C14)."""

    def make(rule, T, sizes=None, state=True, seed=0):
        B, H, K, V = sizes or [p for p in PRIMES if p != T][:4]
        return random_inputs(B, T, H, K, V, rule.gates, rule.beta, state, seed)

    return make

"""AttentionResidual against fla-core's naive_attnres, loaded by path as in test_rules_fla.py.

It computes in float32.
"""

import pytest
import torch
from peers import fla_naive

from gpt2_to_k3.layers import (
    AttentionResidual,
    attention_residuals,
    mix_sources,
    source_weights,
    two_phase_attention_residuals,
)

F32 = torch.float32
B, T, D = 2, 7, 16
STD = 0.3  # of the queries; the scores then have a standard deviation near 1


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def naive_attnres():
    return fla_naive("attnres").naive_attnres


@pytest.mark.parametrize("N", [1, 2, 9])
@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.1])
def test_one_mixing(naive_attnres, N, eps, with_grads, compare):
    x = {f"s{i}": (i + 1) * normal(B, T, D, seed=i) for i in range(N)}
    x |= dict(query=STD * normal(D, seed=20), norm=1 + 0.5 * normal(D, seed=21))

    def ours(query, norm, **sources):
        w, sources = query * norm, list(sources.values())
        return mix_sources(w, sources, eps), source_weights(w, sources, eps)

    def theirs(query, norm, **sources):
        return naive_attnres(query, list(sources.values()), norm, rms_eps=eps, return_weights=True)

    want = with_grads(theirs, x, F32)
    # With one source the gradients of query and norm are 0, theirs up to rounding.
    compare(f"N={N} eps={eps}", with_grads(ours, x, F32), want, floor=1.0)


def test_a_zero_query(naive_attnres, compare):
    sources = [normal(B, T, D, seed=i) for i in range(5)]
    want = naive_attnres(torch.zeros(D), sources, torch.ones(D))
    compare("zero", {"h": AttentionResidual(D)(sources)}, {"h": want})


@pytest.mark.parametrize("block_size", [1, 3, 24])
@pytest.mark.parametrize("form", [attention_residuals, two_phase_attention_residuals])
def test_a_stack(naive_attnres, block_size, form, compare):
    """The same 10 sublayers, read with theirs by NeMo's and mlx-lm's loop."""
    torch.manual_seed(0)
    sublayers = [torch.nn.Sequential(torch.nn.Linear(D, D), torch.nn.Tanh()) for _ in range(10)]
    mixers = [AttentionResidual(D) for _ in range(11)]
    for mix in mixers:
        mix.query.data.normal_(std=STD)
        mix.norm.weight.data.uniform_(0.5, 2)
    x = normal(B, T, D, seed=0)

    def read(mix, sources):
        return naive_attnres(mix.query, sources, mix.norm.weight, rms_eps=1e-5)

    blocks, p = [], x
    with torch.no_grad():
        for i, f in enumerate(sublayers):
            h = read(mixers[i], blocks if p is None else [*blocks, p])
            if i % block_size == 0:
                blocks, p = [*blocks, p], None
            y = f(h)
            p = y if p is None else p + y
        want = read(mixers[-1], [*blocks, p])
        compare(
            f"{block_size}", {"h": form(x, sublayers, mixers, block_size)}, {"h": want}, loosen=3
        )

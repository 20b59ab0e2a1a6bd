"""Textbook ways to write a chunk that are right on easy inputs and wrong on these, where ours are right.

They fail as the rules' tests would: that shows what those tests can see.
"""

import math
from functools import partial

import pytest
import torch

from gpt2_to_k3.ops import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
    recurrent_kda,
)

F32 = torch.float32


def factored(x, k, G):
    """x_r k_i e^(G_r - G_i) as (x e^G)(k e^-G): e^-G overflows."""
    return (x * G.exp()) @ (k * (-G).exp()).mT


def difference(x, k, G):
    """The exponent G_r - G_i from running sums, masked first, so that no exponential is large."""
    D = G[..., :, None, :] - G[..., None, :, :]
    D = D.masked_fill(~torch.ones(D.shape[-3:-1], dtype=torch.bool).tril()[..., None], -math.inf)
    return torch.einsum("...rd,...id,...rid->...ri", x, k, D.exp())


def masked_late(x, k, G):
    """The same, masked after the exponential; above the diagonal that was e^(large)."""
    D = (G[..., :, None, :] - G[..., None, :, :]).exp()
    return torch.einsum("...rd,...id,...rid->...ri", x, k, D).tril()


def forward_substitution(A):
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    return torch.linalg.solve_triangular(eye + A, eye, upper=False, unitriangular=True)


def neumann_doubling(A):
    """(I - A)(I + A^2)(I + A^4)..., exact in exact arithmetic as A^C = 0."""
    eye = torch.eye(A.shape[-1], dtype=A.dtype)
    X, power = eye - A, A @ A
    for _ in range(A.shape[-1].bit_length()):
        X, power = X @ (eye + power), power @ power
    return X


def one_chunk(q, k, v, *, g, beta, scores=difference, inverse=forward_substitution):
    """KDA from an empty state, the whole sequence a single chunk."""
    q, k, v, g, beta = (x.transpose(1, 2) for x in (q, k, v, g, beta))
    G = g.cumsum(-2)
    A = beta[..., None] * scores(k, k, G).tril(-1)
    U = inverse(A) @ (beta[..., None] * v)
    o = scores(q * q.shape[-1] ** -0.5, k, G).tril() @ U
    S = (k * (G[..., -1:, :] - G).exp()).mT @ U
    return o.transpose(1, 2), S


def error(got, want):
    return ((got.double() - want).abs().max() / want.abs().max()).item()


@pytest.fixture
def inputs(random_inputs):
    def make(T, g=None):
        x = random_inputs(1, T, 2, 32, 16, "channel", True)
        return x if g is None else x | {"g": torch.full_like(x["g"], g)}

    return make


def resets(x, every, value):
    last = torch.arange(x["g"].shape[1]) % every == every - 1
    x["g"] = torch.where(last.view(1, -1, 1, 1), value, torch.full_like(x["g"], -0.01))
    return x


@pytest.mark.parametrize("scores", [factored, difference, masked_late])
@pytest.mark.parametrize("inverse", [forward_substitution, neumann_doubling])
def test_on_easy_inputs_every_textbook_form_is_right(scores, inverse, inputs, with_grads, compare):
    """So that a failure below is due to the input, not to a slip in the form."""
    x = inputs(64, -0.1)
    want = with_grads(recurrent_kda, x)
    f = partial(one_chunk, scores=scores, inverse=inverse)
    compare("float64", with_grads(f, x), want)
    compare("float32", with_grads(f, x, F32), want, loosen=10.0)


@pytest.mark.parametrize("g", [-2.0, -5.0, -20.0])
def test_factored_decay_is_nan_where_ours_is_right(g, inputs, with_grads, compare):
    """C1: e^-G is inf and e^G 0 from 18 tokens at -5 on, which any trained gate reaches."""
    x = inputs(64, g)
    assert one_chunk(**x, scores=factored)[0].isnan().any()
    compare(f"chunk_kda, g={g}", with_grads(chunk_kda, x, F32), with_grads(recurrent_kda, x))
    first = [
        T
        for T in range(1, 65)
        if not one_chunk(**inputs(T, -5.0), scores=factored)[0].isfinite().all()
    ]
    assert first[0] == 18


def test_masking_after_the_exponential_has_nan_gradients(inputs, with_grads, compare):
    """C3: the result is right, so only a test of gradients sees it."""
    x = inputs(32, -5.0)
    want = with_grads(recurrent_kda, x)
    got = with_grads(partial(one_chunk, scores=masked_late), x, F32)
    assert error(got["o"], want["o"]) < 1e-6
    assert all(got[name].isnan().any() for name in ("dk", "dg"))
    compare("chunk_kda", with_grads(chunk_kda, x, F32), want)


@pytest.mark.parametrize("value, at_least", [(-80.0, 3e-6), (-1e4, 1e-4), (-math.inf, math.nan)])
def test_differences_of_running_sums_fail_at_resets(value, at_least, inputs, with_grads, compare):
    """Digits lost at -80, more than 1e-4 wrong at -1e4, and -inf - (-inf) = NaN."""
    x = resets(inputs(64), 16, value)
    want = with_grads(recurrent_kda, x)
    o, _ = one_chunk(**x)
    if math.isnan(at_least):
        assert o.isnan().any()
    else:
        assert error(o, want["o"]) > at_least
    compare(f"chunk_kda, {value}", with_grads(chunk_kda, x, F32), want)

    x["g"] = x["g"][..., 0]
    want = with_grads(recurrent_gated_delta_rule, x)
    got = with_grads(chunk_gated_delta_rule, x, F32)
    compare(f"chunk_gated_delta_rule, {value}", got, want)


def test_neumann_doubling_explodes_on_equal_keys(inputs, with_grads, compare):
    """beta = 1, no decay: more than 1e3 times the size of the result, where random keys look fine."""
    x = inputs(64, 0.0)
    x["beta"] = torch.ones_like(x["beta"])
    doubling = partial(one_chunk, inverse=neumann_doubling)
    assert error(doubling(**x)[0], recurrent_kda(**{n: y.double() for n, y in x.items()})[0]) < 1e-5
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    want = with_grads(recurrent_kda, x)
    assert error(doubling(**x)[0], want["o"]) > 1e3
    assert error(one_chunk(**x)[0], want["o"]) < 1e-5
    compare("chunk_kda", with_grads(chunk_kda, x, F32), want)
    del x["g"]
    want = with_grads(recurrent_delta_rule, x)
    compare("chunk_delta_rule", with_grads(chunk_delta_rule, x, F32), want)

"""Each rule is the next simpler one where its new part is switched off, forward and backward."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2_to_k3.ops import (
    chunk_decay,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_linear_attention,
    flash_attention,
    parallel_linear_attention,
    recurrent_decay,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
    recurrent_kda,
    recurrent_linear_attention,
    softmax_attention,
)

PRECISIONS = [torch.float64, torch.float32]
both_precisions = pytest.mark.parametrize("dtype", PRECISIONS, ids=["float64", "float32"])
SIZES = (2, 37, 3, 5, 7)  # B, T, H, K, V


def forms(recurrent, chunk):
    sizes = (1, 16, 64)
    chunks = {f"chunk {C}": lambda C=C, **x: chunk(**x, chunk_size=C) for C in sizes}
    return {"recurrent": recurrent} | chunks


def unnormalised(f):
    """Linear attention without its normaliser, its pair of states reduced to S."""

    def rule(initial_state=None, **x):
        if initial_state is not None:
            B, H, K, _ = initial_state.shape
            initial_state = (initial_state, initial_state.new_zeros(B, H, K))
        o, (S, _) = f(**x, initial_state=initial_state, normalize=False)
        return o, S

    return rule


LINEAR = forms(unnormalised(recurrent_linear_attention), unnormalised(chunk_linear_attention))
LINEAR["parallel"] = unnormalised(parallel_linear_attention)


@both_precisions
def test_kda_with_equal_channels_is_the_gated_delta_rule(dtype, random_inputs, with_grads, compare):
    x = random_inputs(*SIZES, "head", True, True)
    want = with_grads(recurrent_gated_delta_rule, x)
    for form, f in forms(recurrent_kda, chunk_kda).items():

        def equal_channels(g, f=f, **x):
            return f(**x, g=g[..., None].expand_as(x["k"]))

        compare(f"kda, {form}", with_grads(equal_channels, x, dtype), want)


@both_precisions
def test_the_gated_delta_rule_without_decay_is_the_delta_rule(
    dtype, random_inputs, with_grads, compare
):
    """C36: the same gradients too."""
    x = random_inputs(*SIZES, None, True, True)
    want = with_grads(recurrent_delta_rule, x)
    for form, f in forms(recurrent_gated_delta_rule, chunk_gated_delta_rule).items():

        def no_decay(f=f, **x):
            return f(**x, g=torch.zeros_like(x["beta"]))

        compare(f"gated delta rule, {form}", with_grads(no_decay, x, dtype), want)


@both_precisions
def test_the_delta_rule_on_orthonormal_keys_is_linear_attention(
    dtype, random_inputs, with_grads, compare
):
    """T <= K keys of length 1 at right angles and beta = 1: each reads 0 and has nothing to correct."""
    B, T, H, K, V = 2, 11, 3, 13, 7
    x = random_inputs(B, T, H, K, V)
    keys = torch.linalg.qr(x["k"].double().permute(0, 2, 3, 1)).Q  # [B, H, K, T]
    x["k"] = keys.permute(0, 3, 1, 2).to(dtype)
    for linear, g in LINEAR.items():
        want = dict(zip(("o", "state"), g(**{n: y.double() for n, y in x.items()}), strict=True))
        for form, f in forms(recurrent_delta_rule, chunk_delta_rule).items():
            y = {n: y.to(dtype) for n, y in x.items()}
            o, state = f(**y, beta=torch.ones(B, T, H, dtype=dtype))
            compare(f"delta rule, {form}; {linear}", {"o": o, "state": state}, want)


@both_precisions
def test_decay_of_none_is_linear_attention_without_its_normaliser(
    dtype, random_inputs, with_grads, compare
):
    x = random_inputs(*SIZES, state=True)
    want = with_grads(recurrent_decay, x | {"g": torch.zeros(SIZES[:3])})
    del want["dg"]
    for form, f in forms(recurrent_decay, chunk_decay).items():

        def no_decay(f=f, **x):
            return f(**x, g=x["q"].new_zeros(SIZES[:3]))

        compare(f"decay, {form}", with_grads(no_decay, x, dtype), want)
    for form, f in LINEAR.items():
        compare(f"linear attention, {form}", with_grads(f, x, dtype), want)


def in_the_wrong_order(q, k, v, g, beta):
    """A common slip: the old value read from the state before its decay."""
    S = q.new_zeros(*k.shape[:1], *k.shape[2:], v.shape[-1])
    o = []
    for t in range(q.shape[1]):
        old = torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S * g[:, t].exp()[..., None, None]
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - old))
        o.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S) * q.shape[-1] ** -0.5)
    return torch.stack(o, 1), S


def test_decay_comes_before_the_read(random_inputs):
    """The wrong order agrees only where nothing decays; on random data it is percents off."""
    x = {n: y.double() for n, y in random_inputs(1, 128, 2, 16, 16, "head", True).items()}
    x["g"] = torch.log(0.6 + 0.4 * torch.sigmoid(10 * x["g"] + 3))
    for f in forms(recurrent_gated_delta_rule, chunk_gated_delta_rule).values():
        (o, S), (other, other_S) = f(**x), in_the_wrong_order(**x)
        assert ((other - o).norm() / o.norm()).item() > 0.02
        assert ((other_S - S).norm() / S.norm()).item() > 0.02
        still = x | {"g": torch.zeros_like(x["g"])}
        torch.testing.assert_close(f(**still), in_the_wrong_order(**still), rtol=0, atol=1e-12)


def test_after_a_decay_to_nothing_the_wrong_order_still_remembers(random_inputs):
    """a = 0: the state is exactly k^T v; reading before the decay leaks the old one back."""
    x = {n: y.double() for n, y in random_inputs(1, 2, 1, 5, 7, "head", True).items()}
    x["beta"], x["g"] = (
        torch.ones_like(x["beta"]),
        x["g"] * torch.tensor([1.0, torch.inf]).view(1, 2, 1),
    )
    want = x["k"][:, 1, :, :, None] * x["v"][:, 1, :, None]
    for f in forms(recurrent_gated_delta_rule, chunk_gated_delta_rule).values():
        assert torch.equal(f(**x)[1], want)
    assert (in_the_wrong_order(**x)[1] - want).norm() > 0.1


@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.permutations((2, 3, 5, 7, 11, 13)),
    block_q=st.integers(1, 9),
    block_k=st.integers(1, 9),
    causal=st.booleans(),
)
def test_flash_attention_is_softmax_attention(
    sizes, block_q, block_k, causal, random_inputs, with_grads, compare
):
    x = random_inputs(*sizes[:5])
    want = with_grads(lambda **x: (softmax_attention(**x, causal=causal),), x)
    options = dict(causal=causal, block_q=block_q, block_k=block_k)
    for dtype in PRECISIONS:
        got = with_grads(lambda **x: (flash_attention(**x, **options),), x, dtype)
        compare(f"flash attention, {sizes}, {options}", got, want)


@pytest.mark.parametrize(
    "recurrent, chunk, gates, beta",
    [
        (unnormalised(recurrent_linear_attention), unnormalised(chunk_linear_attention), None, False),
        (recurrent_decay, chunk_decay, "head", False),
        (recurrent_delta_rule, chunk_delta_rule, None, True),
        (recurrent_gated_delta_rule, chunk_gated_delta_rule, "head", True),
        (recurrent_kda, chunk_kda, "channel", True),
    ],
    ids=["linear_attention", "decay", "delta_rule", "gated_delta_rule", "kda"],
)  # fmt: skip
@both_precisions
def test_a_chunk_of_one_token_is_the_recurrence(
    recurrent, chunk, gates, beta, dtype, random_inputs, with_grads, compare
):
    x = random_inputs(*SIZES, gates, beta, True)
    got = with_grads(lambda **x: chunk(**x, chunk_size=1), x, dtype)
    compare("chunk 1", got, with_grads(recurrent, x))

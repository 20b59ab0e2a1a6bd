"""Arguments that do not fit raise ValueError, with the argument's name, what it is and what it should be."""

import math
from functools import partial

import pytest
import torch

from gpt2_to_k3.ops import (
    chunk_decay,
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_linear_attention,
    parallel_linear_attention,
    recurrent_decay,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
    recurrent_kda,
    recurrent_linear_attention,
)

B, T, H, K, V = 2, 7, 3, 5, 11
GATES = {
    recurrent_linear_attention: "", parallel_linear_attention: "", chunk_linear_attention: "",
    recurrent_delta_rule: "beta", chunk_delta_rule: "beta",
    recurrent_decay: "g", chunk_decay: "g",
    recurrent_gated_delta_rule: "g beta", chunk_gated_delta_rule: "g beta",
    recurrent_kda: "g beta", chunk_kda: "g beta",
}  # fmt: skip
ALL = list(GATES)
LINEAR = [f for f in ALL if "linear" in f.__name__]
CHUNK = [f for f in ALL if f.__name__.startswith("chunk")]
each = partial(pytest.mark.parametrize, "rule", ids=lambda f: f.__name__)


def arguments(rule, dtype=torch.float32):
    x = dict(q=torch.rand(B, T, H, K), k=torch.rand(B, T, H, K), v=torch.rand(B, T, H, V))
    if "g" in GATES[rule].split():
        x["g"] = -torch.rand(B, T, H, K) if "kda" in rule.__name__ else -torch.rand(B, T, H)
    if "beta" in GATES[rule]:
        x["beta"] = torch.rand(B, T, H)
    x = {n: y.to(dtype) for n, y in x.items()}
    S = torch.rand(B, H, K, V)
    return x | {"initial_state": (S, torch.rand(B, H, K)) if rule in LINEAR else S}


def refused(rule, name, value, *texts):
    """The message starts with the argument's name and holds each text; others stay unharmed."""
    x = arguments(rule)
    x[name] = value
    before = {n: y.clone() for n, y in x.items() if isinstance(y, torch.Tensor) and not y.is_meta}
    with pytest.raises(ValueError) as error:
        rule(**x)
    message = str(error.value)
    assert message.startswith(name), message
    for text in texts:
        assert str(text) in message, message
    assert all(torch.equal(x[n], y) or y.isnan().any() for n, y in before.items())


def tensors(rule):
    return [n for n, y in arguments(rule).items() if isinstance(y, torch.Tensor)]


@each(ALL)
def test_the_arguments_as_they_should_be_are_accepted(rule):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        o, _ = rule(**arguments(rule, dtype))
        assert o.shape == (B, T, H, V) and o.isfinite().all()


@each(ALL)
def test_ranks_and_sizes(rule):
    """Expected and got, and whose shape asks for it."""
    refused(rule, "q", torch.rand(B, T, K), (B, T, K), "[B, T, H, K]")
    refused(rule, "q", torch.rand(B, T, H, K, 1), (B, T, H, K, 1), "[B, T, H, K]")
    for k in [(B + 1, T, H, K), (B, T + 1, H, K), (B, T, H + 1, K), (B, T, H, K + 1), (T, H, K)]:
        refused(rule, "k", torch.rand(k), k, f"[{B}, {T}, {H}, {K}]", "q", (B, T, H, K))
    refused(rule, "k", torch.rand(B, T, 1, K), (B, T, 1, K), f"[{B}, {T}, {H}, {K}]")
    for v in [(1, T, H, V), (B, T + 1, H, V), (B, 1, H, V), (B, T, H + 1, V), (B, T, V)]:
        refused(rule, "v", torch.rand(v), v, f"[{B}, {T}, {H}, any]", "k", (B, T, H, K))
    x = arguments(rule)
    x["q"] = x["k"] = torch.rand(B, T, H, 0)
    with pytest.raises(ValueError, match=r"^q has shape \(2, 7, 3, 0\), expected .* K"):
        rule(**x)


@each([f for f in ALL if GATES[f]])
def test_ranks_and_sizes_of_gates(rule):
    """A scalar gate where channels are due, and the other way round, is no broadcast."""
    for name in GATES[rule].split():
        right = arguments(rule)[name].shape
        want = "[" + ", ".join(map(str, right)) + "]"
        wrong = [(B, T), (B, T, 1), (B, H, T), (1, T, H), (B, T + 1, H), (B, T, H, 1), (B, T, H, V)]
        wrong.append((B, T, H) if len(right) == 4 else (B, T, H, K))
        for shape in wrong:
            refused(rule, name, -torch.rand(shape), shape, want, (B, T, H, K))


@each(ALL)
def test_ranks_and_sizes_of_the_state(rule):
    """C15: [B, H, K, V], not [B, H, V, K]."""
    want = f"[{B}, {H}, {K}, {V}]"
    for shape in [
        (B, H, V, K),
        (H, K, V),
        (1, H, K, V),
        (B, 1, K, V),
        (B, H, K, 1),
        (B, T, H, K, V),
    ]:
        S = torch.rand(shape)
        state = (S, torch.rand(B, H, K)) if rule in LINEAR else S
        refused(rule, "initial_state", state, shape, want)


@each(LINEAR)
def test_the_state_of_linear_attention_is_a_pair(rule):
    S, z = torch.rand(B, H, K, V), torch.rand(B, H, K)
    for state in (S, z, S[0], [S], (S, z, z), 1.0):
        refused(rule, "initial_state", state, "pair")
    for shape in [(B, H, 1), (B, 1, H, K), (B, K, H), (H, K)]:
        x = arguments(rule) | {"initial_state": (S, torch.rand(shape))}
        with pytest.raises(ValueError, match=r"^initial_state\[1\] has shape") as error:
            rule(**x)
        assert str(shape) in str(error.value) and f"[{B}, {H}, {K}]" in str(error.value)


@each(ALL)
def test_integers_and_things_that_are_no_tensors(rule):
    for name in tensors(rule):
        x = arguments(rule)[name]
        for dtype in (torch.int64, torch.int32, torch.bool, torch.complex64):
            refused(rule, name, torch.zeros(x.shape, dtype=dtype), "floating point", dtype)
        for thing in (0.5, x.tolist()):
            refused(rule, name, thing, type(thing).__name__)


@each(ALL)
def test_dtypes_of_q_k_and_v_that_differ(rule):
    for name in "kv":
        x = arguments(rule)[name].double()
        refused(rule, name, x, "torch.float64", "q has torch.float32")


@each(ALL)
def test_mixed_devices(rule):
    for name in tensors(rule):
        x = arguments(rule)[name].to("meta")
        if name == "q":  # the first: the next one differs from it
            with pytest.raises(ValueError, match="^k is on cpu, but q is on meta"):
                rule(**arguments(rule) | {"q": x})
        else:
            refused(rule, name, x, "is on meta, but q is on cpu")
    if rule in LINEAR:
        S, z = arguments(rule)["initial_state"]
        refused(rule, "initial_state", (S.to("meta"), z), "is on meta, but q is on cpu")
        refused(rule, "initial_state", (S, z.to("meta")), "[1] is on meta, but q is on cpu")


@each([f for f in ALL if "g" in GATES[f].split()])
@pytest.mark.parametrize("bad", [1e-6, 1.0, 176.0, math.inf, math.nan])
def test_a_log_decay_above_zero(rule, bad):
    """C6: 176 would be inf - inf; a single entry is enough."""
    for entry in (0, -1):
        g = arguments(rule)["g"]
        g.view(-1)[entry] = bad
        refused(rule, "g", g, "<= 0", f"got {g.view(-1)[entry].item()}")


@each([f for f in ALL if "beta" in GATES[f]])
@pytest.mark.parametrize("bad", [-1e-6, -1.0, 2.001, math.inf, -math.inf, math.nan])
def test_a_write_strength_outside_0_to_2(rule, bad):
    """C37."""
    for entry in (0, -1):
        beta = arguments(rule)["beta"]
        beta.view(-1)[entry] = bad
        refused(rule, "beta", beta, "[0, 2]", f"got {beta.view(-1)[entry].item()}")
    for edge in (0.0, 2.0):
        x = arguments(rule)
        rule(**x | {"beta": torch.full_like(x["beta"], edge)})


@each(CHUNK)
@pytest.mark.parametrize("bad", [0, -1, -64, 1.5, 64.0, "64", None, True])
def test_a_chunk_size_below_one_or_not_an_integer(rule, bad):
    refused(rule, "chunk_size", bad, "integer >= 1", repr(bad))
    x = {n: y[:, :0] for n, y in arguments(rule).items() if n != "initial_state"}
    with pytest.raises(ValueError, match="^chunk_size"):
        rule(**x, chunk_size=bad)  # without a token, too


@each(ALL)
def test_everything_after_v_is_named(rule):
    """C39: beta and g cannot be swapped by position."""
    x = arguments(rule)
    with pytest.raises(TypeError, match="positional"):
        rule(*x.values())

"""Against the reference functions of fla-core (flash-linear-attention), run from its own files.

Its package needs triton to import; the naive files need torch and einops alone, so they are loaded by
path. They compute in float32.
"""

import ast
import sys
from functools import partial

import pytest
import torch
from peers import fla_file, fla_naive

from gpt2_to_k3.ops import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_kda,
    chunk_linear_attention,
    elu_feature_map,
    kda_log_decay,
    parallel_linear_attention,
    recurrent_delta_rule,
    recurrent_gated_delta_rule,
    recurrent_kda,
    recurrent_linear_attention,
)

F32 = torch.float32
SIZES = (2, 128, 3, 5, 7)  # B, T, H, K, V; some of theirs need T to be a multiple of the chunk


def load(name):
    before = set(sys.modules)
    module = fla_naive(name)
    assert not {"fla", "triton"} & (set(sys.modules) - before)
    return module


def functions(name, *wanted):
    """Of a file that imports triton, these functions alone."""
    tree = ast.parse(fla_file(name).read_text(encoding="utf-8"))
    tree.body = [x for x in tree.body if isinstance(x, ast.FunctionDef) and x.name in wanted]
    scope = {"torch": torch, "F": torch.nn.functional}
    exec(compile(tree, name, "exec"), scope)
    return [scope[x] for x in wanted]


def forms(recurrent, chunk):
    return {"recurrent": recurrent} | {f"chunk {C}": partial(chunk, chunk_size=C) for C in (16, 64)}


def heads_first(f):
    """Theirs takes and returns [B, H, T, ...] here."""

    def g(initial_state=None, **x):
        o, state = f(**{n: y.transpose(1, 2) for n, y in x.items()}, initial_state=initial_state)
        return o.transpose(1, 2), state

    return g


def outputs(f):
    """Without the state, where theirs returns none, or another second result."""
    return lambda **x: f(**x)[:1]


@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_kda(state, random_inputs, with_grads, compare):
    theirs = load("kda")
    x = random_inputs(*SIZES, "channel", True, state)
    for name in ("naive_recurrent_kda", "naive_chunk_kda"):
        want = with_grads(partial(getattr(theirs, name), output_final_state=True), x, F32)
        for form, f in forms(recurrent_kda, chunk_kda).items():
            compare(f"{form}, {name}", with_grads(f, x, F32), want)


@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_gated_delta_rule(state, random_inputs, with_grads, compare):
    theirs = load("gated_delta_rule")
    x = random_inputs(*SIZES, "head", True, state)
    for name in ("naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"):
        want = with_grads(partial(getattr(theirs, name), output_final_state=True), x, F32)
        for form, f in forms(recurrent_gated_delta_rule, chunk_gated_delta_rule).items():
            compare(f"{form}, {name}", with_grads(f, x, F32), want)


@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_delta_rule(state, random_inputs, with_grads, compare):
    theirs = load("delta_rule")
    x = random_inputs(*SIZES, None, True, state)
    want = with_grads(heads_first(theirs.delta_rule_recurrence), x, F32)
    for form, f in forms(recurrent_delta_rule, chunk_delta_rule).items():
        compare(f"{form}, delta_rule_recurrence", with_grads(f, x, F32), want)


@pytest.mark.parametrize("name", ["delta_rule_chunkwise", "delta_rule_parallel"])
def test_delta_rule_in_the_forms_without_a_state(name, random_inputs, compare):
    theirs = getattr(load("delta_rule"), name)
    x = random_inputs(*SIZES, None, True)
    args = {n: y.transpose(1, 2).contiguous() for n, y in x.items()}
    want = {"o": theirs(**args)[0].transpose(1, 2)}
    for form, f in forms(recurrent_delta_rule, chunk_delta_rule).items():
        compare(f"{form}, {name}", {"o": f(**x)[0]}, want)


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "normalised"])
@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
def test_linear_attention(normalize, state, random_inputs, with_grads, compare):
    theirs = load("linear_attn")
    x = random_inputs(*SIZES)
    x["q"], x["k"] = elu_feature_map(x["q"]), elu_feature_map(3 * x["k"])
    if state:
        past = random_inputs(*SIZES, seed=1)
        k = elu_feature_map(past["k"][:, :4])
        x["S"] = torch.einsum("bthk,bthv->bhkv", k, past["v"][:, :4])
        x["z"] = k.sum(1)

    def recurrent(S=None, z=None, **x):
        initial_state = S
        if normalize and S is not None:  # their z has an axis for time
            initial_state = (S, z[:, None])
        o, state = theirs.naive_recurrent_linear_attn(
            **x, initial_state=initial_state, output_final_state=True, normalize=normalize
        )
        return (o, state[0], state[1][:, 0]) if normalize else (o, state)

    def ours(f):
        def g(S=None, z=None, **x):
            initial_state = None if S is None else (S, z)
            o, state = f(**x, initial_state=initial_state, normalize=normalize)
            return (o, *state) if normalize else (o, state[0])

        return g

    want = with_grads(recurrent, x, F32)
    every = forms(recurrent_linear_attention, chunk_linear_attention)
    every["parallel"] = parallel_linear_attention
    for form, f in every.items():
        compare(f"{form}, naive_recurrent_linear_attn", with_grads(ours(f), x, F32), want)
        if not state:
            peer = partial(theirs.naive_chunk_linear_attn, normalize=normalize)
            got = {"o": f(**x, normalize=normalize)[0]}
            compare(f"{form}, naive_chunk_linear_attn", got, {"o": peer(**x)})


@pytest.mark.parametrize("lower_bound", [None, -5.0, -1.0])
def test_kda_gates(lower_bound, random_inputs, with_grads, compare):
    free, bounded = functions("kda/gate.py", "naive_kda_gate", "naive_kda_lowerbound_gate")
    z = 3 * random_inputs(*SIZES)["q"]
    x = dict(z=z, A_log=torch.tensor([-1.0, 0.5, 2.0]), dt_bias=torch.linspace(-3, 2, 15))

    def theirs(z, A_log, dt_bias):
        if lower_bound is None:
            return (free(z, A_log, dt_bias),)
        return (bounded(z, A_log, dt_bias, lower_bound),)

    got = with_grads(lambda **x: (kda_log_decay(**x, lower_bound=lower_bound),), x, F32)
    compare(f"lower_bound={lower_bound}", got, with_grads(theirs, x, F32))


def test_their_chunk_kda_has_no_gradient_where_gates_reach_minus_5(
    random_inputs, with_grads, compare
):
    """They mask e^(G_r - G_i) after the exponential: right values, non-finite gradients at T=C=64."""
    theirs = load("kda")
    x = random_inputs(1, 64, 2, 5, 7, "channel", True)
    x["g"] = torch.full_like(x["g"], -5.0)
    want = with_grads(recurrent_kda, x)
    peer = with_grads(partial(theirs.naive_chunk_kda, output_final_state=True), x, F32)
    compare("theirs", {n: peer[n] for n in ("o", "state")}, {n: want[n] for n in ("o", "state")})
    for name in ("dq", "dk", "dg", "dbeta"):
        assert not peer[name].isfinite().all(), name
    compare("chunk_kda", with_grads(chunk_kda, x, F32), want)

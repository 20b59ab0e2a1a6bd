"""Against mlx-lm's gated delta rule, run on the CPU.

Its g is the decay itself, not the logarithm; its state is [B, H, V, K]; the scale is the caller's.
"""

import numpy as np
import pytest
import torch

from gpt2_to_k3.ops import (
    chunk_gated_delta_rule,
    chunk_kda,
    kda_log_decay,
    recurrent_gated_delta_rule,
    recurrent_kda,
)

SIZES = (2, 37, 3, 5, 7)


@pytest.fixture(scope="module")
def theirs(mlx):
    try:
        from mlx_lm.models import gated_delta
    except ImportError:
        pytest.fail("mlx-lm is missing: pip install mlx-lm", pytrace=False)
    return gated_delta


def to_torch(x):
    return torch.from_numpy(np.array(x))


@pytest.mark.parametrize("gates", ["head", "channel"])
@pytest.mark.parametrize("state", [False, True], ids=["no_state", "state"])
@pytest.mark.parametrize("size", [1.0, 10.0, 1e4])
def test_the_rule(gates, state, size, mlx, theirs, random_inputs, compare):
    """With gates per channel, theirs is KDA."""
    x = random_inputs(*SIZES, gates, True, state)
    x["g"] = x["g"] * size

    args = {n: mlx.array(y.numpy()) for n, y in x.items() if n != "initial_state"}
    args["q"] = args["q"] * SIZES[3] ** -0.5
    args["g"] = mlx.exp(args["g"])
    if state:
        args["state"] = mlx.array(x["initial_state"].mT.contiguous().numpy())
    o, S = theirs.gated_delta_ops(**args)
    want = {"o": to_torch(o), "state": to_torch(S).mT}

    recurrent, chunk = recurrent_gated_delta_rule, chunk_gated_delta_rule
    if gates == "channel":
        recurrent, chunk = recurrent_kda, chunk_kda
    compare("recurrent", dict(zip(("o", "state"), recurrent(**x), strict=True)), want)
    for C in (1, 16, 64):
        got = dict(zip(("o", "state"), chunk(**x, chunk_size=C), strict=True))
        compare(f"chunk {C}", got, want)


def test_their_layer_call_with_raw_gates(mlx, theirs, random_inputs, compare):
    """gated_delta_update makes beta and g from raw numbers; lower_bound is Kimi K3's second form."""
    x = random_inputs(*SIZES, "channel", True, True)
    z, b = 3 * x.pop("g"), 3 * x.pop("beta") - 1.5
    A_log, dt_bias = torch.tensor([-1.0, 0.5, 2.0]), torch.linspace(-3, 2, 15)
    for lower_bound in (None, -5.0):
        raw = [
            x["q"] * SIZES[3] ** -0.5,
            x["k"],
            x["v"],
            z,
            b,
            A_log.view(3, 1),
            dt_bias.view(3, 5),
        ]
        o, S = theirs.gated_delta_update(
            *(mlx.array(y.numpy()) for y in raw),
            state=mlx.array(x["initial_state"].mT.contiguous().numpy()),
            lower_bound=lower_bound,
        )
        g = kda_log_decay(z, A_log, dt_bias, lower_bound=lower_bound)
        got = chunk_kda(**x, g=g, beta=b.sigmoid(), chunk_size=16)
        want = {"o": to_torch(o), "state": to_torch(S).mT}
        compare(f"lower_bound={lower_bound}", dict(zip(("o", "state"), got, strict=True)), want)

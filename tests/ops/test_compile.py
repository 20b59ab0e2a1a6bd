"""Every fast form is one graph for torch.compile: no loop over positions, no look at values."""

import functools

import pytest
import torch
import torch.nn.functional as F

from gpt2_to_k3 import ops

B, T, H, K = 1, 75, 2, 8
GATES = {
    "softmax": (ops.softmax_attention, ()),
    "flash": (ops.flash_attention, ()),
    "linear": (functools.partial(ops.chunk_linear_attention, normalize=False), ()),
    "gated delta": (ops.chunk_gated_delta_rule, ("g", "beta")),
    "KDA": (ops.chunk_kda, ("g", "beta")),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", GATES)
def test_compiles_to_one_graph_with_the_same_result(name):
    rule, gates = GATES[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, T, H, K, requires_grad=True) for _ in range(3))
    channels = (K,) if name == "KDA" else ()
    x = {"g": F.logsigmoid(torch.randn(B, T, H, *channels)), "beta": torch.rand(B, T, H)}
    x = {gate: x[gate] for gate in gates}

    def first(result):
        return result if isinstance(result, torch.Tensor) else result[0]

    torch.compiler.reset()
    compiled = first(torch.compile(rule, fullgraph=True, backend="aot_eager")(q, k, v, **x))
    plain = first(rule(q, k, v, **x))
    torch.testing.assert_close(compiled, plain)
    gradients = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (compiled, plain)]
    torch.testing.assert_close(*gradients)

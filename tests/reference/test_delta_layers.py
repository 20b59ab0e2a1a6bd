"""GatedDeltaNet and KimiDeltaAttention against transformers' layers.

transformers keeps the three convolutions as one, and A_log of Kimi Linear as [1, 1, H, 1]. Qwen's
layer projects q, k, v and the gate z at once, and b and a at once, in rows that go together with
each head of q and k.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from gpt2_to_k3.layers import GatedDeltaNet, KimiDeltaAttention

D, T = 20, 71  # more than one chunk
# Forward 5e-6, gradients 1e-5, of the largest. A gradient of A_log is a sum that cancels.
CLOSE = dict(loosen=5, floor=1.0)


@pytest.fixture(scope="module")
def transformers():
    try:
        import transformers
        import transformers.models.kimi_linear.modeling_kimi_linear as kimi
        import transformers.models.qwen3_next.modeling_qwen3_next as qwen
    except ImportError:
        pytest.fail("Their layers are missing: pip install transformers", pytrace=False)
    return SimpleNamespace(kimi=kimi, qwen=qwen, DynamicCache=transformers.DynamicCache)


def randomise(module):
    """Weights for which decay, beta and gates differ much from token to token."""
    large = ("b_proj.weight", "in_proj_ba.weight", "conv1d.weight")
    for name, p in module.named_parameters():
        p.data.normal_(std=p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0)
        if name.endswith("dt_bias"):
            p.data.sub_(3)
        if name.endswith(large):
            p.data.mul_(2)
    return module


def gated_delta_net(transformers, H, HV, K, V):
    config = transformers.qwen.Qwen3NextConfig(
        hidden_size=D,
        linear_num_key_heads=H,
        linear_num_value_heads=HV,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    theirs = randomise(transformers.qwen.Qwen3NextGatedDeltaNet(config, layer_idx=0))
    ours = GatedDeltaNet(D, H, K, num_v_heads=HV, head_v_dim=V, norm_eps=config.rms_norm_eps)
    return theirs, ours, config, partial(converted_qwen, H=H, HV=HV, K=K, V=V)


def converted_qwen(weights, H, HV, K, V):
    rows = HV // H
    qkvz = weights["in_proj_qkvz.weight"].unflatten(0, (H, -1))
    q, k, v, z = (w.flatten(0, 1) for w in qkvz.split([K, K, rows * V, rows * V], 1))
    b, a = (w.flatten(0, 1) for w in weights["in_proj_ba.weight"].unflatten(0, (H, -1)).chunk(2, 1))
    q_conv, k_conv, v_conv = weights["conv1d.weight"].split([H * K, H * K, HV * V])
    named = dict(q_proj=q, k_proj=k, v_proj=v, g_proj=z, b_proj=b, a_proj=a)
    named |= dict(q_conv1d=q_conv, k_conv1d=k_conv, v_conv1d=v_conv)
    named |= dict(o_norm=weights["norm.weight"], o_proj=weights["out_proj.weight"])
    named = {f"{name}.weight": w for name, w in named.items()}
    return named | {name: weights[name] for name in ("A_log", "dt_bias")}


def kimi_delta_attention(transformers, H, K):
    config = transformers.kimi.KimiLinearConfig(
        hidden_size=D, linear_num_heads=H, linear_head_dim=K, num_hidden_layers=1
    )
    theirs = randomise(transformers.kimi.KimiLinearDeltaAttention(config, layer_idx=0))
    return theirs, KimiDeltaAttention(D, H, K), config, converted_kimi


def converted_kimi(weights):
    weights = {name.removeprefix("forget_gate."): x for name, x in weights.items()}
    convolutions = weights.pop("conv1d.weight").chunk(3)
    weights |= {f"{n}_conv1d.weight": w for n, w in zip("qkv", convolutions, strict=True)}
    return weights | {"A_log": weights["A_log"].flatten()}


HEADS = [(gated_delta_net, n) for n in [(1, 1, 8, 8), (3, 3, 5, 7), (2, 6, 4, 3), (2, 4, 8, 8)]]
# num_heads * head_dim need not be hidden_size.
HEADS += [(kimi_delta_attention, n) for n in [(1, 8), (3, 5), (4, 8)]]


@pytest.fixture(params=HEADS, ids=lambda case: f"{case[0].__name__} {case[1]}")
def pair(request, transformers):
    """Their layer with random weights, ours with the same, their configuration, our names."""
    make, heads = request.param
    torch.manual_seed(0)
    theirs, ours, config, converted = make(transformers, *heads)
    ours.load_state_dict(converted(theirs.state_dict()))
    return theirs, ours, config, converted


@pytest.fixture
def x():
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 3, 4, 64, 65, T])
def test_one_pass(pair, x, length, compare):
    theirs, ours, *_ = pair
    want = theirs(x[:, :length])
    assert want.std() > 0.1
    compare(f"T={length}", {"y": ours(x[:, :length])}, {"y": want}, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("prefill", [1, 2, 3, 4, 64, 66])
def test_prefill_and_decode(transformers, pair, x, prefill, compare):
    """The same pieces to both, token by token at the end; states and tails as well."""
    theirs, ours, config, _ = pair
    their_cache, cache = transformers.DynamicCache(config=config), ours.init_cache(2)
    pieces = [prefill] + [1] * 5
    got, want = {}, {}
    for i, piece in enumerate(x[:, : sum(pieces)].split(pieces, 1)):
        got[f"y{i}"], want[f"y{i}"] = ours(piece, cache), theirs(piece, their_cache)
    got |= {"S": cache.S, "tails": torch.cat(cache.tails, -1)}
    layer = their_cache.layers[0]
    # They keep four inputs, of which the oldest is never read again.
    want |= {"S": layer.recurrent_states[0], "tails": layer.conv_states[0][..., 1:].mT}
    compare(f"prefill {prefill}", got, want, **CLOSE)


def test_gradients(pair, x, compare):
    theirs, ours, _, converted = pair
    results = []
    for layer in (theirs, ours):
        inputs = x.clone().requires_grad_()
        weigh = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
        (layer(inputs) * weigh).sum().backward()
        results.append({n: p.grad for n, p in layer.named_parameters()} | {"x": inputs.grad})
    want, got = converted(results[0]) | {"x": results[0]["x"]}, results[1]
    assert all(grad.abs().max() > 0 for grad in want.values())
    compare(
        "gradients", *({f"d{n}": g for n, g in grads.items()} for grads in (got, want)), **CLOSE
    )


def test_the_counts_of_weights(pair):
    theirs, ours, *_ = pair
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())

"""GatedDeltaNet against transformers' Qwen3NextGatedDeltaNet.

It projects q, k, v and the gate z at once, and b and a at once, in rows that go together with
each head of q and k.
"""

from types import SimpleNamespace

import pytest
import torch

from gpt2_to_k3.layers import GatedDeltaNet

D, T = 20, 71  # more than one chunk
HEADS = [(1, 1, 8, 8), (3, 3, 5, 7), (2, 6, 4, 3), (2, 4, 8, 8)]  # H, HV, K, V
# Forward 5e-6, gradients 1e-5, of the largest. A gradient of A_log is a sum that cancels.
CLOSE = dict(loosen=5, floor=1.0)


@pytest.fixture(scope="module")
def transformers():
    try:
        import transformers
        import transformers.models.qwen3_next.modeling_qwen3_next as qwen
    except ImportError:
        pytest.fail("Qwen3NextGatedDeltaNet is missing: pip install transformers", pytrace=False)
    return SimpleNamespace(qwen=qwen, DynamicCache=transformers.DynamicCache)


@pytest.fixture(params=HEADS, ids=str)
def pair(request, transformers):
    """Their layer with random weights, ours with the same, and their configuration."""
    H, HV, K, V = request.param
    torch.manual_seed(0)
    config = transformers.qwen.Qwen3NextConfig(
        hidden_size=D,
        linear_num_key_heads=H,
        linear_num_value_heads=HV,
        linear_key_head_dim=K,
        linear_value_head_dim=V,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    theirs = transformers.qwen.Qwen3NextGatedDeltaNet(config, layer_idx=0)
    for name, p in theirs.named_parameters():
        p.data.normal_(std=p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0)
        if name.endswith("dt_bias"):
            p.data.sub_(3)
        if name.endswith(("in_proj_ba.weight", "conv1d.weight")):
            p.data.mul_(2)
    ours = GatedDeltaNet(D, H, K, num_v_heads=HV, head_v_dim=V, norm_eps=config.rms_norm_eps)
    ours.load_state_dict(converted(theirs.state_dict(), H, HV, K, V))
    return theirs, ours, config


def converted(weights, H, HV, K, V):
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


@pytest.fixture
def x():
    return torch.randn(2, T, D, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 3, 4, 64, 65, T])
def test_one_pass(pair, x, length, compare):
    theirs, ours, _ = pair
    want = theirs(x[:, :length])
    assert want.std() > 0.1
    compare(f"T={length}", {"y": ours(x[:, :length])}, {"y": want}, **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("prefill", [1, 2, 3, 4, 64, 66])
def test_prefill_and_decode(transformers, pair, x, prefill, compare):
    """The same pieces to both, token by token at the end; states and tails as well."""
    theirs, ours, config = pair
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
    theirs, ours, config = pair
    results = []
    for layer in (theirs, ours):
        inputs = x.clone().requires_grad_()
        weigh = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
        (layer(inputs) * weigh).sum().backward()
        results.append({n: p.grad for n, p in layer.named_parameters()} | {"x": inputs.grad})
    sizes = (ours.num_heads, ours.num_v_heads, ours.head_dim, ours.head_v_dim)
    want, got = converted(results[0], *sizes) | {"x": results[0]["x"]}, results[1]
    assert all(grad.abs().max() > 0 for grad in want.values())
    compare(
        "gradients", *({f"d{n}": g for n, g in grads.items()} for grads in (got, want)), **CLOSE
    )

"""KimiDeltaAttention against transformers' KimiLinearDeltaAttention, and K3's against mlx-lm's.

transformers keeps A_log as [1, 1, H, 1], and the three convolutions as one.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpt2_to_k3.layers import KimiDeltaAttention

D, T = 20, 71  # more than one chunk
HEADS = [(1, 8), (3, 5), (4, 8)]  # num_heads * head_dim need not be hidden_size
# Forward 5e-6, gradients 1e-5, of the largest. A gradient of A_log is a sum that cancels.
CLOSE = dict(loosen=5, floor=1.0)


@pytest.fixture(scope="module")
def transformers():
    try:
        import transformers
        import transformers.models.kimi_linear.modeling_kimi_linear as kimi
    except ImportError:
        pytest.fail("KimiLinearDeltaAttention is missing: pip install transformers", pytrace=False)
    return SimpleNamespace(kimi=kimi, DynamicCache=transformers.DynamicCache)


def randomise(module):
    """Weights for which decay, beta and gates differ much from token to token."""
    for name, p in module.named_parameters():
        p.data.normal_(std=p.shape[-1] ** -0.5 if p.ndim > 1 else 1.0)
        if name.endswith("dt_bias"):
            p.data.sub_(3)
        if name.endswith(("f_b_proj.weight", "b_proj.weight", "conv1d.weight")):
            p.data.mul_(2)
    return module


@pytest.fixture(params=HEADS, ids=str)
def pair(request, transformers):
    """Their layer with random weights, ours with the same, and their configuration."""
    H, K = request.param
    torch.manual_seed(0)
    config = transformers.kimi.KimiLinearConfig(
        hidden_size=D, linear_num_heads=H, linear_head_dim=K, num_hidden_layers=1
    )
    theirs = randomise(transformers.kimi.KimiLinearDeltaAttention(config, layer_idx=0))
    ours = KimiDeltaAttention(D, H, K)
    ours.load_state_dict(converted(theirs.state_dict()))
    return theirs, ours, config


def converted(weights):
    weights = {name.removeprefix("forget_gate."): x for name, x in weights.items()}
    convolutions = weights.pop("conv1d.weight").chunk(3)
    weights |= {f"{n}_conv1d.weight": w for n, w in zip("qkv", convolutions, strict=True)}
    return weights | {"A_log": weights["A_log"].flatten()}


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
    theirs, ours, _ = pair
    results = []
    for layer in (theirs, ours):
        inputs = x.clone().requires_grad_()
        weigh = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
        (layer(inputs) * weigh).sum().backward()
        results.append({n: p.grad for n, p in layer.named_parameters()} | {"x": inputs.grad})
    want, got = converted(results[0]), results[1]
    assert all(grad.abs().max() > 0 for grad in want.values())
    compare(
        "gradients", *({f"d{n}": g for n, g in grads.items()} for grads in (got, want)), **CLOSE
    )


def test_the_counts_of_weights(pair):
    theirs, ours, _ = pair
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("full_rank", [True, False])
def test_k3_against_mlx(full_rank, compare):
    try:
        import mlx.core as mx
        from mlx_lm.models import kimi_k3
        from mlx_lm.models.cache import ArraysCache
    except ImportError:
        pytest.fail('mlx is missing: pip install "mlx[cpu]" mlx-lm', pytrace=False)
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # that would call a C++ compiler
    H, K = 3, 8
    torch.manual_seed(0)
    ours = KimiDeltaAttention(D, H, K, lower_bound=-5.0, use_full_rank_gate=full_rank)
    weights = {n: p.detach() for n, p in randomise(ours).named_parameters()}
    config = dict(num_heads=H, head_dim=K, short_conv_kernel_size=4)
    config |= dict(gate_lower_bound=-5.0, use_full_rank_gate=full_rank)
    args = kimi_k3.TextArgs(hidden_size=D, linear_attn_config=config)
    theirs = kimi_k3.KimiK3DeltaAttention(args, 0)
    for kind, to in (("proj", "qkv_proj.weight"), ("conv1d", "qkv_conv.conv.weight")):
        joined = torch.cat([weights.pop(f"{n}_{kind}.weight") for n in "qkv"])
        weights[to] = joined.mT if kind == "conv1d" else joined
    theirs.load_weights([(n, mx.array(w.contiguous().numpy())) for n, w in weights.items()])
    theirs.eval()
    x = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(1))
    their_cache, cache = ArraysCache(size=2), ours.init_cache(2)
    with torch.no_grad():
        got = {"y": ours(x)}
        want = {"y": theirs(mx.array(x.numpy()))}
        for i, piece in enumerate(x.split([5, 1, 1, 2], 1)):
            got[f"y{i}"] = ours(piece, cache)
            want[f"y{i}"] = theirs(mx.array(piece.numpy()), cache=their_cache)
    want = {name: torch.from_numpy(np.array(y)) for name, y in want.items()}
    compare("K3", got, want, **CLOSE)

"""The layers of Kimi K3 against those of mlx-lm's kimi_k3, run on the CPU, one by one."""

import numpy as np
import pytest
import torch

from gpt2_to_k3.layers import KimiDeltaAttention, LatentMoE, MultiHeadLatentAttention

B, T, D = 2, 9, 20
PIECES = [5, 1, 1, 2]


def randomised(module):
    """Weights for which decays, gates and the experts chosen differ much from token to token."""
    torch.manual_seed(0)
    for name, x in module.state_dict().items():
        x.normal_(std=x.shape[-1] ** -0.5 if x.ndim > 1 else 1.0)
        if name.endswith("dt_bias"):
            x.sub_(3)
        elif name.endswith("e_score_correction_bias"):
            x.mul_(0.1)
        elif name.endswith(("b_proj.weight", "conv1d.weight")):
            x.mul_(2)
    return module


@pytest.fixture
def x():
    return torch.randn(B, T, D, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def load(mlx):
    """load(theirs, weights) -> a call of theirs, from torch to torch."""

    def make(theirs, weights):
        theirs.load_weights([(n, mlx.array(w.contiguous().numpy())) for n, w in weights.items()])
        theirs.eval()
        return lambda x, **options: torch.from_numpy(
            np.array(theirs(mlx.array(x.numpy()), **options))
        )

    return make


@torch.no_grad()
@pytest.mark.parametrize("full_rank", [True, False])
def test_kda(kimi_k3, load, x, full_rank, compare):
    from mlx_lm.models.cache import ArraysCache

    H, K = 3, 8
    layer = KimiDeltaAttention(D, H, K, lower_bound=-5.0, use_full_rank_gate=full_rank)
    ours, weights = randomised(layer), layer.state_dict()
    for kind, to in (("proj", "qkv_proj.weight"), ("conv1d", "qkv_conv.conv.weight")):
        joined = torch.cat([weights.pop(f"{n}_{kind}.weight") for n in "qkv"])
        weights[to] = joined.mT if kind == "conv1d" else joined
    config = dict(num_heads=H, head_dim=K, short_conv_kernel_size=4)
    config |= dict(gate_lower_bound=-5.0, use_full_rank_gate=full_rank)
    args = kimi_k3.TextArgs(hidden_size=D, linear_attn_config=config)
    theirs = load(kimi_k3.KimiK3DeltaAttention(args, 0), weights)
    their_cache, cache = ArraysCache(size=2), ours.init_cache(B)
    got, want = {"y": ours(x)}, {"y": theirs(x)}
    for i, piece in enumerate(x.split(PIECES, 1)):
        got[f"y{i}"], want[f"y{i}"] = ours(piece, cache), theirs(piece, cache=their_cache)
    compare("KDA", got, want, loosen=5)


@torch.no_grad()
def test_gated_mla(mlx, kimi_k3, load, x, compare):
    from mlx_lm.models.cache import KVCache

    sizes = dict(kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7)
    layer = MultiHeadLatentAttention(D, 5, **sizes, q_lora_rank=9, output_gate=True, n_ctx=16)
    ours, weights = randomised(layer), layer.state_dict()
    W_k, W_v = weights.pop("kv_b_proj.weight").unflatten(0, (5, 13)).split([6, 7], 1)
    weights |= {"embed_q.weight": W_k.mT, "unembed_out.weight": W_v}
    args = kimi_k3.TextArgs(
        hidden_size=D, num_attention_heads=5, q_lora_rank=9, mla_use_output_gate=True, **sizes
    )
    theirs = load(kimi_k3.KimiK3MLAAttention(args), weights)
    their_cache, cache = KVCache(), ours.init_cache(B)
    for piece in x.split(PIECES, 1):
        seen, new = cache.length, piece.shape[1]
        mask = mlx.array(torch.ones(new, seen + new).tril(seen).bool().numpy())
        want = theirs(piece, mask=mask, cache=their_cache)
        assert want.std() > 0.1
        compare(f"MLA after {seen}", {"y": ours(piece, cache)}, {"y": want}, loosen=5)


@torch.no_grad()
def test_latent_moe(kimi_k3, load, compare):
    sizes = dict(num_experts=6, num_shared_experts=2)
    ours = randomised(LatentMoE(D, 5, 3, top_k=2, **sizes))
    weights = {
        n.replace("gate.e_score", "e_score"): w
        for n, w in ours.state_dict().items()
        if not n.startswith("experts.")
    }
    weights |= {f"switch_mlp.{n}.weight": w for n, w in ours.experts.state_dict().items()}
    args = kimi_k3.TextArgs(
        hidden_size=D, rms_norm_eps=1e-5, num_experts_per_token=2, moe_intermediate_size=3,
        routed_expert_hidden_size=5, latent_moe_use_norm=True, activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0, **sizes,
    )  # fmt: skip
    theirs = load(kimi_k3.KimiK3SparseMoE(args), weights)
    x = 3 * torch.randn(B, 50, D, generator=torch.Generator().manual_seed(1))
    compare("experts", {"y": ours(x)}, {"y": theirs(x)}, loosen=5)

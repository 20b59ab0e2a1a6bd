"""KimiK3 before its first token: configuration, counts, initial weights."""

import dataclasses

import pytest
import torch

from gpt2_to_k3.layers import (
    KimiDeltaAttention,
    LatentCache,
    LatentMoE,
    MultiHeadLatentAttention,
    RecurrentCache,
    SiTUGLU,
)
from gpt2_to_k3.models import KimiK3, KimiK3Config
from gpt2_to_k3.models.kimi_k3 import count_parameters

MINI = KimiK3Config.mini()
# Every kind of layer, and MLA with a dense feed-forward; blocks of 2, 2 and 1 layers; no two widths
# equal.
SMALL = KimiK3Config(
    vocab_size=97, n_ctx=80, hidden_size=20, num_hidden_layers=5, full_attn_layers=(1, 4, 5),
    attn_res_block_size=2, linear_num_heads=3, linear_head_dim=8, num_attention_heads=5,
    q_lora_rank=9, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7,
    intermediate_size=37, routed_expert_hidden_size=10, moe_intermediate_size=11, num_experts=12,
    num_experts_per_token=3, num_shared_experts=2,
)  # fmt: skip


def test_the_released_size_counts_as_published():
    config = KimiK3Config.k3()
    assert config == KimiK3Config() and len(config.full_attn_layers) == 24
    with torch.device("meta"):
        model = KimiK3(config)
        cache = model.bfloat16().init_cache(1, capacity=1)
    assert model.num_parameters() == 2_779_484_476_000
    assert count_parameters(config) == {
        "embedding": 163_840 * 7168,
        "KDA": 69 * 443_740_384,
        "MLA": 24 * 232_196_096,
        "dense feed-forward": 726_663_168,
        "routers": 92 * (7168 * 896 + 896),
        "latent projections": 92 * (2 * 7168 * 3584 + 3584),
        "routed experts": 92 * 896 * 33_030_144,
        "shared experts": 92 * 132_120_576,
        "attention residuals": 187 * 2 * 7168,
        "norms": 187 * 7168,
        "head": 163_840 * 7168,
    }
    active = count_parameters(config, active=True)
    assert sum(active.values()) - active["embedding"] == 104_189_612_640
    # 23 times three of KDA and one of MLA, and one more of MLA: 13,824 numbers a token.
    kinds = [type(layer.self_attn) for layer in model.layers]
    KDA, MLA = KimiDeltaAttention, MultiHeadLatentAttention
    assert kinds == 23 * [KDA, KDA, KDA, MLA] + [MLA]
    assert [type(layer.mlp) for layer in model.layers] == [SiTUGLU] + 92 * [LatentMoE]
    assert sum(x.nbytes for x in cache if type(x) is LatentCache) == 2 * 13_824
    assert sum(x.S.numel() for x in cache if type(x) is RecurrentCache) == 108_527_616


@pytest.mark.parametrize(
    "config",
    [MINI, SMALL, dataclasses.replace(SMALL, full_attn_layers=(), first_k_dense_replace=0)],
    ids=["mini", "small", "KDA alone, no dense layer"],
)
def test_every_term_of_the_count_is_the_models(config):
    with torch.device("meta"):
        model = KimiK3(config)
    got = dict.fromkeys(count_parameters(config), 0)
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        got[term(model, name)] += x.numel()
    assert got == count_parameters(config)
    active = count_parameters(config, active=True)
    share = config.num_experts_per_token / config.num_experts
    assert active.pop("routed experts") == got.pop("routed experts") * share
    assert active == got


def term(model, name):
    for part, of in {
        "embed_tokens": "embedding", "lm_head": "head", "_res.": "attention residuals",
        "layernorm.weight": "norms", "mlp.gate.": "routers", "mlp.routed": "latent projections",
        "mlp.experts": "routed experts", "shared_experts": "shared experts",
        ".mlp.": "dense feed-forward",
    }.items():  # fmt: skip
        if part in name and "self_attn." not in name:
            return of
    if name == "norm.weight":
        return "norms"
    layer = model.layers[int(name.split(".")[1])]
    return "KDA" if type(layer.self_attn) is KimiDeltaAttention else "MLA"


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(attn_res_block_size=0), "attn_res_block_size must be an integer >= 1, got 0"),
        (dict(q_lora_rank=None), "q_lora_rank must be an integer >= 1, got None"),
        (dict(full_attn_layers=(3, 6)), "full_attn_layers must be a rising tuple"),
        (dict(num_experts_per_token=13), "num_experts_per_token=13 is more than num_experts=12"),
    ],
)
def test_a_bad_field_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(SMALL, **changes)


def test_the_mini_model_holds_every_kind_of_layer():
    kinds = [(type(layer.self_attn), type(layer.mlp)) for layer in KimiK3(MINI).layers]
    KDA, MLA, MoE = KimiDeltaAttention, MultiHeadLatentAttention, LatentMoE
    assert kinds == [(KDA, SiTUGLU), (KDA, MoE), (KDA, MoE), (MLA, MoE), (MLA, MoE)]


def test_weights_start_finite_and_in_the_published_ranges():
    """C53. The queries at 0 make every mixer a mean; A_log at 0."""
    torch.manual_seed(0)
    model = KimiK3(dataclasses.replace(MINI, hidden_size=64))
    for name, x in model.state_dict().items():
        if name.endswith(("A_log", "query", "e_score_correction_bias")):
            assert (x == 0).all(), name
        elif name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(x)
            assert (dt > 0.999e-3).all() and (dt < 0.1001).all(), name
        elif name.endswith("norm.weight"):
            assert (x == 1).all(), name
        elif "conv1d" in name:
            assert x.abs().max() <= 0.5 and x.std() > 0.2, name
        else:
            off = 5 * x.numel() ** -0.5  # five standard errors of a mean of as many numbers
            assert x.std().item() == pytest.approx(0.02, rel=off), name
            assert x.mean().abs().item() < 0.02 * off, name
    assert model(torch.arange(100)[None]).isfinite().all()

import dataclasses

import pytest
import torch
from model_cases import K3_SMALL, make

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


@torch.no_grad()
def test_layers_read_and_are_read_by_k3s_schedule(tokens):
    """Layer by layer: a block begins before layers 0, 2 and 4; each layer is mixed into twice."""
    model = make(K3_SMALL)
    finished, p = [], model.embed_tokens(tokens)
    for i, layer in enumerate(model.layers):
        h = layer.self_attention_res([*finished, p])
        if i % 2 == 0:
            finished, p = [*finished, p], 0
        p = p + layer.attention(h)
        p = p + layer.feed_forward(layer.mlp_res([*finished, p]))
    assert len(finished) == 3
    want = model.lm_head(model.norm(model.output_attn_res([*finished, p])))
    torch.testing.assert_close(model(tokens), want, rtol=0, atol=1e-11)


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
    "changes, message",
    [
        (dict(attn_res_block_size=0), "attn_res_block_size must be an integer >= 1, got 0"),
        (dict(q_lora_rank=None), "q_lora_rank must be an integer >= 1, got None"),
    ],
)
def test_a_bad_field_of_its_own_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(K3_SMALL, **changes)


def test_the_mini_model_holds_every_kind_of_layer():
    model = KimiK3(KimiK3Config.mini())
    kinds = [(type(layer.self_attn), type(layer.mlp)) for layer in model.layers]
    KDA, MLA, MoE = KimiDeltaAttention, MultiHeadLatentAttention, LatentMoE
    assert kinds == [(KDA, SiTUGLU), (KDA, MoE), (KDA, MoE), (MLA, MoE), (MLA, MoE)]

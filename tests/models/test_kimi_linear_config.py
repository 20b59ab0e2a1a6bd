"""KimiLinear before its first token: configuration, counts, initial weights."""

import dataclasses

import pytest
import torch

from gpt2_to_k3.layers import (
    KimiDeltaAttention,
    MixtureOfExperts,
    MultiHeadLatentAttention,
    SwiGLU,
)
from gpt2_to_k3.models import KimiLinear, KimiLinearConfig
from gpt2_to_k3.models.kimi_linear import count_parameters

MINI = KimiLinearConfig.mini()
# No two widths equal.
SMALL = KimiLinearConfig(
    vocab_size=97, n_ctx=80, hidden_size=20, num_hidden_layers=4, full_attn_layers=(1, 3),
    linear_num_heads=3, linear_head_dim=8, num_attention_heads=5, kv_lora_rank=14,
    qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, intermediate_size=37,
    moe_intermediate_size=11, num_experts=9, num_experts_per_token=3, num_shared_experts=2,
)  # fmt: skip


def test_the_released_size_counts_as_published():
    config = KimiLinearConfig.kimi_linear_48b()
    with torch.device("meta"):
        model = KimiLinear(config)
    terms, active = count_parameters(config), count_parameters(config, active=True)
    assert model.num_parameters() == sum(terms.values()) == 49_122_681_728
    embeddings = terms["embedding"] + terms["head"]
    assert embeddings == 2 * 377_487_360
    assert round((sum(terms.values()) - embeddings) / 1e9, 2) == 48.37
    assert round((sum(active.values()) - embeddings) / 1e9, 2) == 2.73
    assert sum(active.values()) == 3_484_459_904
    kinds = [type(layer.self_attn) for layer in model.layers]
    assert kinds.count(KimiDeltaAttention) == 20 and kinds.count(MultiHeadLatentAttention) == 7
    assert [i + 1 for i, kind in enumerate(kinds) if kind is MultiHeadLatentAttention] == [
        4, 8, 12, 16, 20, 24, 27,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        KimiLinearConfig(),
        MINI,
        SMALL,
        dataclasses.replace(SMALL, full_attn_layers=(), first_k_dense_replace=0),
        dataclasses.replace(SMALL, full_attn_layers=(1, 2, 3, 4), first_k_dense_replace=4),
    ],
    ids=["48b", "mini", "small", "KDA alone, no dense layer", "MLA alone, all dense"],
)
def test_every_term_of_the_count_is_the_models(config):
    with torch.device("meta"):
        model = KimiLinear(config)
    got = dict.fromkeys(count_parameters(config), 0)
    kinds = {KimiDeltaAttention: "KDA", MultiHeadLatentAttention: "MLA"}
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        if name.startswith(("embed_tokens", "lm_head")):
            term = "embedding" if name.startswith("embed") else "head"
        elif name == "norm.weight" or "layernorm" in name.split(".")[2]:
            term = "norms"
        else:
            layer = model.layers[int(name.split(".")[1])]
            if ".self_attn." in name:
                term = kinds[type(layer.self_attn)]
            elif type(layer.mlp) is SwiGLU:
                term = "dense feed-forward"
            else:
                part = name.split(".")[3]
                term = {"gate": "routers", "experts": "routed experts"}.get(part, "shared experts")
        got[term] += x.numel()
    assert got == count_parameters(config)
    active = count_parameters(config, active=True)
    share = config.num_experts_per_token / config.num_experts
    assert active.pop("routed experts") == got.pop("routed experts") * share
    assert active == got


def test_the_default_config_is_the_released_model():
    assert KimiLinearConfig() == KimiLinearConfig.kimi_linear_48b()
    hash(KimiLinearConfig())


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(hidden_size=0), "hidden_size must be an integer >= 1, got 0"),
        (dict(num_experts=8.0), "num_experts must be an integer >= 1, got 8.0"),
        (dict(vocab_size=True), "vocab_size must be an integer >= 1, got True"),
        (dict(num_shared_experts=0), "num_shared_experts must be an integer >= 1, got 0"),
        (dict(first_k_dense_replace=-1), "first_k_dense_replace must be an integer >= 0, got -1"),
        (dict(first_k_dense_replace=5), "first_k_dense_replace=5 is more than num_hidden_layers=4"),
        (dict(full_attn_layers=(0, 3)), r"full_attn_layers must be .* from 1 to 4, got \(0, 3\)"),
        (dict(full_attn_layers=(3, 5)), r"full_attn_layers must be .* from 1 to 4, got \(3, 5\)"),
        (dict(full_attn_layers=(3, 1)), r"full_attn_layers must be a rising tuple .*got \(3, 1\)"),
        (dict(full_attn_layers=(3, 3)), r"full_attn_layers must be a rising tuple .*got \(3, 3\)"),
        (dict(full_attn_layers=[3]), r"full_attn_layers must be a rising tuple .*got \[3\]"),
        (dict(num_experts_per_token=10), "num_experts_per_token=10 is more than num_experts=9"),
        (dict(routed_scaling_factor=0.0), "routed_scaling_factor must be finite and > 0, got 0.0"),
        (dict(routed_scaling_factor=float("nan")), "routed_scaling_factor must be .*got nan"),
    ],
)
def test_a_bad_field_is_named(changes, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(SMALL, **changes)


def test_layers_are_of_the_kinds_that_the_config_says():
    with torch.device("meta"):
        model = KimiLinear(SMALL)
    kinds = [(type(layer.self_attn), type(layer.mlp)) for layer in model.layers]
    KDA, MLA, MoE = KimiDeltaAttention, MultiHeadLatentAttention, MixtureOfExperts
    assert kinds == [(MLA, SwiGLU), (KDA, MoE), (MLA, MoE), (KDA, MoE)]
    kinds = [(type(layer.self_attn), type(layer.mlp)) for layer in KimiLinear(MINI).layers]
    assert kinds == [(KDA, SwiGLU), (KDA, MoE), (KDA, MoE), (MLA, MoE)]


def test_weights_start_finite_and_in_the_published_ranges():
    """C53: the same weights from the same seed, whatever was in memory before."""
    config = dataclasses.replace(MINI, hidden_size=64)
    states = []
    for _ in range(2):
        junk = [torch.full((1 << n,), torch.nan) for n in range(4, 20)]
        del junk
        torch.manual_seed(0)
        states.append(KimiLinear(config).state_dict())
    for name, x in states[0].items():
        assert x.isfinite().all() and torch.equal(x, states[1][name]), name
        if name.endswith("A_log"):
            assert (x >= 0).all() and (x.exp() <= 16.001).all(), name
        elif name.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(x)
            assert (dt > 0.999e-3).all() and (dt < 0.1001).all(), name
        elif name.endswith("e_score_correction_bias"):
            assert (x == 0).all(), name
        elif name.endswith("norm.weight"):
            assert (x == 1).all(), name
        elif "conv1d" in name:
            assert x.abs().max() <= 0.5 and x.std() > 0.2, name
        else:
            off = 5 * x.numel() ** -0.5  # five standard errors of a mean of as many numbers
            assert x.std().item() == pytest.approx(0.02, rel=off), name
            assert x.mean().abs().item() < 0.02 * off, name

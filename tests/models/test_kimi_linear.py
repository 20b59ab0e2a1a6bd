import dataclasses

import pytest
import torch
from model_cases import LINEAR_SMALL

from gpt2_to_k3.layers import (
    KimiDeltaAttention,
    MixtureOfExperts,
    MultiHeadLatentAttention,
    RecurrentCache,
    SwiGLU,
)
from gpt2_to_k3.models import KimiLinear, KimiLinearConfig
from gpt2_to_k3.models.kimi_linear import count_parameters


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


def test_a_token_of_the_released_model_takes_4032_numbers():
    with torch.device("meta"):
        model = KimiLinear(KimiLinearConfig()).bfloat16()
    one, two = (model.init_cache(1, capacity=n) for n in (1, 2))
    grown = [b.nbytes - a.nbytes for a, b in zip(one, two, strict=True)]
    assert sum(grown) == 4032 * 2 and grown.count(576 * 2) == 7 and grown.count(0) == 20
    states = sum(layer.S.nbytes for layer in one if type(layer) is RecurrentCache)
    assert states == 20 * 32 * 128 * 128 * 4


def test_the_default_config_is_the_released_model():
    assert KimiLinearConfig() == KimiLinearConfig.kimi_linear_48b()
    hash(KimiLinearConfig())


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_a_bad_scaling_factor_is_named(bad):
    message = f"^routed_scaling_factor must be finite and > 0, got {bad}"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LINEAR_SMALL, routed_scaling_factor=bad)


def test_layers_are_of_the_kinds_that_the_config_says():
    with torch.device("meta"):
        model = KimiLinear(LINEAR_SMALL)
    kinds = [(type(layer.self_attn), type(layer.mlp)) for layer in model.layers]
    KDA, MLA, MoE = KimiDeltaAttention, MultiHeadLatentAttention, MixtureOfExperts
    assert kinds == [(MLA, SwiGLU), (KDA, MoE), (MLA, MoE), (KDA, MoE)]
    mini = KimiLinear(KimiLinearConfig.mini())
    kinds = [(type(layer.self_attn), type(layer.mlp)) for layer in mini.layers]
    assert kinds == [(KDA, SwiGLU), (KDA, MoE), (KDA, MoE), (MLA, MoE)]

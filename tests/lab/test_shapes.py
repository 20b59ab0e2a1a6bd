"""What a bill knows of a model, against the models' weights and caches, and published figures."""

import dataclasses
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt2_to_k3.lab import ModelShape, costs
from gpt2_to_k3.lab.shapes import Experts, GrowingLayers, StateLayers
from gpt2_to_k3.layers import RecurrentCache
from gpt2_to_k3.models import (
    GPT2,
    GPT2Config,
    KimiK3,
    KimiK3Config,
    KimiLinear,
    KimiLinearConfig,
)

LINEAR, K3 = ModelShape.kimi(KimiLinearConfig()), ModelShape.kimi(KimiK3Config())
LLAMA = dict(
    layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, ffn_width=14336, vocabulary=128256
)


@pytest.mark.parametrize(
    "shape, model, config",
    [
        (ModelShape.gpt2, GPT2, GPT2Config.gpt2_xl()),
        (ModelShape.kimi, KimiLinear, KimiLinearConfig()),
        (ModelShape.kimi, KimiLinear, KimiLinearConfig.mini()),
        (ModelShape.kimi, KimiK3, KimiK3Config()),
        (ModelShape.kimi, KimiK3, KimiK3Config.mini()),
    ],
)
@pytest.mark.parametrize("tokens", [1, 60])
def test_weights_and_cache_are_those_of_the_model(shape, model, config, tokens):
    shape = shape(config)
    with torch.device("meta"):
        model = model(config).bfloat16()
    experts = shape.experts.layers * shape.experts.number * shape.experts.weights
    assert model.num_parameters() == shape.dense_weights + shape.lookup_weights + experts
    caches = model.init_cache(1, capacity=tokens)
    # the tails of the convolutions, in 16 bits: the bill leaves them out
    tails = sum(t.nbytes for c in caches if isinstance(c, RecurrentCache) for t in c.tails)
    assert sum(c.nbytes for c in caches) - tails == costs.kept_bytes(shape, tokens)
    if shape is LINEAR:
        assert tails == 20 * 3 * 4096 * 3 * 2


def test_kimi_linear_as_published():
    mla = LINEAR.all_growing()
    assert LINEAR.growing.layers * LINEAR.growing.cache_numbers == 4_032
    assert costs.cache_bytes(LINEAR, 1) == 8_064 and costs.cache_bytes(mla, 1) == 31_104
    assert round(costs.state_bytes(LINEAR) / 1e6, 1) == 41.9
    assert costs.break_even_tokens(LINEAR, mla) == 1_821
    assert LINEAR.active_weights - LINEAR.head_weights == 2_729_485_184
    assert round(LINEAR.active_weights / 1e9, 3) == 3.107


def test_kimi_k3_as_published():
    mla = K3.all_growing()
    assert K3.growing.layers * K3.growing.cache_numbers == 13_824
    assert costs.cache_bytes(K3, 1) == 27_648
    assert round(costs.cache_bytes(K3, 2**20) / 1e9, 1) == 29.0
    assert round(costs.cache_bytes(mla, 2**20) / 1e9, 1) == 112.3
    assert round(costs.state_bytes(K3) / 1e6, 1) == 434.1
    assert costs.layer_state_bytes(K3) / 4 / K3.growing.cache_numbers == 96 * 128**2 / 576
    assert round(K3.active_weights / 1e9, 2) == 104.19
    experts = K3.experts.weights * K3.bytes_per_expert_weight
    assert round(experts / 1e6, 2) == 17.55
    assert round(experts * K3.experts.layers * K3.experts.number / 1e12, 3) == 1.446


def test_mixing_of_another_kind_changes_the_mixing_alone():
    """performance.md, section 6: 1, 4 and 16 KiB a layer and token, for 512, 8 and 32 heads."""
    config = KimiLinearConfig()
    for mixing, layer_bytes in [("MLA", 1152), ("GQA", 4096), ("MHA", 16384)]:
        shape = ModelShape.kimi(config, mixing=mixing)
        assert costs.layer_cache_bytes(shape, 1) == layer_bytes
        assert (shape.growing.layers, shape.state.layers) == (27, 0)
        assert shape.name == f"Kimi Linear, all {mixing}"
        same = dict(name="x", growing=LINEAR.growing, state=LINEAR.state)
        assert replace(shape, **same) == replace(LINEAR, **same)
    mla = ModelShape.kimi(config, mixing="MLA", name=LINEAR.name)
    assert mla == LINEAR.all_growing() and LINEAR.all_growing().with_growing(7) == LINEAR
    mha, gqa = (ModelShape.kimi(config, mixing=m).growing for m in ("MHA", "GQA"))
    assert mha.weights == 4 * 2304 * 4096
    assert gqa.weights == 2 * 2304 * 4096 + 2 * 2304 * 8 * 128
    assert gqa.decode_flops == mha.decode_flops == gqa.prefill_flops == 4 * 4096
    assert ModelShape.kimi(config, mixing="GQA", kv_heads=32).growing == replace(mha, kind="GQA")


def test_a_dense_model_of_the_hybrid_kind_has_no_experts():
    shape = ModelShape.kimi(replace(KimiLinearConfig.mini(), first_k_dense_replace=4))
    assert shape.experts == Experts() and shape.active_weights == shape.dense_weights


def test_own_numbers_make_llama_3_8b():
    """8.03B parameters, and 128 KiB a token."""
    shape = ModelShape.own(**LLAMA)
    assert shape.growing.kind == "GQA" and costs.cache_bytes(shape, 1) == 131_072
    assert round((shape.dense_weights + shape.lookup_weights) / 1e9, 2) == 8.03
    mha = ModelShape.own(**LLAMA | dict(kv_heads=32))
    assert mha.growing.kind == "MHA" and costs.cache_bytes(mha, 1) == 4 * 131_072
    kda = shape.with_growing(8)
    assert kda.state.layers == 24 and costs.layer_state_bytes(kda) == 4 * 32 * 128**2
    assert kda.state.weights == mha.growing.weights and kda.weights == shape.weights


def test_gpt2_keeps_the_numbers_of_chapter_2():
    config = GPT2Config.gpt2()
    for number_bytes in (2, 4):
        shape = ModelShape.gpt2(config, number_bytes=number_bytes)
        assert shape.dense_weights == costs.matmul_weights(config)
        assert costs.cache_bytes(shape, 7) == 7 * costs.kv_bytes_per_token(config, number_bytes)
        read = number_bytes * costs.matmul_weights(config) + 3 * costs.cache_bytes(shape, 7)
        assert costs.decode_read_bytes(shape, 7, batch=3) == read
    assert shape.with_growing(0).state.state_numbers == costs.state_numbers(config) // 12
    own = ModelShape.own(
        layers=12, width=768, heads=12, kv_heads=12, head_dim=64, ffn_width=2048, vocabulary=50257
    )
    assert (own.growing, own.state) == (shape.growing, shape.state)
    assert own.dense_weights == costs.matmul_weights(config)  # three of 2048, two of 3072
    for tokens in costs.CONTEXTS:
        assert costs.decode_flops(shape, tokens) == costs.forward_flops(config, 1, tokens - 1)


@given(st.sampled_from([LINEAR, K3, ModelShape.own(**LLAMA)]), st.data())
def test_a_mix_lies_between_its_parts(shape, data):
    n, L = data.draw(st.integers(0, shape.layers)), shape.layers
    tokens, batch = data.draw(st.integers(1, 2**24)), data.draw(st.integers(1, 10**5))
    mix, growing, state = (shape.with_growing(k) for k in (n, L, 0))
    for cost in (
        lambda s: costs.kept_bytes(s, tokens),
        lambda s: costs.weight_bytes(s),
        lambda s: costs.decode_flops(s, tokens, batch),
        lambda s: costs.prefill_flops(s, tokens, batch),
    ):
        assert L * cost(mix) == n * cost(growing) + (L - n) * cost(state)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "8", None, float("nan"), 10**15 + 1])
@pytest.mark.parametrize("name", [n for n in LLAMA if n != "layers"])
def test_own_numbers_are_checked(name, bad):
    with pytest.raises(ValueError, match=f"^{name}: expected a whole number from 1 to .*got"):
        ModelShape.own(**LLAMA | {name: bad})


PART = dict(kind="x", layers=1, weights=1, decode_flops=1, prefill_flops=1)
GROWING = GrowingLayers(cache_numbers=1, **PART)
STATE = StateLayers(state_numbers=1, **PART)
WHOLE = dict(name="x", growing=GROWING, state=STATE, weights=1, head_weights=1, lookup_weights=1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ModelShape.own(**LLAMA | dict(kv_heads=5)), "heads: expected a multiple of kv_h"),
        (lambda: ModelShape.own(**LLAMA | dict(layers=0)), "layers: expected at least one, grow"),
        (lambda: ModelShape.own(**LLAMA | dict(layers=-1)), "growing layers: .*from 0 .*got -1"),
        (lambda: ModelShape.own(**LLAMA | dict(width=10**14)), "growing weights: expected"),
        (lambda: ModelShape.kimi(KimiLinearConfig(), mixing="SSM"), "mixing: .*'MHA', got 'SSM'"),
        (lambda: ModelShape.kimi(KimiLinearConfig(), mixing="GQA", kv_heads=5), "heads: "),
        (lambda: LINEAR.with_growing(28), "growing layers: .* from 0 to 27, got 28"),
        (lambda: LINEAR.with_growing(-1), "growing layers: .* got -1"),
        (lambda: LINEAR.with_growing(1.5), "growing layers: .* got 1.5"),
        (lambda: replace(GROWING, cache_numbers=0), "growing cache_numbers: .*from 1"),
        (lambda: replace(GROWING, expand_flops=-1), "growing expand_flops: .*from 0"),
        (lambda: replace(STATE, state_numbers=0), "state state_numbers: .*from 1"),
        (lambda: replace(STATE, layers=True), "state layers: .*got True"),
        (lambda: Experts(1, 8, 9, 5), "experts' per_token: expected at most number=8, got 9"),
        (lambda: Experts(1, 0, 1, 5), "experts' number: "),
        (lambda: ModelShape(**WHOLE | dict(weights=-1)), "weights: expected .*got -1"),
        (lambda: ModelShape(**WHOLE, bytes_per_weight=0), "bytes_per_weight: .* > 0, got 0"),
        (lambda: ModelShape(**WHOLE, bytes_per_cache_number=True), "bytes_per_cache_number: "),
        (lambda: ModelShape(**WHOLE, bytes_per_state_number=float("inf")), "got inf"),
        (lambda: ModelShape(**WHOLE, bytes_per_expert_weight=float("nan")), "got nan"),
    ],
)
def test_impossible_shapes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_shape_is_a_value():
    assert ModelShape(**WHOLE) == ModelShape(**WHOLE) and hash(LINEAR) == hash(replace(LINEAR))
    with pytest.raises(dataclasses.FrozenInstanceError):
        LINEAR.weights = 1

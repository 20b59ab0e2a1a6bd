"""The price formulas, against real tensors, PyTorch's FLOP counter, and figures by hand."""

import math
from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from gpt2_to_k3.lab import ModelShape, costs
from gpt2_to_k3.lab.shapes import Experts
from gpt2_to_k3.models import GPT2, GPT2Config, KimiK3Config, KimiLinear, KimiLinearConfig

LINEAR, K3 = ModelShape.kimi(KimiLinearConfig()), ModelShape.kimi(KimiK3Config())
# Four layers of performance.md's section 6: the latent without its shared part.
MACROCYCLE = replace(
    LINEAR, growing=replace(LINEAR.growing, layers=1, cache_numbers=512),
    state=replace(LINEAR.state, layers=3),
)  # fmt: skip
DEVICE = costs.Device("d", 4.0e12, 7.0e14, 150 * 10**9)
SMALL = GPT2Config(vocab_size=101, n_ctx=40, n_embd=30, n_layer=3, n_head=5)


def flops(step):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


@pytest.mark.parametrize("new, past", [(2, 0), (7, 0), (1, 12), (5, 11)])
def test_flops_are_those_that_pytorch_counts(new, past):
    model, cache = GPT2(SMALL), None
    if past:
        cache = model.init_cache(1)
        with torch.no_grad():
            model(torch.zeros(1, past, dtype=torch.int64), cache)
    tokens = torch.zeros(1, new, dtype=torch.int64)
    counted = flops(lambda: model(tokens, cache))
    assert counted == costs.forward_flops(SMALL, new, past, logit_rows=new)


def test_generation_computes_one_row_of_logits():
    model, tokens = GPT2(SMALL), torch.zeros(1, 9, dtype=torch.int64)
    counted = flops(lambda: model.generate(tokens, 1, use_cache=False))
    assert counted == costs.forward_flops(SMALL, new=9, logit_rows=1)


def test_cache_bytes_are_those_of_a_real_cache():
    cache = GPT2(SMALL).half().init_cache(batch_size=3, capacity=17)
    assert sum(c.nbytes for c in cache) == 3 * 17 * costs.kv_bytes_per_token(SMALL)


def test_weights_are_those_of_the_model_less_vectors_and_positions():
    model = GPT2(SMALL)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert costs.matmul_weights(SMALL) == matrices - model.wpe.weight.numel()


def test_gpt2_small_by_hand():
    gpt2 = GPT2Config.gpt2()
    assert costs.kv_bytes_per_token(gpt2) == 36_864
    assert costs.matmul_weights(gpt2) == 123_532_032


def test_roofline_is_the_slower_of_reading_and_computing():
    device = costs.Device("d", read_bytes_per_second=10, flops_per_second=100, memory_bytes=0)
    assert costs.roofline_seconds(20, 100, device) == 2
    assert costs.roofline_seconds(20, 1000, device) == 10


def test_h200_comes_from_its_record():
    device = costs.Device.h200()
    assert "H200" in device.name and 3e12 < device.read_bytes_per_second < 4.8e12
    assert 4e14 < device.flops_per_second < 1e15


@pytest.mark.parametrize(
    "tokens, saved", [(4, 37.5), (16, 65.6), (32, 70.3), (64, 72.7), (128, 73.8), (1024, 74.9)]
)
def test_what_the_hybrid_saves(tokens, saved):
    all_mla = MACROCYCLE.all_growing()

    def saving(hybrid):
        kept = costs.kept_bytes(hybrid, tokens * 1024) / costs.kept_bytes(all_mla, tokens * 1024)
        return round(100 * (1 - kept), 1)

    assert saving(MACROCYCLE) == saved
    if tokens == 4:
        assert saving(replace(MACROCYCLE, bytes_per_state_number=2)) == 56.2  # 56.25


def test_bytes_of_the_macrocycle_and_its_break_even():
    all_mla = MACROCYCLE.all_growing()
    assert costs.cache_bytes(MACROCYCLE, 1) == 1024 and costs.cache_bytes(all_mla, 1) == 4096
    assert round(costs.state_bytes(MACROCYCLE) / 1e6, 1) == 6.3
    for tokens, sign in [(2047, 1), (2048, 0), (2049, -1)]:
        more = costs.kept_bytes(MACROCYCLE, tokens) - costs.kept_bytes(all_mla, tokens)
        assert (more > 0) - (more < 0) == sign
    assert costs.break_even_tokens(MACROCYCLE, all_mla) == 2049
    assert costs.break_even_tokens(all_mla, MACROCYCLE) == math.inf
    assert costs.break_even_tokens(all_mla, all_mla) == math.inf
    assert costs.break_even_tokens(all_mla, ModelShape.kimi(KimiLinearConfig(), "", "MHA")) == 1


@given(st.integers(1, 2**24), st.integers(1, 2**24), st.integers(1, 999), st.integers(1, 999))
def test_costs_are_linear_in_tokens_and_in_sequences(a, b, m, n):
    for shape in (LINEAR, K3.all_growing()):
        assert costs.cache_bytes(shape, a + b) == sum(costs.cache_bytes(shape, t) for t in (a, b))
        kept = costs.kept_bytes(shape, a)
        assert kept - costs.cache_bytes(shape, a) == costs.state_bytes(shape)
        read, weights = costs.decode_read_bytes(shape, a, m), costs.weight_read_bytes(shape, m)
        assert read == weights + m * kept
        together = costs.decode_flops(shape, a, m) + costs.decode_flops(shape, a, n)
        assert costs.decode_flops(shape, a, m + n) == together
        # a prompt in two parts: what it computes again is the keys and values of the first
        parts = costs.prefill_flops(shape, a) + costs.prefill_flops(shape, b, past=a)
        again = shape.growing.layers * a * shape.growing.expand_flops + 2 * shape.head_weights
        assert parts - costs.prefill_flops(shape, a + b) == again


@pytest.mark.parametrize("E, k, rows", [(4, 2, 2), (3, 1, 4), (4, 3, 2), (2, 2, 3)])
def test_expected_experts_are_those_of_all_equally_likely_choices(E, k, rows):
    experts = Experts(layers=1, number=E, per_token=k, weights=1)
    shape = replace(LINEAR, experts=experts, bytes_per_expert_weight=1)
    choices = list(product(combinations(range(E), k), repeat=rows))
    mean = sum(len({e for row in choice for e in row}) for choice in choices) / len(choices)
    dense = shape.dense_weights * shape.bytes_per_weight
    assert costs.weight_read_bytes(shape, rows) - dense == pytest.approx(mean, rel=1e-6)


def test_a_token_reads_the_experts_it_uses_and_a_crowd_all():
    for shape in (LINEAR, K3):
        e, dense = shape.experts, 2 * shape.dense_weights
        one = e.layers * e.weights * shape.bytes_per_expert_weight
        assert costs.weight_read_bytes(shape, 1) == pytest.approx(dense + e.per_token * one)
        everything = costs.weight_bytes(shape) - 2 * shape.lookup_weights
        assert costs.weight_read_bytes(shape, 10**6) == pytest.approx(everything)


def multiplied_vectors(model):
    """What count_parameters counts, and the FLOP counter does not: norms, convolutions, biases."""
    vectors = [p for n, p in model.named_parameters() if p.ndim == 1 or "conv" in n]
    return sum(p.numel() for p in [*vectors, *model.buffers()])


@pytest.mark.parametrize("full", [(4,), (1, 2, 3, 4)])
@pytest.mark.parametrize("past", [1, 2, 12])  # products over one token are not counted
def test_a_decode_step_of_kimi_linear_computes_what_pytorch_counts(full, past):
    config = replace(KimiLinearConfig.mini(), full_attn_layers=full)
    model, shape, batch = KimiLinear(config), ModelShape.kimi(config), 3
    cache, token = model.init_cache(batch), torch.zeros(batch, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(past):
            model(token, cache)
    counted = flops(lambda: model(token, cache))
    # of 7 FLOPs a number of the state the counter sees the 4 in k S and q S
    unseen = 2 * multiplied_vectors(model) + 3 * shape.state.layers * shape.state.state_numbers
    assert costs.decode_flops(shape, past + 1, batch) == counted + batch * unseen


@pytest.mark.parametrize("new, past", [(2, 0), (9, 0), (9, 5)])
def test_a_prompt_computes_what_pytorch_counts_but_for_hidden_pairs(new, past):
    config = replace(KimiLinearConfig.mini(), full_attn_layers=(1, 2, 3, 4))
    latent, gpt2 = KimiLinear(config), GPT2(SMALL)
    for model, shape in ((latent, ModelShape.kimi(config)), (gpt2, ModelShape.gpt2(SMALL))):
        cache = model.init_cache(1)
        prompt = torch.zeros(1, past + new, dtype=torch.int64)
        with torch.no_grad():
            model(prompt[:, :past], cache)
        counted = flops(lambda m=model, c=cache, p=prompt: m.head(m.hidden(p[:, past:], c)[:, -1:]))
        vectors = multiplied_vectors(model) if model is latent else 0
        hidden = new * (past + new) - new * past - new * (new + 1) // 2
        hidden *= shape.growing.layers * shape.growing.prefill_flops
        assert costs.prefill_flops(shape, new, past) == counted + 2 * new * vectors - hidden


@pytest.mark.parametrize("T, ratio", [(512, 1.03), (4096, 8.3), (2**20, 2114)])
def test_attention_against_kda_in_a_prompt(T, ratio):
    """Kimi Linear, eq. 13 and 14: 2 T^2 d to 6 T d^2 + 3 T C d + T C^2 a head."""
    mha = ModelShape.kimi(KimiLinearConfig(), mixing="MHA")
    attention = T * (T + 1) / 2 * mha.growing.prefill_flops
    assert attention / (T * mha.state.prefill_flops) == pytest.approx(ratio, rel=5e-3)

"""The price formulas, against real tensors, PyTorch's own FLOP counter, and figures worked out by hand."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpt2_to_k3.lab import costs
from gpt2_to_k3.layers import KimiDeltaAttention, MultiHeadLatentAttention
from gpt2_to_k3.models import GPT2, GPT2Config

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


def test_reads_share_weights_over_a_batch_but_not_caches():
    one, many = (costs.decode_read_bytes(SMALL, 10, batch=b) for b in (1, 5))
    weights = 2 * costs.matmul_weights(SMALL)
    assert many - weights == 5 * (one - weights) and one > weights


@pytest.mark.parametrize(
    "spare, batch", [(-1, 0), (0, 0), (1_799_999, 0), (1_800_000, 1), (5_400_001, 3)]
)
def test_largest_batch_fills_memory_and_no_more(spare, batch):
    config = GPT2Config(vocab_size=2, n_ctx=1, n_embd=30, n_layer=3, n_head=1)
    tokens = 1_800_000 // costs.kv_bytes_per_token(config)
    assert costs.largest_batch(config, tokens, 2 * costs.matmul_weights(config) + spare) == batch


def test_roofline_is_the_slower_of_reading_and_computing():
    device = costs.Device("d", read_bytes_per_second=10, flops_per_second=100, memory_bytes=0)
    assert costs.roofline_seconds(20, 100, device) == 2
    assert costs.roofline_seconds(20, 1000, device) == 10


def test_h200_comes_from_its_record():
    device = costs.Device.h200()
    assert "H200" in device.name and 3e12 < device.read_bytes_per_second < 4.8e12
    assert 4e14 < device.flops_per_second < 1e15


def test_ladder_costs_agree_with_the_functions_behind_them():
    before, after = costs.LADDER["no cache"], costs.LADDER["kv cache"]
    for tokens in costs.CONTEXTS:
        assert before.state_bytes(SMALL, tokens) == 0
        assert after.state_bytes(SMALL, tokens) == tokens * 2 * 3 * 30 * 2
        assert after.read_bytes(SMALL, tokens) - before.read_bytes(SMALL, tokens) == tokens * 360
        assert before.flops(SMALL, tokens) > after.flops(SMALL, tokens) * tokens / 2


def test_flash_attention_changes_nothing_for_one_token():
    cache, flash = costs.LADDER["kv cache"], costs.LADDER["flash"]
    for cost in ("state_bytes", "read_bytes", "flops"):
        assert getattr(flash, cost)(SMALL, 77) == getattr(cache, cost)(SMALL, 77)


# What one step of each rule computes with its K x V state, as PyTorch counts matrix products.
STEPS = {
    "linear": lambda q, k, v, S: (k.mT @ v, q @ S),
    "delta": lambda q, k, v, S: (k @ S, k.mT @ v, q @ S),
}


@pytest.mark.parametrize("stage", ["linear", "delta", "gated delta", "kda"])
def test_a_fixed_state_costs_the_same_at_any_length(stage):
    rung, weights = costs.LADDER[stage], costs.matmul_weights(SMALL)
    numbers = 3 * 5 * 6 * 6  # layers, heads, K, V
    if stage == "linear":
        numbers += 3 * 5 * 6  # z
    for tokens in (1, *costs.CONTEXTS):
        assert rung.state_bytes(SMALL, tokens) == 4 * numbers
        assert rung.read_bytes(SMALL, tokens) == 2 * weights + 4 * numbers
    q, k, v, S = (
        torch.randn(15, 1, 6),
        torch.randn(15, 1, 6),
        torch.randn(15, 1, 6),
        torch.randn(15, 6, 6),
    )
    if stage in STEPS:
        per_number = flops(lambda: STEPS[stage](q, k, v, S)) / (15 * 36)
    else:  # the decay is one product more, which the counter leaves out
        per_number = flops(lambda: STEPS["delta"](q, k, v, S)) / (15 * 36) + 1
    assert rung.flops(SMALL, 1) - 2 * weights == per_number * numbers


def test_the_state_of_a_kda_layer_is_the_state_that_is_priced():
    layer = KimiDeltaAttention(SMALL.n_embd, SMALL.n_head, SMALL.n_embd // SMALL.n_head)
    assert layer.init_cache(1).S.nbytes * SMALL.n_layer == costs.LADDER["kda"].state_bytes(SMALL, 1)


def test_the_latent_cache_is_the_one_that_is_priced():
    K, tokens = SMALL.n_embd // SMALL.n_head, 12  # K = 6: a latent of 24 and a shared part of 3
    layer = MultiHeadLatentAttention(
        SMALL.n_embd, SMALL.n_head, kv_lora_rank=4 * K, qk_nope_head_dim=K,
        qk_rope_head_dim=K // 2, v_head_dim=K, n_ctx=tokens,
    )  # fmt: skip
    rung, weights = costs.LADDER["mla"], 2 * costs.matmul_weights(SMALL)
    kept = layer.init_cache(1).nbytes * SMALL.n_layer // 2  # 16 bits
    assert rung.state_bytes(SMALL, tokens) == kept
    assert rung.read_bytes(SMALL, tokens) == weights + kept
    q, rows = layer.project(torch.zeros(1, tokens, SMALL.n_embd))
    step, empty = (flops(lambda n=n: layer.absorbed(q[:, -1:], rows[:, :n])) for n in (tokens, 0))
    assert rung.flops(SMALL, tokens) - weights == SMALL.n_layer * (step - empty)


def test_kimi_linear_is_three_parts_kda_and_one_part_mla():
    config = GPT2Config(vocab_size=101, n_ctx=40, n_embd=30, n_layer=4, n_head=5)
    one = GPT2Config(vocab_size=101, n_ctx=40, n_embd=30, n_layer=1, n_head=5)
    kda, mla, both = (costs.LADDER[key] for key in ("kda", "mla", "kimi linear"))
    kept = 3 * kda.state_bytes(one, 77) + mla.state_bytes(one, 77)
    assert both.state_bytes(config, 77) == kept
    assert both.read_bytes(config, 77) == 2 * costs.matmul_weights(config) + kept
    work = 3 * kda.flops(one, 77) + mla.flops(one, 77) - 4 * 2 * costs.matmul_weights(one)
    assert both.flops(config, 77) == 2 * costs.matmul_weights(config) + work

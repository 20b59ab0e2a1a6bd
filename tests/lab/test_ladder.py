"""The ladder's costs, against the tensors and the FLOPs of the layers that its stages stand for."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpt2_to_k3.lab import costs
from gpt2_to_k3.lab.ladder import LADDER
from gpt2_to_k3.layers import KimiDeltaAttention, MultiHeadLatentAttention
from gpt2_to_k3.models import GPT2Config

SMALL = GPT2Config(vocab_size=101, n_ctx=40, n_embd=30, n_layer=3, n_head=5)


def flops(step):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def test_ladder_costs_agree_with_the_functions_behind_them():
    before, after = LADDER["no cache"], LADDER["kv cache"]
    for tokens in costs.CONTEXTS:
        assert before.state_bytes(SMALL, tokens) == 0
        assert after.state_bytes(SMALL, tokens) == tokens * 2 * 3 * 30 * 2
        assert after.read_bytes(SMALL, tokens) - before.read_bytes(SMALL, tokens) == tokens * 360
        assert before.flops(SMALL, tokens) > after.flops(SMALL, tokens) * tokens / 2


def test_flash_attention_changes_nothing_for_one_token():
    cache, flash = LADDER["kv cache"], LADDER["flash"]
    for cost in ("state_bytes", "read_bytes", "flops"):
        assert getattr(flash, cost)(SMALL, 77) == getattr(cache, cost)(SMALL, 77)


# What one step of each rule computes with its K x V state, as PyTorch counts matrix products.
STEPS = {
    "linear": lambda q, k, v, S: (k.mT @ v, q @ S),
    "delta": lambda q, k, v, S: (k @ S, k.mT @ v, q @ S),
}


@pytest.mark.parametrize("stage", ["linear", "delta", "gated delta", "kda"])
def test_a_fixed_state_costs_the_same_at_any_length(stage):
    rung, weights = LADDER[stage], costs.matmul_weights(SMALL)
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
    assert layer.init_cache(1).S.nbytes * SMALL.n_layer == LADDER["kda"].state_bytes(SMALL, 1)


def test_the_latent_cache_is_the_one_that_is_priced():
    K, tokens = SMALL.n_embd // SMALL.n_head, 12  # K = 6: a latent of 24 and a shared part of 3
    layer = MultiHeadLatentAttention(
        SMALL.n_embd, SMALL.n_head, kv_lora_rank=4 * K, qk_nope_head_dim=K,
        qk_rope_head_dim=K // 2, v_head_dim=K, n_ctx=tokens,
    )  # fmt: skip
    rung, weights = LADDER["mla"], 2 * costs.matmul_weights(SMALL)
    kept = layer.init_cache(1).nbytes * SMALL.n_layer // 2  # 16 bits
    assert rung.state_bytes(SMALL, tokens) == kept
    assert rung.read_bytes(SMALL, tokens) == weights + kept
    q, rows = layer.project(torch.zeros(1, tokens, SMALL.n_embd))
    step, empty = (flops(lambda n=n: layer.absorbed(q[:, -1:], rows[:, :n])) for n in (tokens, 0))
    assert rung.flops(SMALL, tokens) - weights == SMALL.n_layer * (step - empty)


def test_kimi_linear_is_three_parts_kda_and_one_part_mla():
    config = GPT2Config(vocab_size=101, n_ctx=40, n_embd=30, n_layer=4, n_head=5)
    one = GPT2Config(vocab_size=101, n_ctx=40, n_embd=30, n_layer=1, n_head=5)
    kda, mla, both = (LADDER[key] for key in ("kda", "mla", "kimi linear"))
    kept = 3 * kda.state_bytes(one, 77) + mla.state_bytes(one, 77)
    assert both.state_bytes(config, 77) == kept
    assert both.read_bytes(config, 77) == 2 * costs.matmul_weights(config) + kept
    work = 3 * kda.flops(one, 77) + mla.flops(one, 77) - 4 * 2 * costs.matmul_weights(one)
    assert both.flops(config, 77) == 2 * costs.matmul_weights(config) + work

"""The decode benchmark: its step is the library's, and what it counts is what the caches hold."""

import decode as benchmark
import pytest
import torch
from stacks import Buffer, Sizes, Stack, plain_kda_step, plain_latent

from gpt2_to_k3.layers import KVCache, LatentCache
from gpt2_to_k3.ops import softmax_attention

SIZES = Sizes(hidden=16, heads=4, head_dim=4, kv_heads=2, rank=8, shared=2, intermediate=32)


def made(kinds, batch, tokens):
    torch.manual_seed(0)
    stack = Stack(kinds, SIZES).double()
    buffer = Buffer(10**6, torch.device("cpu"), torch.float64)
    return stack, stack.memories(batch, tokens, buffer, plain_latent, plain_kda_step)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["KDA", "MLA"])
def test_a_step_is_that_of_the_librarys_layer(kind):
    stack, (memory,) = made((kind,), batch=3, tokens=7)
    layer, x = stack.mixing[0], torch.randn(3, 2, 16, dtype=torch.float64)
    if kind == "KDA":
        cache = layer.init_cache(3)
        cache.S.copy_(memory.cache.S)
    else:
        cache = layer.init_cache(3, 8)
        cache.append(memory.rows[:, :6])
    for t in range(2):
        new = x[:, t : t + 1]
        if t and kind == "MLA":  # the benchmark writes at one place: move on as the library does
            memory.rows = torch.cat([memory.rows, memory.rows[:, :1]], 1)
        torch.testing.assert_close(memory.step(new), layer(new, cache), rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["GQA", "MHA"])
def test_keys_and_values_are_shared_by_groups_of_queries(kind):
    stack, (memory,) = made((kind,), batch=2, tokens=5)
    layer, x = stack.mixing[0], torch.randn(2, 1, 16, dtype=torch.float64)
    y = memory.step(x)
    q, k, v = layer.project(x)
    assert torch.equal(memory.kv[..., -1:, :], torch.stack([k, v]))
    k, v = (a.repeat_interleave(4 // a.shape[1], 1).transpose(1, 2) for a in memory.kv)
    o = softmax_attention(q.transpose(1, 2), k, v).flatten(2)
    torch.testing.assert_close(y, layer.o_proj(o), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_stack_is_norm_mixing_norm_feed_forward():
    stack, memories = made(("KDA", "MLA"), batch=2, tokens=4)
    _, again = made(("KDA", "MLA"), batch=2, tokens=4)
    x = torch.randn(2, 1, 16, dtype=torch.float64)
    y = stack.step(x, memories)
    for i, memory in enumerate(again):
        x = x + memory.step(stack.norms[2 * i](x))
        x = x + stack.feed_forward[i](stack.norms[2 * i + 1](x))
    assert torch.equal(y, x)


@pytest.mark.parametrize("kind", ["KDA", "MLA", "GQA", "MHA"])
def test_bytes_are_those_of_the_caches(kind):
    layer = Stack((kind,), SIZES).bfloat16().mixing[0]
    if kind == "KDA":
        held = layer.init_cache(1).nbytes
    elif kind == "MLA":
        held = LatentCache(1, 9, 10, dtype=torch.bfloat16, device="cpu").nbytes
    else:
        held = KVCache(1, 9, layer.kv_heads, 4, 4, dtype=torch.bfloat16, device="cpu").nbytes
    assert SIZES.sequence_bytes((kind,), 9) == held


def test_plans_fill_the_memory_and_name_every_stack():
    plans = list(benchmark.plans([64, 4096], 10**9, Sizes()))
    for name, kinds in benchmark.STACKS.items():
        for tokens in (64, 4096):
            batches = [b for t, n, b in plans if (t, n) == (tokens, name)]
            one = Sizes().sequence_bytes(kinds, tokens)
            assert batches[0] == 1 and batches[-1] * one <= 10**9 < (batches[-1] + 1) * one


def test_the_whole_benchmark_runs_with_toy_sizes(tmp_path, capsys):
    benchmark.main(["--tiny", "--save", str(tmp_path / "decode.json")])
    assert (tmp_path / "decode.json").is_file()
    with pytest.raises(SystemExit):
        benchmark.main([])
    assert "takes a GPU" in capsys.readouterr().err


def test_a_buffer_refuses_what_it_does_not_have():
    buffer = Buffer(24, torch.device("cpu"), torch.bfloat16)
    assert buffer.take(2, 2).shape == (2, 2)
    state = buffer.take(2, 2, dtype=torch.float32)
    assert state.dtype == torch.float32 and state.isfinite().all()
    with pytest.raises(ValueError, match=r"shape \(1,\).*24 bytes"):
        buffer.take(1)


def test_a_buffer_is_random_numbers_again_after_states_were_written_to_it():
    torch.manual_seed(0)
    buffer = Buffer(4000, torch.device("cpu"), torch.bfloat16)
    buffer.take(500, dtype=torch.float32).fill_(float("nan"))
    buffer.reset()
    numbers = buffer.take(2000)
    assert numbers.isfinite().all() and 0.9 < numbers.float().std() < 1.1

"""What fits, how long it takes at least, and what that costs; and what is refused."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2_to_k3.lab import ModelShape, costs
from gpt2_to_k3.models import KimiK3Config, KimiLinearConfig

LINEAR, K3 = ModelShape.kimi(KimiLinearConfig()), ModelShape.kimi(KimiK3Config())
DEVICE = costs.Device("d", 4.0e12, 7.0e14, 150 * 10**9)


@pytest.mark.parametrize(
    "spare, batch", [(-1, 0), (0, 0), (1_799_999, 0), (1_800_000, 1), (5_400_001, 3)]
)
def test_largest_batch_fills_memory_and_no_more(spare, batch):
    shape = replace(LINEAR.all_growing(), bytes_per_cache_number=1)
    shape = replace(shape, growing=replace(shape.growing, layers=3, cache_numbers=60))
    assert costs.largest_batch(shape, 10_000, costs.weight_bytes(shape) + spare) == batch


@given(st.integers(1, 2**21), st.integers(10**11, 10**13))
def test_the_largest_batch_fits_and_one_more_does_not(tokens, memory_bytes):
    largest = costs.largest_batch(LINEAR, tokens, memory_bytes)
    if largest:
        costs.check_fits(LINEAR, tokens, largest, memory_bytes)
        assert costs.weight_bytes(LINEAR) + largest * costs.kept_bytes(LINEAR, tokens) <= (
            memory_bytes
        )
    with pytest.raises(ValueError, match=f"at most {largest:,} sequences"):
        costs.check_fits(LINEAR, tokens, largest + 1, memory_bytes)


def test_a_batch_that_does_not_fit_is_refused_with_both_sizes():
    message = (
        "batch: expected at most 5 sequences of 1,048,576 tokens, got 6: with the weights "
        "they need 149,231,322,880 bytes, and there are 149,000,000,000"
    )
    small = replace(DEVICE, memory_bytes=149 * 10**9)
    with pytest.raises(ValueError) as error:
        costs.decode_seconds(LINEAR, 2**20, 6, small)
    assert str(error.value) == message
    needed = costs.weight_bytes(LINEAR) + 6 * costs.kept_bytes(LINEAR, 2**20)
    assert f"{needed:,} bytes" in message
    with pytest.raises(ValueError, match="at most 0 sequences of 4,097 tokens, got 1"):
        costs.prefill_seconds(K3, 4096, DEVICE, past=1)


def test_time_is_the_roofline_of_what_is_read_and_computed():
    for shape, batch in ((LINEAR, 1), (LINEAR, 6), (LINEAR.all_growing(), 1)):
        read, flops = (
            f(shape, 2**20, batch) for f in (costs.decode_read_bytes, costs.decode_flops)
        )
        seconds = costs.decode_seconds(shape, 2**20, batch, DEVICE)
        assert seconds == costs.roofline_seconds(read, flops, DEVICE) == read / 4.0e12
        slow = replace(DEVICE, flops_per_second=1e9)
        assert costs.decode_seconds(shape, 2**20, batch, slow) == flops / 1e9
    flops = costs.prefill_flops(LINEAR, 4096)
    assert costs.prefill_seconds(LINEAR, 4096, DEVICE) == flops / 7.0e14
    # one more token after a cache of keys and values: reading, as in a decode step
    gqa = ModelShape.kimi(KimiLinearConfig(), mixing="GQA")
    read = costs.weight_read_bytes(gqa, 1) + costs.kept_bytes(gqa, 2**17)
    assert costs.prefill_seconds(gqa, 1, DEVICE, past=2**17) == read / 4.0e12
    assert costs.prefill_seconds(LINEAR, 1, DEVICE) == costs.weight_read_bytes(LINEAR, 1) / 4.0e12


def test_gpus_are_one_that_is_larger():
    both = DEVICE.times(2)
    assert (both.read_bytes_per_second, both.flops_per_second) == (8.0e12, 14.0e14)
    assert both.memory_bytes == 300 * 10**9 and "2" in both.name
    one, two = (costs.bill(LINEAR, 2**20, 1, DEVICE, 3.0, gpus=n) for n in (1, 2))
    assert two["decode_seconds"] == one["decode_seconds"] / 2
    assert two["dollars_per_million_tokens"] == pytest.approx(one["dollars_per_million_tokens"])


def test_money_by_hand():
    # 100,000 steps of 0.01 s are 1,000 s on two GPUs at 3.60 an hour
    assert costs.dollars_per_million_tokens(0.01, 10, 3.6, gpus=2) == pytest.approx(2.0)
    assert costs.dollars_per_million_tokens(0.01, 10, 0) == 0


def test_at_equal_memory_four_layers_keep_four_times_the_sequences():
    """performance.md, section 6: 1 to 4 for 3 KDA and 1 MLA, 27 to 7 for Kimi's counts."""
    mla = LINEAR.all_growing()
    assert costs.equal_memory_batch(LINEAR, mla, 2**20, 1) == 3
    assert costs.equal_memory_batch(LINEAR, mla, 2**20, 7_000) == 26_866  # 27,000, less the states
    assert costs.equal_memory_batch(LINEAR, mla, 1_820, 1) == 0
    assert costs.equal_memory_batch(LINEAR, mla, 1_821, 1) == 1
    huge = replace(DEVICE, memory_bytes=10**18)
    seconds = [costs.decode_seconds(s, 2**20, 10**5, huge) for s in (mla, LINEAR)]
    assert seconds[0] / seconds[1] == pytest.approx(27 / 7, rel=0.006)


def test_the_bill_has_every_figure():
    figures = costs.bill(LINEAR, 131_072, 8, DEVICE, dollars_per_hour=3)
    step = costs.decode_seconds(LINEAR, 131_072, 8, DEVICE)
    assert figures["decode_seconds"] == max(figures["read_seconds"], figures["compute_seconds"])
    want = {
        "layer_cache_bytes": 131_072 * 1152,
        "layer_state_bytes": 2**21,
        "cache_bytes": 7 * 131_072 * 1152,
        "state_bytes": 20 * 2**21,
        "weight_bytes": 2 * 49_122_681_728,
        "largest_batch": costs.largest_batch(LINEAR, 131_072, DEVICE.memory_bytes),
        "weight_read_bytes": costs.weight_read_bytes(LINEAR, 8),
        "decode_read_bytes": costs.decode_read_bytes(LINEAR, 131_072, 8),
        "decode_flops": costs.decode_flops(LINEAR, 131_072, 8),
        "read_seconds": costs.decode_read_bytes(LINEAR, 131_072, 8) / 4.0e12,
        "compute_seconds": costs.decode_flops(LINEAR, 131_072, 8) / 7.0e14,
        "decode_seconds": step,
        "tokens_per_second": 8 / step,
        "dollars_per_million_tokens": 1e6 / (8 / step) / 3600 * 3,
        "prefill_flops": costs.prefill_flops(LINEAR, 131_072),
        "prefill_seconds": costs.prefill_seconds(LINEAR, 131_072, DEVICE),
    }
    assert figures.keys() == want.keys()
    assert figures == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, None, math.nan, 10**16])
@pytest.mark.parametrize(
    "name, call",
    [
        ("tokens", lambda n: costs.cache_bytes(LINEAR, n)),
        ("tokens", lambda n: costs.kept_bytes(LINEAR, n)),
        ("tokens", lambda n: costs.decode_read_bytes(LINEAR, n)),
        ("tokens", lambda n: costs.decode_flops(LINEAR, n)),
        ("tokens", lambda n: costs.prefill_flops(LINEAR, n)),
        ("tokens", lambda n: costs.largest_batch(LINEAR, n, 10**12)),
        ("tokens", lambda n: costs.prefill_seconds(LINEAR, n, DEVICE)),
        ("rows", lambda n: costs.weight_read_bytes(LINEAR, n)),
        ("batch", lambda n: costs.decode_flops(LINEAR, 1, n)),
        ("batch", lambda n: costs.decode_seconds(LINEAR, 1, n, DEVICE)),
        ("batch", lambda n: costs.dollars_per_million_tokens(1, n, 1)),
        ("batch", lambda n: costs.equal_memory_batch(LINEAR, LINEAR, 1, n)),
        ("gpus", lambda n: costs.dollars_per_million_tokens(1, 1, 1, n)),
        ("gpus", lambda n: costs.bill(LINEAR, 1, 1, DEVICE, 1, gpus=n)),
    ],
)
def test_impossible_counts_are_refused(name, call, bad):
    with pytest.raises(ValueError, match=f"^{name}: expected a whole number from 1"):
        call(bad)


@pytest.mark.parametrize("bad", [-1, -0.5, math.nan, math.inf, True, "3", 10**400])
@pytest.mark.parametrize(
    "name, call",
    [
        ("memory_bytes", lambda x: costs.largest_batch(LINEAR, 1, x)),
        ("memory_bytes", lambda x: replace(DEVICE, memory_bytes=x)),
        ("dollars_per_hour", lambda x: costs.dollars_per_million_tokens(1, 1, x)),
        ("step_seconds", lambda x: costs.dollars_per_million_tokens(x, 1, 1)),
        ("read_bytes_per_second", lambda x: replace(DEVICE, read_bytes_per_second=x)),
        ("flops_per_second", lambda x: replace(DEVICE, flops_per_second=x)),
    ],
)
def test_impossible_quantities_are_refused(name, call, bad):
    with pytest.raises(ValueError, match=f"^{name}: expected a finite number"):
        call(bad)


def test_nothing_stands_still_and_the_past_is_not_negative():
    with pytest.raises(ValueError, match="read_bytes_per_second: .* > 0, got 0"):
        replace(DEVICE, read_bytes_per_second=0)
    with pytest.raises(ValueError, match="past: expected a whole number from 0 .*got -1"):
        costs.prefill_flops(LINEAR, 1, -1)

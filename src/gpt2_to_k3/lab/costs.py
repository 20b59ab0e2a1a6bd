"""What a decoded token costs: bytes kept, bytes read, FLOPs, the least time they take, and money.

Conventions. A multiply-add is 2 FLOPs. `tokens` is the length of the context with the newest token
in it. Only matrix products count: biases, norms and embedding rows are under 0.1 % of GPT-2's work,
and activations are taken to stay on the chip. Read means read: the row of the newest token, and
states, which a step writes back, are not counted a second time. So a time is a lower bound.
"""

import math
from dataclasses import dataclass

from .records import load_record
from .shapes import check_number, check_whole

CONTEXTS = (4_096, 131_072, 1_048_576)


def matmul_weights(config):
    """Weights that every decoded token is multiplied with: 12 D^2 a block and the V D head (numbers, not bytes)."""
    return config.n_layer * 12 * config.n_embd**2 + config.vocab_size * config.n_embd


def kv_bytes_per_token(config, number_bytes=2):
    """Bytes that one token adds to the KV cache: a key and a value of D numbers in each layer (eq. 2.2)."""
    return 2 * config.n_layer * config.n_embd * number_bytes


def forward_flops(config, new, past=0, logit_rows=1):
    """FLOPs of `new` positions through the blocks with `past` cached ones,
    and `logit_rows` through the output layer.

    Attention is counted as the plain form computes it: a full rectangle of scores, masked half included.
    """
    blocks = 2 * new * config.n_layer * 12 * config.n_embd**2
    attention = 4 * new * (past + new) * config.n_embd * config.n_layer
    output = 2 * logit_rows * config.vocab_size * config.n_embd
    return blocks + attention + output


def state_numbers(config):
    """Numbers in the states of all heads: a K x V matrix each, K = V = D / H, whatever the length (eq. 4.2)."""
    return config.n_layer * config.n_embd**2 // config.n_head


def layer_cache_bytes(shape, tokens):
    """Bytes that one sequence's cache takes in one growing layer: cache_numbers for each token."""
    check_whole("tokens", tokens)
    return tokens * shape.growing.cache_numbers * shape.bytes_per_cache_number


def layer_state_bytes(shape):
    """Bytes that one sequence's state takes in one layer that has one, at any length."""
    return shape.state.state_numbers * shape.bytes_per_state_number


def cache_bytes(shape, tokens):
    """Bytes that one sequence's cache takes, in all growing layers."""
    return shape.growing.layers * layer_cache_bytes(shape, tokens)


def state_bytes(shape):
    """Bytes that one sequence's states take, in all layers that have one."""
    return shape.state.layers * layer_state_bytes(shape)


def kept_bytes(shape, tokens):
    """Bytes kept for one sequence: its cache and its states."""
    return cache_bytes(shape, tokens) + state_bytes(shape)


def weight_bytes(shape):
    """Bytes of all weights that are stored: all experts, and what is only looked up."""
    experts = shape.experts.layers * shape.experts.number * shape.experts.weights
    dense = shape.dense_weights + shape.lookup_weights
    return dense * shape.bytes_per_weight + experts * shape.bytes_per_expert_weight


def weight_read_bytes(shape, rows):
    """Bytes of weights that one step of `rows` tokens reads, each once.

    Of E experts in a layer, of which a token uses k, E (1 - (1 - k/E)^rows) are read: so many
    distinct ones are expected if every token chooses by itself and all are equally likely.
    Real routers are neither exactly.
    """
    check_whole("rows", rows)
    e = shape.experts
    touched = e.number * (1 - (1 - e.per_token / e.number) ** rows)
    experts = e.layers * touched * e.weights * shape.bytes_per_expert_weight
    return shape.dense_weights * shape.bytes_per_weight + experts


def decode_read_bytes(shape, tokens, batch=1):
    """Bytes read for one decode step: weights once, each sequence's cache and states (eq. 2.3)."""
    return weight_read_bytes(shape, batch) + batch * kept_bytes(shape, tokens)


def decode_flops(shape, tokens, batch=1):
    """FLOPs of one decode step: for each sequence 2 a weight, and its caches and states."""
    check_whole("tokens", tokens)
    check_whole("batch", batch)
    caches = shape.growing.layers * tokens * shape.growing.decode_flops
    states = shape.state.layers * shape.state.decode_flops
    return batch * (2 * shape.active_weights + caches + states)


def prefill_flops(shape, tokens, past=0):
    """FLOPs of a prompt of `tokens` after `past` cached ones, with one row of logits.

    Attention is counted for the pairs of query and key that the mask leaves, as a good kernel
    computes it: about half of forward_flops's rectangle.
    """
    check_whole("tokens", tokens)
    check_whole("past", past, least=0)
    rows = 2 * tokens * (shape.active_weights - shape.head_weights) + 2 * shape.head_weights
    pairs = tokens * past + tokens * (tokens + 1) // 2
    attention = pairs * shape.growing.prefill_flops + past * shape.growing.expand_flops
    states = tokens * shape.state.layers * shape.state.prefill_flops
    return rows + shape.growing.layers * attention + states


def largest_batch(shape, tokens, memory_bytes):
    """Sequences of `tokens` that fit in memory_bytes beside the weights (0 if those do not)."""
    check_number("memory_bytes", memory_bytes, zero=True)
    free = memory_bytes - weight_bytes(shape)
    return max(0, math.floor(free / kept_bytes(shape, tokens)))


def check_fits(shape, tokens, batch, memory_bytes):
    """Raise ValueError if batch does not fit: the largest, the bytes needed, and those there."""
    check_whole("batch", batch)
    if batch > (largest := largest_batch(shape, tokens, memory_bytes)):
        needed = weight_bytes(shape) + batch * kept_bytes(shape, tokens)
        raise ValueError(
            f"batch: expected at most {largest:,} sequences of {tokens:,} tokens, got {batch:,}: "
            f"with the weights they need {math.ceil(needed):,} bytes, "
            f"and there are {math.floor(memory_bytes):,}"
        )


@dataclass(frozen=True)
class Device:
    """What a device can do at best, as measured: bytes read and FLOPs per second, and bytes of memory.

    Errors: ValueError naming a number that is not finite, a speed that is not > 0, a memory < 0.
    """

    name: str
    read_bytes_per_second: float
    flops_per_second: float
    memory_bytes: int

    def __post_init__(self):
        check_number("read_bytes_per_second", self.read_bytes_per_second)
        check_number("flops_per_second", self.flops_per_second)
        check_number("memory_bytes", self.memory_bytes, zero=True)

    @classmethod
    def h200(cls):
        """One H200, from the recorded run of benchmarks/roofline.py (bfloat16 matrix products)."""
        record = load_record("h200_roofline")
        result = record["result"]
        return cls(
            record["device"],
            result["read_bytes_per_second"],
            result["bf16_matmul_flops_per_second"],
            result["memory_bytes"],
        )

    def times(self, gpus):
        """So many as one: an ideal, in which they share all work and wait for nothing."""
        check_whole("gpus", gpus)
        return Device(
            f"{gpus} x {self.name}",
            gpus * self.read_bytes_per_second,
            gpus * self.flops_per_second,
            gpus * self.memory_bytes,
        )


def roofline_seconds(read_bytes, flops, device):
    """The least time for a step: it cannot beat the memory, and it cannot beat the arithmetic (eq. 2.3)."""
    return max(read_bytes / device.read_bytes_per_second, flops / device.flops_per_second)


def decode_seconds(shape, tokens, batch, device):
    """The least time of one decode step, which gives each of `batch` sequences its next token.

    Errors: ValueError for a batch that does not fit in the device's memory.
    """
    check_fits(shape, tokens, batch, device.memory_bytes)
    read, flops = decode_read_bytes(shape, tokens, batch), decode_flops(shape, tokens, batch)
    return roofline_seconds(read, flops, device)


def prefill_seconds(shape, tokens, device, past=0):
    """The least time of one prompt: weights, and the cache before it, read once.

    Errors: ValueError if one sequence of past + tokens does not fit in the device's memory.
    """
    flops = prefill_flops(shape, tokens, past)
    check_fits(shape, past + tokens, 1, device.memory_bytes)
    read = weight_read_bytes(shape, tokens)
    if past:
        read += kept_bytes(shape, past)
    return roofline_seconds(read, flops, device)


def dollars_per_million_tokens(step_seconds, batch, dollars_per_hour, gpus=1):
    """Money for a million tokens if each step gives `batch` of them on GPUs rented all the time."""
    check_number("step_seconds", step_seconds)
    check_whole("batch", batch)
    check_number("dollars_per_hour", dollars_per_hour, zero=True)
    check_whole("gpus", gpus)
    return 1e6 * step_seconds / batch * gpus * dollars_per_hour / 3600


def break_even_tokens(hybrid, all_growing):
    """The length from which hybrid keeps less than all_growing; infinite if it never does.

    Its states are all it keeps more, so a shape without them breaks even at the first token.
    """
    saved = cache_bytes(all_growing, 1) - cache_bytes(hybrid, 1)
    more = state_bytes(hybrid) - state_bytes(all_growing)
    return max(1, math.floor(more / saved) + 1) if saved > 0 else math.inf


def equal_memory_batch(shape, other, tokens, batch):
    """Whole sequences of `shape` that fit where `batch` of `other` are kept, weights apart."""
    check_whole("batch", batch)
    return math.floor(batch * kept_bytes(other, tokens) / kept_bytes(shape, tokens))


def bill(shape, tokens, batch, device, dollars_per_hour, gpus=1):
    """Every figure by name, for `gpus` devices as one (Device.times): sizes, work, time and money.

    Units: cache_bytes and state_bytes are one sequence's; read_seconds and compute_seconds the two
    bounds of decode_seconds; tokens_per_second all sequences'; prefill is one prompt of `tokens`.
    Errors: ValueError for impossible numbers, and for a batch that does not fit.
    """
    whole = device.times(gpus)
    seconds = decode_seconds(shape, tokens, batch, whole)
    return {
        "layer_cache_bytes": layer_cache_bytes(shape, tokens),
        "layer_state_bytes": layer_state_bytes(shape),
        "cache_bytes": cache_bytes(shape, tokens),
        "state_bytes": state_bytes(shape),
        "weight_bytes": weight_bytes(shape),
        "largest_batch": largest_batch(shape, tokens, whole.memory_bytes),
        "weight_read_bytes": weight_read_bytes(shape, batch),
        "decode_read_bytes": decode_read_bytes(shape, tokens, batch),
        "decode_flops": decode_flops(shape, tokens, batch),
        "read_seconds": decode_read_bytes(shape, tokens, batch) / whole.read_bytes_per_second,
        "compute_seconds": decode_flops(shape, tokens, batch) / whole.flops_per_second,
        "decode_seconds": seconds,
        "tokens_per_second": batch / seconds,
        "dollars_per_million_tokens": dollars_per_million_tokens(
            seconds, batch, dollars_per_hour, gpus
        ),
        "prefill_flops": prefill_flops(shape, tokens),
        "prefill_seconds": prefill_seconds(shape, tokens, whole),
    }

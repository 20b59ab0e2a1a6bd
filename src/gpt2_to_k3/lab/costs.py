"""What one decoded token costs: bytes kept, bytes read, FLOPs, and the time they take at least.

Conventions. A multiply-add is 2 FLOPs. `tokens` is the length of the context with the newest token in it.
Only matrix products count: biases, norms and embedding rows are under 0.1 % of GPT-2's work, and activations
are taken to stay on the chip. Numbers are stored in `number_bytes` bytes each (2: float16 or bfloat16).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..models import GPT2Config
from .records import load_record


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


def decode_read_bytes(config, tokens, batch=1, number_bytes=2):
    """Bytes read for one decode step with a cache: the weights once, each sequence's cache once (eq. 2.3)."""
    cache = batch * tokens * kv_bytes_per_token(config, number_bytes)
    return matmul_weights(config) * number_bytes + cache


def state_numbers(config):
    """Numbers in the states of all heads: a K x V matrix each, K = V = D / H, whatever the length (eq. 4.2)."""
    return config.n_layer * config.n_embd**2 // config.n_head


def latent_bytes_per_token(config, number_bytes=2):
    """Bytes that one token adds to MLA's cache with DeepSeek-V2's widths: 4.5 head widths in each layer."""
    return config.n_layer * 9 * config.n_embd // (2 * config.n_head) * number_bytes


def largest_batch(config, tokens, memory_bytes, number_bytes=2):
    """Sequences of `tokens` whose caches fit in `memory_bytes` beside the weights (0 if the weights do not fit)."""
    free = memory_bytes - matmul_weights(config) * number_bytes
    return max(0, free // (tokens * kv_bytes_per_token(config, number_bytes)))


@dataclass(frozen=True)
class Device:
    """What a device can do at best, as measured: bytes read and FLOPs per second, and bytes of memory."""

    name: str
    read_bytes_per_second: float
    flops_per_second: float
    memory_bytes: int

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


def roofline_seconds(read_bytes, flops, device):
    """The least time for a step: it cannot beat the memory, and it cannot beat the arithmetic (eq. 2.3)."""
    return max(read_bytes / device.read_bytes_per_second, flops / device.flops_per_second)


@dataclass(frozen=True)
class Rung:
    """One stage of the ladder. Each cost is a function of (config, tokens) for decoding one token, batch 1."""

    name: str
    stores: str
    state_bytes: Callable[[GPT2Config, int], int]
    read_bytes: Callable[[GPT2Config, int], int]
    flops: Callable[[GPT2Config, int], int]
    can: str


def _fixed_state(name, stores, can, flops_per_number, extra=0):
    """A stage whose heads keep a state in 32 bits, with `extra` numbers per head and channel beside it."""

    def numbers(config):
        return state_numbers(config) + extra * config.n_layer * config.n_embd

    return Rung(
        name=name,
        stores=stores,
        state_bytes=lambda config, tokens: 4 * numbers(config),
        read_bytes=lambda config, tokens: decode_read_bytes(config, 0) + 4 * numbers(config),
        flops=lambda config, tokens: (
            2 * matmul_weights(config) + flops_per_number * numbers(config)
        ),
        can=can,
    )


def _three_to_one(cost, config, tokens):
    """Three quarters of the layers at the cost of KDA, one quarter at that of MLA; both have the weights."""
    kda, mla = (getattr(LADDER[key], cost)(config, tokens) for key in ("kda", "mla"))
    return (3 * kda + mla) // 4


LADDER = {
    "no cache": Rung(
        name="GPT-2 without a cache",
        stores="nothing",
        state_bytes=lambda config, tokens: 0,
        read_bytes=lambda config, tokens: decode_read_bytes(config, 0),
        flops=lambda config, tokens: forward_flops(config, new=tokens),
        can="recalls every token, and computes all of them again",
    ),
    "kv cache": Rung(
        name="GPT-2 with a KV cache",
        stores="keys and values of every token",
        state_bytes=lambda config, tokens: tokens * kv_bytes_per_token(config),
        read_bytes=decode_read_bytes,
        flops=lambda config, tokens: forward_flops(config, new=1, past=tokens - 1),
        can="recalls every token, but memory and reads grow with each",
    ),
}
LADDER["flash"] = replace(
    LADDER["kv cache"],
    name="FlashAttention with a KV cache",
    can="the same, and long prompts without a matrix of scores",
)
# Per number of the state: a multiply-add to write k^T v, one to read q S; the delta rule reads k S as
# well; a decay is one product more. The sum z of linear attention takes part in both like a column.
LADDER["linear"] = _fixed_state(
    "linear attention", "one matrix per head, and a sum of keys",
    "does not grow, but memories overlap and none is removed", flops_per_number=4, extra=1,
)  # fmt: skip
LADDER["delta"] = _fixed_state(
    "delta rule", "one matrix per head",
    "overwrites what one key recalls, but nothing fades by itself", flops_per_number=6,
)  # fmt: skip
LADDER["gated delta"] = _fixed_state(
    "gated delta rule", "one matrix per head",
    "overwrites, and forgets the whole head at one rate", flops_per_number=7,
)  # fmt: skip
LADDER["kda"] = _fixed_state(
    "Kimi Delta Attention", "one matrix per head",
    "overwrites, and forgets each channel at its own rate", flops_per_number=7,
)  # fmt: skip
LADDER["mla"] = Rung(
    name="multi-head latent attention",
    stores="a latent of 4.5 head widths per token",
    state_bytes=lambda config, tokens: tokens * latent_bytes_per_token(config),
    read_bytes=lambda config, tokens: (
        decode_read_bytes(config, 0) + tokens * latent_bytes_per_token(config)
    ),
    # Absorbed: in each head a score over 4.5 head widths, and a mean over 4.
    flops=lambda config, tokens: (
        2 * matmul_weights(config) + 17 * tokens * config.n_embd * config.n_layer
    ),
    can="recalls every token, and grows slower than keys and values",
)
LADDER["kimi linear"] = Rung(
    name="Kimi Linear",
    stores="states in three layers of four, a latent in the fourth",
    state_bytes=lambda config, tokens: _three_to_one("state_bytes", config, tokens),
    read_bytes=lambda config, tokens: _three_to_one("read_bytes", config, tokens),
    flops=lambda config, tokens: _three_to_one("flops", config, tokens),
    can="recalls every token, and grows a quarter as fast as MLA",
)
CONTEXTS = (4_096, 131_072, 1_048_576)

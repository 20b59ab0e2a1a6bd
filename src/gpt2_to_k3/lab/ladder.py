"""The ladder: what each stage of the course keeps, reads and computes to decode one token.

All stages have GPT-2's shape and weights; conventions as in costs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..models import GPT2Config
from .costs import forward_flops, kv_bytes_per_token, matmul_weights, state_numbers


def latent_bytes_per_token(config, number_bytes=2):
    """Bytes that one token adds to MLA's cache with DeepSeek-V2's widths: 4.5 head widths in each layer."""
    return config.n_layer * 9 * config.n_embd // (2 * config.n_head) * number_bytes


@dataclass(frozen=True)
class Rung:
    """One stage of the ladder. Each cost is a function of (config, tokens) for decoding one token, batch 1."""

    name: str
    stores: str
    state_bytes: Callable[[GPT2Config, int], int]
    flops: Callable[[GPT2Config, int], int]
    can: str

    def read_bytes(self, config, tokens):
        """Bytes read: the weights once, in 16 bits, and all that is kept (eq. 2.3)."""
        return 2 * matmul_weights(config) + self.state_bytes(config, tokens)


def _fixed_state(name, stores, can, flops_per_number, extra=0):
    """A stage whose heads keep a state in 32 bits, with `extra` numbers per head and channel beside it."""

    def numbers(config):
        return state_numbers(config) + extra * config.n_layer * config.n_embd

    return Rung(
        name=name,
        stores=stores,
        state_bytes=lambda config, tokens: 4 * numbers(config),
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
        flops=lambda config, tokens: forward_flops(config, new=tokens),
        can="recalls every token, and computes all of them again",
    ),
    "kv cache": Rung(
        name="GPT-2 with a KV cache",
        stores="keys and values of every token",
        state_bytes=lambda config, tokens: tokens * kv_bytes_per_token(config),
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
    stores="a row of 4.5 head widths per token",
    state_bytes=lambda config, tokens: tokens * latent_bytes_per_token(config),
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
    flops=lambda config, tokens: _three_to_one("flops", config, tokens),
    can="recalls every token, and grows a quarter as fast as MLA",
)

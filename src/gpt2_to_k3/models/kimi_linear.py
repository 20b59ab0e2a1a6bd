"""Kimi Linear (Kimi Team 2025), as released: three layers of KDA to one of MLA, and experts."""

from dataclasses import dataclass

from torch import nn

from ..layers import (
    KimiDeltaAttention,
    MixtureOfExperts,
    MultiHeadLatentAttention,
    RMSNorm,
    SwiGLU,
)
from ._hybrid import KERNEL_SIZE, NORM_EPS, HybridModel, check_config
from ._inputs import unchanged_on_error


@dataclass(frozen=True)
class KimiLinearConfig:
    """The sizes of a Kimi Linear; the defaults are the released 48B model's.

    The names are config.json's, but for n_ctx (model_max_length), linear_num_heads and
    linear_head_dim (linear_attn_config's num_heads and head_dim).

    Units: n_ctx counts tokens; full_attn_layers are the MLA layers, counted from 1; all others are
    KDA. The first first_k_dense_replace layers have a dense feed-forward layer, the others experts.
    Errors: ValueError naming the bad field.
    Source: Kimi Linear (arXiv 2510.26692), section 4; moonshotai/Kimi-Linear-48B-A3B-Instruct,
    config.json.
    """

    vocab_size: int = 163840
    n_ctx: int = 1048576
    hidden_size: int = 2304
    num_hidden_layers: int = 27
    full_attn_layers: tuple = (4, 8, 12, 16, 20, 24, 27)
    linear_num_heads: int = 32
    linear_head_dim: int = 128
    num_attention_heads: int = 32
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    intermediate_size: int = 9216
    first_k_dense_replace: int = 1
    moe_intermediate_size: int = 1024
    num_experts: int = 256
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    routed_scaling_factor: float = 2.446

    def __post_init__(self):
        check_config(self)
        if not 0 < self.routed_scaling_factor < float("inf"):
            raise ValueError(
                f"routed_scaling_factor must be finite and > 0, got {self.routed_scaling_factor!r}"
            )

    @classmethod
    def kimi_linear_48b(cls):
        """The released model: 48B parameters, of which a token uses 3B."""
        return cls()

    @classmethod
    def mini(cls):
        """A model over bytes that runs in milliseconds: for tests and examples, not released."""
        return cls(
            vocab_size=256, n_ctx=256, hidden_size=32, num_hidden_layers=4, full_attn_layers=(4,),
            linear_num_heads=2, linear_head_dim=16, num_attention_heads=2, kv_lora_rank=16,
            qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, intermediate_size=128,
            moe_intermediate_size=32, num_experts=8, num_experts_per_token=2,
        )  # fmt: skip


class KimiLinearLayer(nn.Module):
    """x = x + self_attn(input_layernorm(x)); x = x + mlp(post_attention_layernorm(x)).

    self_attn is MLA in the layers that config.full_attn_layers lists, else KDA; mlp is dense in
    the first config.first_k_dense_replace layers, else a mixture of experts.

    Shapes: x [B, T, hidden_size] -> [B, T, hidden_size]. Units: number counts layers from 1.
    Dtype: the weights'. Source: Kimi Linear (arXiv 2510.26692), section 4.
    """

    def __init__(self, config, number):
        super().__init__()
        D = config.hidden_size
        self.input_layernorm = RMSNorm(D, NORM_EPS)
        if number in config.full_attn_layers:
            self.self_attn = MultiHeadLatentAttention(
                D, config.num_attention_heads, kv_lora_rank=config.kv_lora_rank,
                qk_nope_head_dim=config.qk_nope_head_dim, v_head_dim=config.v_head_dim,
                qk_rope_head_dim=config.qk_rope_head_dim, n_ctx=config.n_ctx,
            )  # fmt: skip
        else:
            self.self_attn = KimiDeltaAttention(D, config.linear_num_heads, config.linear_head_dim)
        self.post_attention_layernorm = RMSNorm(D, NORM_EPS)
        if number <= config.first_k_dense_replace:
            self.mlp = SwiGLU(D, config.intermediate_size)
        else:
            self.mlp = MixtureOfExperts(
                D, config.moe_intermediate_size, num_experts=config.num_experts,
                top_k=config.num_experts_per_token, num_shared_experts=config.num_shared_experts,
                routed_scaling_factor=config.routed_scaling_factor,
            )  # fmt: skip

    def forward(self, x, cache=None):
        """Return [B, T, hidden_size]; cache is this layer's own."""
        x = x + self.self_attn(self.input_layernorm(x), cache)
        return x + self.mlp(self.post_attention_layernorm(x))

    def init_cache(self, batch_size, capacity):
        """Return an empty LatentCache for capacity tokens, or a RecurrentCache."""
        if isinstance(self.self_attn, MultiHeadLatentAttention):
            return self.self_attn.init_cache(batch_size, capacity)
        return self.self_attn.init_cache(batch_size)


class KimiLinear(HybridModel):
    """logits = lm_head(norm(layers(embed_tokens[tokens]))), with no positions: KDA knows the order.

    Shapes: tokens int64 [B, T] -> logits [B, T, vocab_size]. Dtype: the weights'; decays, states,
    routers and the sums over experts in float32 (float64 for float64 weights).
    Weights start normal with std 0.02, the release's initializer_range, but for the norms (1), the
    convolutions, A_log and dt_bias, which start as in their layers.
    Units: in the 48B model a token takes 4,032 numbers of the cache (eq. 10.1).
    Source: Kimi Linear (arXiv 2510.26692), section 4; its release's `modeling_kimi.py`.
    """

    def __init__(self, config):
        super().__init__(config, KimiLinearLayer)

    def hidden(self, tokens, cache=None):
        """Return what the head reads, [B, T, hidden_size]; arguments and errors as in forward."""
        self._check(tokens, cache)
        x = self.embed_tokens(tokens)
        with unchanged_on_error(cache):
            for i, layer in enumerate(self.layers):
                x = layer(x, None if cache is None else cache[i])
        return self.norm(x)


def count_parameters(config, *, active=False):
    """Return the number of weights of each part of a KimiLinear, by name; their sum is the model's.

    active: of the routed experts, count the num_experts_per_token that a token uses. The published
    3B are these without embedding and head.
    Units: weights, router biases included. Source: the shapes of the model, which a test counts.
    """
    D, H, K = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    n_mla, n_dense = len(config.full_attn_layers), config.first_k_dense_replace
    P = H * K
    kda = 4 * D * P + 3 * KERNEL_SIZE * P  # q, k, v, o; their convolutions
    kda += 2 * (D * K + K * P) + H + P  # decay and gate, low-rank; A_log, dt_bias
    kda += D * H + K  # beta; norm
    H, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, V = config.qk_nope_head_dim, config.v_head_dim
    mla = D * H * (nope + rope) + D * (rank + rope) + rank + rank * H * (nope + V) + H * V * D
    expert, E = 3 * D * config.moe_intermediate_size, config.num_experts
    n_moe = config.num_hidden_layers - n_dense
    return {
        "embedding": config.vocab_size * D,
        "KDA": (config.num_hidden_layers - n_mla) * kda,
        "MLA": n_mla * mla,
        "dense feed-forward": n_dense * 3 * D * config.intermediate_size,
        "routers": n_moe * (D * E + E),
        "routed experts": n_moe * (config.num_experts_per_token if active else E) * expert,
        "shared experts": n_moe * config.num_shared_experts * expert,
        "norms": (2 * config.num_hidden_layers + 1) * D,
        "head": config.vocab_size * D,
    }

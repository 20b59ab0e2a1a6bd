"""Kimi K3's language model (Kimi Team 2026): KDA, gated MLA, latent experts, mixed over depth."""

from dataclasses import dataclass
from functools import partial

from torch import nn

from ..layers import (
    AttentionResidual,
    KimiDeltaAttention,
    LatentMoE,
    MultiHeadLatentAttention,
    RMSNorm,
    SiTUGLU,
    attention_residuals,
)
from ._hybrid import KERNEL_SIZE, NORM_EPS, HybridModel, check_config
from ._inputs import unchanged_on_error

_LOWER_BOUND = -5.0  # config.json's gate_lower_bound


@dataclass(frozen=True)
class KimiK3Config:
    """The sizes of a Kimi K3; the defaults are the released 2.8T model's.

    The names are config.json's, but for n_ctx (max_position_embeddings), linear_num_heads and
    linear_head_dim (linear_attn_config's num_heads and head_dim).

    Units: n_ctx counts tokens; full_attn_layers are the MLA layers, counted from 1; all others are
    KDA. The first first_k_dense_replace layers have a dense feed-forward layer, the others experts,
    routed_expert_hidden_size channels wide. attn_res_block_size counts layers, of two sublayers.
    Errors: ValueError naming the bad field.
    Source: Kimi K3 (arXiv 2607.24653), table 1; moonshotai/Kimi-K3, config.json.
    """

    vocab_size: int = 163840
    n_ctx: int = 1048576
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    full_attn_layers: tuple = (*range(4, 93, 4), 93)
    attn_res_block_size: int = 12
    linear_num_heads: int = 96
    linear_head_dim: int = 128
    num_attention_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    intermediate_size: int = 33792
    first_k_dense_replace: int = 1
    routed_expert_hidden_size: int = 3584
    moe_intermediate_size: int = 3072
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2

    def __post_init__(self):
        check_config(self)

    @classmethod
    def k3(cls):
        """The released model: 2.78T parameters, of which a token uses 104B."""
        return cls()

    @classmethod
    def mini(cls):
        """A model over bytes that runs in milliseconds: for tests and examples, not released.

        It has every kind of layer, two of MLA at the end, and three blocks, the last one shorter.
        """
        return cls(
            vocab_size=256, n_ctx=256, hidden_size=32, num_hidden_layers=5, full_attn_layers=(4, 5),
            attn_res_block_size=2, linear_num_heads=3, linear_head_dim=16, num_attention_heads=3,
            q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
            intermediate_size=128, routed_expert_hidden_size=16, moe_intermediate_size=32,
            num_experts=8, num_experts_per_token=2,
        )  # fmt: skip


class KimiK3Layer(nn.Module):
    """Two sublayers, self_attn(input_layernorm(h)) and mlp(post_attention_layernorm(h)).

    What each reads, h, is for its mixer to say: self_attention_res and mlp_res. self_attn is gated
    MLA in the layers that config.full_attn_layers lists, else KDA with a bounded decay; mlp is
    dense in the first config.first_k_dense_replace layers, else experts in a latent.

    Units: number counts layers from 1. Dtype: the weights'.
    Source: Kimi K3 (arXiv 2607.24653), section 2.
    """

    def __init__(self, config, number):
        super().__init__()
        D = config.hidden_size
        self.self_attention_res = AttentionResidual(D, NORM_EPS)
        self.input_layernorm = RMSNorm(D, NORM_EPS)
        if number in config.full_attn_layers:
            self.self_attn = MultiHeadLatentAttention(
                D, config.num_attention_heads, kv_lora_rank=config.kv_lora_rank,
                qk_nope_head_dim=config.qk_nope_head_dim, v_head_dim=config.v_head_dim,
                qk_rope_head_dim=config.qk_rope_head_dim, q_lora_rank=config.q_lora_rank,
                output_gate=True, n_ctx=config.n_ctx,
            )  # fmt: skip
        else:
            self.self_attn = KimiDeltaAttention(
                D, config.linear_num_heads, config.linear_head_dim, lower_bound=_LOWER_BOUND,
                use_full_rank_gate=True,
            )  # fmt: skip
        self.mlp_res = AttentionResidual(D, NORM_EPS)
        self.post_attention_layernorm = RMSNorm(D, NORM_EPS)
        if number <= config.first_k_dense_replace:
            self.mlp = SiTUGLU(D, config.intermediate_size)
        else:
            self.mlp = LatentMoE(
                D, config.routed_expert_hidden_size, config.moe_intermediate_size,
                num_experts=config.num_experts, top_k=config.num_experts_per_token,
                num_shared_experts=config.num_shared_experts, norm_eps=NORM_EPS,
            )  # fmt: skip

    def attention(self, h, cache=None):
        """Return the first sublayer's output [B, T, hidden_size]; cache is this layer's own."""
        return self.self_attn(self.input_layernorm(h), cache)

    def feed_forward(self, h):
        """Return the second sublayer's output [B, T, hidden_size]."""
        return self.mlp(self.post_attention_layernorm(h))

    def init_cache(self, batch_size, capacity):
        """Return an empty LatentCache for capacity tokens, or a RecurrentCache."""
        if isinstance(self.self_attn, MultiHeadLatentAttention):
            return self.self_attn.init_cache(batch_size, capacity)
        return self.self_attn.init_cache(batch_size)


class KimiK3(HybridModel):
    """logits = lm_head(norm(attention_residuals(embed_tokens[tokens], the layers' sublayers))).

    A sublayer reads a mean of the embedding, the finished blocks' sums and the open one's, weighed
    anew for each token; the output reads it once more. There are no positions: KDA knows the order.

    Shapes: tokens int64 [B, T] -> logits [B, T, vocab_size]. Dtype: the weights'; decays, states,
    routers, activations of experts, their sums and the mixing over depth in float32 (float64 for
    float64 weights).
    Weights start normal with std 0.02, as Kimi Linear's, but for the norms (1), the mixers' queries
    (0), the convolutions, A_log and dt_bias, which start as in their layers.
    Units: in K3 a token takes 13,824 numbers of the cache (eq. 10.1). Depth has none: a token's
    sources are its own.
    Source: Kimi K3 (arXiv 2607.24653), section 2; `mlx_lm/models/kimi_k3.py`. The vision tower is
    not part of it, and the released checkpoint has no multi-token prediction.
    """

    def __init__(self, config):
        super().__init__(config, KimiK3Layer)
        self.output_attn_res = AttentionResidual(config.hidden_size, NORM_EPS)

    def hidden(self, tokens, cache=None):
        """Return what the head reads, [B, T, hidden_size]; arguments and errors as in forward."""
        self._check(tokens, cache)
        sublayers, mixers = [], []
        for i, layer in enumerate(self.layers):
            held = None if cache is None else cache[i]
            sublayers += [partial(layer.attention, cache=held), layer.feed_forward]
            mixers += [layer.self_attention_res, layer.mlp_res]
        mixers.append(self.output_attn_res)
        x = self.embed_tokens(tokens)
        block_size = 2 * self.config.attn_res_block_size  # in sublayers
        with unchanged_on_error(cache):
            return self.norm(attention_residuals(x, sublayers, mixers, block_size))


def count_parameters(config, *, active=False):
    """Return the number of weights of each part of a KimiK3, by name; their sum is the model's.

    active: of the routed experts, count the num_experts_per_token that a token uses. The published
    104.2B are these without the embedding, of which a token looks up one row.
    Units: weights, router biases included. Source: the shapes of the model, which a test counts.
    """
    D, H, K = config.hidden_size, config.linear_num_heads, config.linear_head_dim
    L, n_mla = config.num_hidden_layers, len(config.full_attn_layers)
    n_dense = config.first_k_dense_replace
    P = H * K
    kda = 4 * D * P + 3 * KERNEL_SIZE * P  # q, k, v, o; their convolutions
    kda += D * K + K * P + H + P  # decay, low-rank; A_log, dt_bias
    kda += D * P + D * H + K  # gate; beta; norm
    H, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    rank, V, q_rank = config.kv_lora_rank, config.v_head_dim, config.q_lora_rank
    mla = D * q_rank + q_rank + q_rank * H * (nope + rope)  # queries, with a norm
    mla += D * (rank + rope) + rank + rank * H * (nope + V)  # keys and values, with a norm
    mla += 2 * D * H * V  # gate and o
    latent, width = config.routed_expert_hidden_size, config.moe_intermediate_size
    n_moe, E = L - n_dense, config.num_experts
    used = config.num_experts_per_token if active else E
    return {
        "embedding": config.vocab_size * D,
        "KDA": (L - n_mla) * kda,
        "MLA": n_mla * mla,
        "dense feed-forward": n_dense * 3 * D * config.intermediate_size,
        "routers": n_moe * (D * E + E),
        "latent projections": n_moe * (2 * D * latent + latent),
        "routed experts": n_moe * used * 3 * latent * width,
        "shared experts": n_moe * config.num_shared_experts * 3 * D * width,
        "attention residuals": (2 * L + 1) * 2 * D,
        "norms": (2 * L + 1) * D,
        "head": config.vocab_size * D,
    }

"""The three models in small, and how the tests of what they share make, run and compare them."""

import copy

import torch

from gpt2_to_k3.models import (
    GPT2,
    GPT2Config,
    KimiK3,
    KimiK3Config,
    KimiLinear,
    KimiLinearConfig,
)

MODELS = {GPT2Config: GPT2, KimiLinearConfig: KimiLinear, KimiK3Config: KimiK3}
GPT2_SMALL = GPT2Config(vocab_size=97, n_ctx=80, n_embd=32, n_layer=2, n_head=4)
# Every kind of layer, and MLA with a dense feed-forward; no two widths equal.
LINEAR_SMALL = KimiLinearConfig(
    vocab_size=97, n_ctx=80, hidden_size=20, num_hidden_layers=4, full_attn_layers=(1, 3),
    linear_num_heads=3, linear_head_dim=8, num_attention_heads=5, kv_lora_rank=14,
    qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, intermediate_size=37,
    moe_intermediate_size=11, num_experts=9, num_experts_per_token=3, num_shared_experts=2,
)  # fmt: skip
# The same, in blocks of 2, 2 and 1 layers.
K3_SMALL = KimiK3Config(
    vocab_size=97, n_ctx=80, hidden_size=20, num_hidden_layers=5, full_attn_layers=(1, 4, 5),
    attn_res_block_size=2, linear_num_heads=3, linear_head_dim=8, num_attention_heads=5,
    q_lora_rank=9, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7,
    intermediate_size=37, routed_expert_hidden_size=10, moe_intermediate_size=11, num_experts=12,
    num_experts_per_token=3, num_shared_experts=2,
)  # fmt: skip
HYBRIDS = [LINEAR_SMALL, K3_SMALL]
SMALL = [GPT2_SMALL, *HYBRIDS]
B, T = 3, 7


def name(config):
    return type(config).__name__.removesuffix("Config")


def make(config, dtype=torch.float64):
    """A model whose logits, decays, gates, sources and choices of experts spread widely."""
    torch.manual_seed(0)
    model = MODELS[type(config)](config)
    for key, x in model.state_dict().items():
        if key.endswith("dt_bias"):
            continue
        elif x.ndim == 1:
            x.add_(torch.randn_like(x), alpha=0.2)
        else:
            x.normal_(std=2 * x.shape[-1] ** -0.5)
    return model.to(dtype)


@torch.no_grad()
def run(model, tokens, lengths):
    cache = model.init_cache(len(tokens))
    return torch.cat([model(piece, cache) for piece in tokens.split(lengths, dim=1)], dim=1)


def held(cache):
    """Copies of everything a cache holds."""
    return [copy.deepcopy(vars(layer)) for layer in cache]


def same(cache, before):
    for layer, want in zip(cache, before, strict=True):
        for key, x in vars(layer).items():
            pairs = zip(x, want[key], strict=True) if key == "tails" else [(x, want[key])]
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs), key

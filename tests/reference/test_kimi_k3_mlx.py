"""KimiK3 against mlx-lm's kimi_k3, run on the CPU, with the same random weights.

Its own sanitize turns the release's names and shapes into mlx's; see `released`.
"""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hybrid_tests import (  # noqa: F401
    B,
    T,
    linear_attn_config,
    test_one_pass,
    test_prefill_and_decode_equal_their_one_pass,
    test_prefill_and_rest_equal_their_one_pass_at_every_split,
    test_the_choice_of_experts_is_no_matter_of_rounding,
)

from gpt2_to_k3.models import KimiK3, KimiK3Config

# Every kind of layer, two of MLA at the end, and three blocks of which the last is unfinished.
# mlx wants heads of 32 channels in KDA.
CONFIG = KimiK3Config(
    vocab_size=97, n_ctx=80, hidden_size=20, num_hidden_layers=5, full_attn_layers=(4, 5),
    attn_res_block_size=2, linear_num_heads=3, linear_head_dim=32, num_attention_heads=5,
    q_lora_rank=9, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7,
    intermediate_size=37, routed_expert_hidden_size=16, moe_intermediate_size=11, num_experts=8,
    num_experts_per_token=3, num_shared_experts=2,
)  # fmt: skip


def randomise(model):
    """Weights for which decays, gates, experts and sources weigh differently from token to token.

    Large queries of the mixers would make a difference of 1e-6 in one layer many times larger.
    """
    torch.manual_seed(6)  # no choice of experts is a close one
    for name, x in model.state_dict().items():
        x.normal_(std=x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3)
        if name.endswith(("embed_tokens.weight", "conv1d.weight")):
            x.normal_()
        elif name.endswith("query"):
            x.mul_(0.5)
        elif name.endswith(("f_b_proj.weight", "b_proj.weight", "mlp.gate.weight")):
            x.mul_(2)
        elif re.search(r"(mlp|experts)\.(gate|up)_proj", name):
            x.mul_(2)  # into the bends of SiTU
        elif name.endswith("dt_bias"):
            x.sub_(2)
        elif name.endswith("norm.weight"):
            x.add_(1)
    return model


def released(weights):
    """Our state_dict under the release's names: experts one by one, queries as projections to 1."""
    theirs = {}
    for name, x in weights.items():
        name = name if name.startswith("lm_head") else f"model.{name}"
        *path, last = name.split(".")
        if name.endswith("res.query"):
            theirs[name.replace(".query", "_proj.weight")] = x[None]
        elif name.endswith("res.norm.weight"):
            theirs[name.replace(".norm", "_norm")] = x
        elif path[-1] == "experts":
            w = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[last]
            prefix = ".".join(path).replace("mlp", "block_sparse_moe")
            theirs |= {f"{prefix}.{e}.{w}.weight": one for e, one in enumerate(x)}
        elif ".0.mlp" in name:
            theirs[name] = x
        else:
            theirs[name.replace(".mlp.", ".block_sparse_moe.")] = x
    return theirs


def their_config(kimi_k3, config):
    """config as the release writes it."""
    same = (
        "vocab_size hidden_size num_hidden_layers attn_res_block_size num_attention_heads "
        "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size "
        "first_k_dense_replace routed_expert_hidden_size moe_intermediate_size num_experts "
        "num_experts_per_token num_shared_experts"
    ).split()
    return kimi_k3.TextArgs(
        **{name: getattr(config, name) for name in same},
        num_key_value_heads=config.num_attention_heads,
        max_position_embeddings=config.n_ctx,
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        mla_use_output_gate=True,
        latent_moe_use_norm=True,
        linear_attn_config=linear_attn_config(config)
        | dict(gate_lower_bound=-5.0, use_full_rank_gate=True),
    )


@pytest.fixture(scope="module")
def pair(mlx, kimi_k3):
    """Our model with random weights, and a call of theirs with the same."""
    ours = randomise(KimiK3(CONFIG))
    model = kimi_k3.LanguageModel(their_config(kimi_k3, CONFIG))
    weights = released(ours.state_dict())
    weights = {name: mlx.array(x.contiguous().numpy()) for name, x in weights.items()}
    model.load_weights(list(model.sanitize(weights).items()))  # strict: all of them, no other
    model.eval()

    def call(tokens, cache=None):
        return torch.from_numpy(np.array(model(mlx.array(tokens.numpy()), cache)))

    return ours, SimpleNamespace(call=call, model=model)


@pytest.fixture(scope="module")
def want(pair, tokens):
    """Their logits of one pass without a cache."""
    return pair[1].call(tokens)


@torch.no_grad()
def test_prefill_and_decode_equal_theirs(pair, tokens, close):
    """Piece by piece, both with their caches; what the layers keep is the same as well."""
    ours, theirs = pair
    their_cache, cache = theirs.model.make_cache(), ours.init_cache(B)
    for piece in tokens.split([60] + [1] * (T - 60), 1):
        close(ours(piece, cache), theirs.call(piece, their_cache))
    for number, (layer, held) in enumerate(zip(their_cache, cache, strict=True), 1):
        if number in CONFIG.full_attn_layers:
            rows = [torch.from_numpy(np.array(x)).squeeze(1) for x in (layer.keys, layer.values)]
            close(held.rows[:, :T], torch.cat(rows, -1)[:, :T])
        else:
            tails, S = (torch.from_numpy(np.array(layer[i])) for i in (0, 1))
            close(torch.cat(held.tails, -1), tails)
            close(held.S, S.mT)


def test_greedy_ids_equal(pair, tokens):
    ours, theirs = pair
    want = tokens[:, :7]
    for _ in range(20):
        want = torch.cat([want, theirs.call(want)[:, -1:].argmax(-1)], 1)
    for use_cache in (True, False):
        assert torch.equal(ours.generate(tokens[:, :7], 20, use_cache=use_cache), want)


def test_our_defaults_are_theirs(kimi_k3):
    """Where they have any: mlx reads the others from the release's configuration."""
    got, default = their_config(kimi_k3, KimiK3Config.k3()), kimi_k3.TextArgs()
    for name in (
        "vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size "
        "num_key_value_heads max_position_embeddings num_experts_per_token routed_scaling_factor "
        "tie_word_embeddings mla_use_nope"
    ).split():
        assert getattr(got, name) == getattr(default, name), name

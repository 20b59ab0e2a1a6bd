"""What KimiLinear and KimiK3 both have to equal a peer in: each file gives its `pair` and `want`.

pair: our model, and theirs with the same weights. want: their logits of one pass over tokens,
without a cache.
"""

import pytest
import torch

from gpt2_to_k3.layers import Router

B, T = 2, 67  # more than one chunk of KDA


def linear_attn_config(config):
    """config's field of that name as the releases write it: layers counted from 1."""
    full, layers = config.full_attn_layers, range(1, config.num_hidden_layers + 1)
    return dict(
        kda_layers=[n for n in layers if n not in full],
        full_attn_layers=list(full),
        num_heads=config.linear_num_heads,
        head_dim=config.linear_head_dim,
        short_conv_kernel_size=4,
    )


@torch.no_grad()
def run(model, tokens, lengths):
    cache = model.init_cache(len(tokens), tokens.shape[1])
    return torch.cat([model(piece, cache) for piece in tokens.split(lengths, dim=1)], dim=1)


def test_one_pass(pair, tokens, want, close):
    assert want.std() > 0.5
    close(pair[0](tokens), want)


@torch.no_grad()
def test_the_choice_of_experts_is_no_matter_of_rounding(pair, tokens):
    """Else a difference of 1e-6 could become one of 1. And the choice is not always the same."""
    margins, used = [], []

    def look(router, inputs, outputs):
        s = (inputs[0] @ router.weight.T).sigmoid() + router.e_score_correction_bias
        best = s.topk(router.top_k + 1).values
        margins.append((best[:, -2] - best[:, -1]).min().item())
        used.append(len(outputs[1].unique()))

    routers = [m for m in pair[0].modules() if isinstance(m, Router)]
    hooks = [router.register_forward_hook(look) for router in routers]
    pair[0](tokens)
    for hook in hooks:
        hook.remove()
    assert len(margins) == 4 and min(margins) > 1e-5, margins
    assert min(used) > 0.7 * routers[0].num_experts, used


@pytest.mark.parametrize("n", range(T + 1))
def test_prefill_and_rest_equal_their_one_pass_at_every_split(pair, tokens, want, n, close):
    close(run(pair[0], tokens, [n, T - n]), want)


@pytest.mark.parametrize("prefill", [0, 1, 2, 3, 4, 63, 64, 65])
def test_prefill_and_decode_equal_their_one_pass(pair, tokens, want, prefill, close):
    close(run(pair[0], tokens, [prefill] + [1] * (T - prefill)), want)

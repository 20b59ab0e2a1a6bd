import copy
import dataclasses

import pytest
import torch

from gpt2_to_k3.layers import LatentCache, RecurrentCache
from gpt2_to_k3.models import KimiK3, KimiK3Config

MINI = KimiK3Config.mini()
# Every kind of layer, and MLA with a dense feed-forward; blocks of 2, 2 and 1 layers; no two widths
# equal.
SMALL = KimiK3Config(
    vocab_size=97, n_ctx=80, hidden_size=20, num_hidden_layers=5, full_attn_layers=(1, 4, 5),
    attn_res_block_size=2, linear_num_heads=3, linear_head_dim=8, num_attention_heads=5,
    q_lora_rank=9, kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7,
    intermediate_size=37, routed_expert_hidden_size=10, moe_intermediate_size=11, num_experts=12,
    num_experts_per_token=3, num_shared_experts=2,
)  # fmt: skip
B, T = 3, 7


def make(config=SMALL, dtype=torch.float64):
    """A model whose logits, decays, gates, sources and choices of experts spread widely."""
    torch.manual_seed(0)
    model = KimiK3(config)
    for name, x in model.state_dict().items():
        if name.endswith("dt_bias"):
            continue
        elif x.ndim == 1:
            x.add_(torch.randn_like(x), alpha=0.2)
        else:
            x.normal_(std=2 * x.shape[-1] ** -0.5)
    return model.to(dtype)


@pytest.fixture
def model():
    return make()


@pytest.fixture
def tokens():
    return torch.randint(97, (B, T), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run(model, tokens, lengths):
    cache = model.init_cache(len(tokens))
    return torch.cat([model(piece, cache) for piece in tokens.split(lengths, dim=1)], dim=1)


def same(cache, before):
    for layer, want in zip(cache, before, strict=True):
        for name, x in vars(layer).items():
            pairs = zip(x, want[name], strict=True) if name == "tails" else [(x, want[name])]
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs), name


# Sequences and caches


@pytest.mark.parametrize("split", [[n, T - n] for n in range(T + 1)] + [[1] * T, [2, 0, 3, 2]])
def test_prefill_and_decode_equal_one_pass_at_every_split(model, tokens, split):
    want = model(tokens)
    assert want.std() > 0.5
    torch.testing.assert_close(run(model, tokens, split), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("split", [[64, 8], [65, 7], [3, 64, 5], [70, 1, 1]])
def test_splits_of_a_sequence_longer_than_a_chunk(model, split):
    tokens = torch.randint(97, (2, 72), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(run(model, tokens, split), model(tokens), rtol=0, atol=1e-11)


@pytest.mark.parametrize("split", [[T], [3, 1, 3]])
def test_each_sequence_of_a_batch_is_on_its_own(model, tokens, split):
    alone = torch.cat([run(model, row[None], split) for row in tokens])
    torch.testing.assert_close(run(model, tokens, split), alone, rtol=0, atol=1e-11)


def test_a_later_token_does_not_move_earlier_logits(model, tokens):
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 97
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=0, atol=1e-11)
    assert (before[:, -1] != after[:, -1]).any()


@torch.no_grad()
def test_layers_read_and_are_read_by_k3s_schedule(model, tokens):
    """Layer by layer: a block begins before layers 0, 2 and 4; each layer is mixed into twice."""
    finished, p = [], model.embed_tokens(tokens)
    for i, layer in enumerate(model.layers):
        h = layer.self_attention_res([*finished, p])
        if i % 2 == 0:
            finished, p = [*finished, p], 0
        p = p + layer.attention(h)
        p = p + layer.feed_forward(layer.mlp_res([*finished, p]))
    assert len(finished) == 3
    want = model.lm_head(model.norm(model.output_attn_res([*finished, p])))
    torch.testing.assert_close(model(tokens), want, rtol=0, atol=1e-11)


@torch.no_grad()
def test_each_layer_has_its_own_kind_of_cache_and_counts_its_own_tokens(model, tokens):
    """C27: prefill 5, decode 1."""
    cache = model.init_cache(B, capacity=6)
    kinds = [LatentCache, RecurrentCache, RecurrentCache, LatentCache, LatentCache]
    assert [type(layer) for layer in cache] == kinds
    assert cache[0].rows.shape == (B, 6, 14 + 4) and cache[1].S.shape == (B, 3, 8, 8)
    sizes = [layer.nbytes for layer in cache]
    model(tokens[:, :5], cache)
    model(tokens[:, 5:6], cache)
    assert [layer.length for layer in cache] == [6] * 5
    assert [layer.nbytes for layer in cache] == sizes
    assert model.init_cache(B)[0].capacity == SMALL.n_ctx


@torch.no_grad()
def test_an_overflow_is_refused_before_any_layer_is_written(model, tokens):
    """C25: also by the last layer, when KDA before it could have gone on for ever."""
    model = make(dataclasses.replace(SMALL, full_attn_layers=(5,)))
    cache = model.init_cache(B, capacity=5)
    model(tokens[:, :4], cache)
    before = [copy.deepcopy(vars(layer)) for layer in cache]
    with pytest.raises(ValueError, match=r"cache\[4\] overflow: capacity 5, length 4, new 2"):
        model(tokens[:, 4:6], cache)
    same(cache, before)
    got = model(tokens[:, 4:5], cache)
    torch.testing.assert_close(got, model(tokens[:, :5])[:, 4:], rtol=0, atol=1e-11)
    cache = model.init_cache(B, capacity=90)
    model(tokens, cache)
    with pytest.raises(ValueError, match="7 cached.*77 new.*n_ctx=80"):
        model(tokens.repeat(1, 11), cache)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (0, 1)])
def test_an_empty_sequence_or_batch_gives_empty_logits(model, shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    with torch.no_grad():
        assert model(tokens).shape == (*shape, 97)
        assert model(tokens, model.init_cache(shape[0])).shape == (*shape, 97)


def test_bad_tokens_and_caches_are_refused(model, tokens):
    """Of all that Kimi Linear refuses, in the same lines, one each."""
    for bad, message in [
        (tokens[0], r"tokens has shape \(7,\)"),
        (tokens.int(), "tokens has dtype torch.int32"),
        (tokens + 97, "tokens holds id"),
    ]:
        for call in (model, lambda tokens: model.generate(tokens, 1)):
            with pytest.raises(ValueError, match=f"^{message}"):
                call(bad)
    with pytest.raises(ValueError, match="^cache has 4 layers, the model 5"):
        model(tokens, model.init_cache(B)[:4])


# Weights


def test_scaling_any_tensor_changes_the_logits(model, tokens):
    """C51: weights and router biases. Half of the rows: a norm takes back a factor of all.

    So it does with all experts' down_proj. Layer 0's first mixer has one source, the embedding, of
    which its share is 1 whatever the query.
    """
    unused = {"layers.0.self_attention_res.query", "layers.0.self_attention_res.norm.weight"}
    with torch.no_grad():
        want = model(tokens)
        for name, w in model.state_dict().items():
            half, before = w[: (len(w) + 1) // 2], w.clone()
            half.mul_(30 if name.endswith("e_score_correction_bias") else 3)
            assert ((model(tokens) - want).abs().max() < 1e-6) == (name in unused), name
            w.copy_(before)
    # A layer's norms and mixers, MLA, KDA, dense, experts; embedding, output mixer, norm and head.
    assert len(model.state_dict()) == 5 * (2 + 4) + 3 * 8 + 2 * 14 + 3 + 4 * 11 + 5


def test_gradients_reach_every_weight_that_is_used(model, tokens):
    model(tokens).square().mean().backward()
    for name, p in model.named_parameters():
        used = not name.startswith("layers.0.self_attention_res")
        assert p.grad.isfinite().all() and (p.grad.abs().sum() > 0) == used, name


@torch.no_grad()
@pytest.mark.parametrize("split", [[T], [4, 1, 1, 1]])
def test_bfloat16(tokens, split):
    model = make(dtype=torch.float32).bfloat16()
    wide = ("A_log", "dt_bias", "e_score_correction_bias")
    for name, x in model.state_dict().items():
        want = torch.float32 if name.endswith(wide) else torch.bfloat16
        assert x.dtype == want, name
    cache = model.init_cache(B)
    assert cache[0].rows.dtype == torch.bfloat16 and cache[1].S.dtype == torch.float32
    logits = run(model, tokens, split)
    assert logits.dtype == torch.bfloat16
    # The same rounded weights. A token whose choice of experts rounding tips is far off.
    want = model.double()(tokens)
    errors = (logits.double() - want).square().mean(-1).sqrt().flatten() / want.std()
    assert errors.median() < 0.05


def test_it_learns_one_sequence_by_heart(tokens):
    torch.manual_seed(0)
    model = KimiK3(MINI)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    for use_cache in (True, False):  # C26
        assert torch.equal(model.generate(tokens[:, :1], 6, use_cache=use_cache), tokens)

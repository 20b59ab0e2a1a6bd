"""What KimiLinear and KimiK3, of two kinds of layers, promise alike beyond what every model does."""

import dataclasses

import pytest
import torch
from model_cases import HYBRIDS, MODELS, B, T, held, make, name, run, same

from gpt2_to_k3.layers import KimiDeltaAttention, LatentCache, RecurrentCache
from gpt2_to_k3.models import KimiK3, KimiLinear, kimi_k3, kimi_linear


@pytest.fixture(params=HYBRIDS, ids=name)
def config(request):
    return request.param


# Sequences and caches


@pytest.mark.parametrize("split", [[64, 8], [65, 7], [3, 64, 5], [70, 1, 1]])
def test_splits_of_a_sequence_longer_than_a_chunk(model, split):
    tokens = torch.randint(97, (2, 72), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(run(model, tokens, split), model(tokens), rtol=0, atol=1e-11)


def test_the_order_of_earlier_tokens_matters(config, model, tokens):
    """Without positions only KDA knows it."""
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6]]
    assert (model(tokens) - model(swapped))[:, -1].abs().max() > 1e-3
    # One layer of MLA alone does not.
    model = make(dataclasses.replace(config, num_hidden_layers=1, full_attn_layers=(1,)))
    got, want = model(swapped)[:, -1], model(tokens)[:, -1]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_each_layer_has_its_own_kind_of_cache(config, model):
    cache = model.init_cache(B, capacity=6)
    for number, layer in enumerate(cache, 1):
        mla = number in config.full_attn_layers
        assert type(layer) is (LatentCache if mla else RecurrentCache)
        assert (layer.rows if mla else layer.S).shape == ((B, 6, 14 + 4) if mla else (B, 3, 8, 8))


@torch.no_grad()
def test_an_overflow_is_refused_before_any_layer_is_written(config, tokens):
    """C25: also by the last layer, when KDA before it could have gone on for ever."""
    L = config.num_hidden_layers
    model = make(dataclasses.replace(config, full_attn_layers=(L,)))
    cache = model.init_cache(B, capacity=5)
    model(tokens[:, :4], cache)
    before = held(cache)
    message = rf"cache\[{L - 1}\] overflow: capacity 5, length 4, new 2"
    with pytest.raises(ValueError, match=message):
        model(tokens[:, 4:6], cache)
    same(cache, before)
    got = model(tokens[:, 4:5], cache)
    torch.testing.assert_close(got, model(tokens[:, :5])[:, 4:], rtol=0, atol=1e-11)
    assert [layer.length for layer in cache] == [5] * L


@torch.no_grad()
def test_a_cache_that_does_not_fit_is_refused_before_it_is_written(config, model, tokens):
    """Any layer of it, the last one too. In both models the first is MLA and the second KDA."""
    L, (latent, recurrent) = config.num_hidden_layers, ("LatentCache", "RecurrentCache")
    cache, used = model.init_cache(B), model.init_cache(B)
    model(tokens, used)
    before = held(used)
    last = L - 1
    kind, i = (latent, 0) if type(cache[last]) is RecurrentCache else (recurrent, 1)
    for bad, message in [
        (cache[:last], f"cache has {last} layers, the model {L}"),
        (
            [cache[1], cache[0], *cache[2:]],
            rf"cache\[0\] is a {recurrent}, the layer has a {latent}",
        ),
        ([*cache[:last], cache[i]], rf"cache\[{last}\] is a {kind}, the layer has a "),
        ([*cache[:last], used[last]], rf"cache\[{last}\] holds 7 tokens, cache\[0\] 0"),
        (model.init_cache(2), r"cache\[0\] has batch 2, tokens has 3"),
        ([*cache[:last], model.init_cache(2)[last]], rf"cache\[{last}\] has batch 2, tokens has 3"),
        (make(config, torch.float32).init_cache(B), "rows has dtype torch.float64, expected"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            model(tokens, bad)
    same(cache, held(model.init_cache(B)))
    same(used, before)


# Weights


def unused(key):
    """K3's first mixer has one source, the embedding, of which its share is 1 whatever the query."""
    return key.startswith("layers.0.self_attention_res")


def test_scaling_any_tensor_changes_the_logits(model, tokens):
    """C51: weights and router biases.

    Half of the rows: a norm may take back a factor of all, as K3's does of all experts' down_proj.
    """
    with torch.no_grad():
        want = model(tokens)
        for key, w in model.state_dict().items():
            half, before = w[: (len(w) + 1) // 2], w.clone()
            half.mul_(30 if key.endswith("e_score_correction_bias") else 3)
            assert ((model(tokens) - want).abs().max() < 1e-6) == unused(key), key
            w.copy_(before)
    # Embedding, norm, head and K3's output mixer; a layer's norms and mixers; MLA, KDA, dense and
    # experts.
    counts = {
        KimiLinear: 3 + 4 * 2 + 2 * 5 + 2 * 15 + 3 + 3 * 8,
        KimiK3: 5 + 5 * (2 + 4) + 3 * 8 + 2 * 14 + 3 + 4 * 11,
    }
    assert len(model.state_dict()) == counts[type(model)]


def test_gradients_reach_every_weight_that_is_used(model, tokens):
    model(tokens).square().mean().backward()
    for key, p in model.named_parameters():
        assert p.grad.isfinite().all() and (p.grad.abs().sum() == 0) == unused(key), key


@torch.no_grad()
@pytest.mark.parametrize("split", [[T], [4, 1, 1, 1]])
def test_bfloat16(config, tokens, split):
    model = make(config, torch.float32).bfloat16()
    wide = ("A_log", "dt_bias", "e_score_correction_bias")
    for key, x in model.state_dict().items():
        want = torch.float32 if key.endswith(wide) else torch.bfloat16
        assert x.dtype == want, key
    cache = model.init_cache(B)
    assert cache[0].rows.dtype == torch.bfloat16 and cache[1].S.dtype == torch.float32
    logits = run(model, tokens, split)
    assert logits.dtype == torch.bfloat16
    # The same rounded weights. A token whose choice of experts rounding tips is far off.
    want = model.double()(tokens)
    errors = (logits.double() - want).square().mean(-1).sqrt().flatten() / want.std()
    assert errors.median() < 0.05


# Before the first token: configuration, counts, initial weights


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(hidden_size=0), "hidden_size must be an integer >= 1, got 0"),
        (dict(num_experts=8.0), "num_experts must be an integer >= 1, got 8.0"),
        (dict(vocab_size=True), "vocab_size must be an integer >= 1, got True"),
        (dict(num_shared_experts=0), "num_shared_experts must be an integer >= 1, got 0"),
        (dict(first_k_dense_replace=-1), "first_k_dense_replace must be an integer >= 0, got -1"),
        (dict(first_k_dense_replace=6), "first_k_dense_replace=6 is more than num_hidden_layers=5"),
        (dict(full_attn_layers=(0, 3)), r"full_attn_layers must be .* from 1 to 5, got \(0, 3\)"),
        (dict(full_attn_layers=(3, 6)), r"full_attn_layers must be .* from 1 to 5, got \(3, 6\)"),
        (dict(full_attn_layers=(3, 1)), r"full_attn_layers must be a rising tuple .*got \(3, 1\)"),
        (dict(full_attn_layers=(3, 3)), r"full_attn_layers must be a rising tuple .*got \(3, 3\)"),
        (dict(full_attn_layers=(1.0, 3)), r"full_attn_layers must be .*got \(1.0, 3\)"),
        (dict(full_attn_layers=[3]), r"full_attn_layers must be a rising tuple .*got \[3\]"),
        (dict(num_experts_per_token=13), "num_experts_per_token=13 is more than num_experts=12"),
    ],
)
def test_a_bad_field_is_named(config, changes, message):
    config = dataclasses.replace(config, num_hidden_layers=5, num_experts=12)
    with pytest.raises(ValueError, match=f"^{message}"):
        dataclasses.replace(config, **changes)


SIZES = {
    "release": lambda config: type(config)(),
    "mini": lambda config: type(config).mini(),
    "small": lambda config: config,
    "KDA alone, no dense layer": lambda config: dataclasses.replace(
        config, full_attn_layers=(), first_k_dense_replace=0
    ),
    "MLA alone, all dense": lambda config: dataclasses.replace(
        config, num_hidden_layers=3, full_attn_layers=(1, 2, 3), first_k_dense_replace=3
    ),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_every_term_of_the_count_is_the_models(config, size):
    config = size(config)
    with torch.device("meta"):
        model = MODELS[type(config)](config)
    count_parameters = {KimiLinear: kimi_linear, KimiK3: kimi_k3}[type(model)].count_parameters
    got = dict.fromkeys(count_parameters(config), 0)
    for key, x in [*model.named_parameters(), *model.named_buffers()]:
        got[term(model, key)] += x.numel()
    assert got == count_parameters(config)
    active = count_parameters(config, active=True)
    share = config.num_experts_per_token / config.num_experts
    assert active.pop("routed experts") == got.pop("routed experts") * share
    assert active == got


def term(model, key):
    for part, of in {
        "embed_tokens": "embedding", "lm_head": "head", "_res.": "attention residuals",
        "layernorm.weight": "norms", "mlp.gate.": "routers", "mlp.routed": "latent projections",
        "mlp.experts": "routed experts", "shared_experts": "shared experts",
        ".mlp.": "dense feed-forward",
    }.items():  # fmt: skip
        if part in key and "self_attn." not in key:
            return of
    if key == "norm.weight":
        return "norms"
    layer = model.layers[int(key.split(".")[1])]
    return "KDA" if type(layer.self_attn) is KimiDeltaAttention else "MLA"


def test_weights_start_finite_and_in_the_published_ranges(config):
    """C53: the same weights from the same seed, whatever was in memory before.

    K3's queries at 0 make every mixer a mean; its A_log start at 0.
    """
    config = dataclasses.replace(type(config).mini(), hidden_size=64)
    states = []
    for _ in range(2):
        junk = [torch.full((1 << n,), torch.nan) for n in range(4, 20)]
        del junk
        torch.manual_seed(0)
        model = MODELS[type(config)](config)
        states.append(model.state_dict())
    largest_A = 1 if type(model) is KimiK3 else 16
    for key, x in states[0].items():
        assert x.isfinite().all() and torch.equal(x, states[1][key]), key
        if key.endswith("A_log"):
            assert (x >= 0).all() and (x.exp() <= largest_A * 1.0001).all(), key
        elif key.endswith("dt_bias"):
            dt = torch.nn.functional.softplus(x)
            assert (dt > 0.999e-3).all() and (dt < 0.1001).all(), key
        elif key.endswith(("query", "e_score_correction_bias")):
            assert (x == 0).all(), key
        elif key.endswith("norm.weight"):
            assert (x == 1).all(), key
        elif "conv1d" in key:
            assert x.abs().max() <= 0.5 and x.std() > 0.2, key
        else:
            off = 5 * x.numel() ** -0.5  # five standard errors of a mean of as many numbers
            assert x.std().item() == pytest.approx(0.02, rel=off), key
            assert x.mean().abs().item() < 0.02 * off, key
    assert model(torch.arange(100)[None]).isfinite().all()

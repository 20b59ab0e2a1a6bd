import copy
import dataclasses

import pytest
import torch

from gpt2_to_k3.layers import LatentCache, RecurrentCache
from gpt2_to_k3.models import KimiLinear, KimiLinearConfig

MINI = KimiLinearConfig.mini()
# Every kind of layer, no two widths equal.
SMALL = KimiLinearConfig(
    vocab_size=97, n_ctx=80, hidden_size=20, num_hidden_layers=4, full_attn_layers=(1, 3),
    linear_num_heads=3, linear_head_dim=8, num_attention_heads=5, kv_lora_rank=14,
    qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, intermediate_size=37,
    moe_intermediate_size=11, num_experts=9, num_experts_per_token=3, num_shared_experts=2,
)  # fmt: skip
B, T = 3, 7


def make(config=SMALL, dtype=torch.float64):
    """A model whose logits, decays, gates and choices of experts spread widely."""
    torch.manual_seed(0)
    model = KimiLinear(config)
    for name, x in model.state_dict().items():
        if name.endswith(("A_log", "dt_bias")):
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


def held(cache):
    """Copies of everything a cache holds."""
    return [copy.deepcopy(vars(layer)) for layer in cache]


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


def test_the_order_of_earlier_tokens_matters(model, tokens):
    """Without positions only KDA knows it."""
    swapped = tokens[:, [1, 0, 2, 3, 4, 5, 6]]
    assert (model(tokens) - model(swapped))[:, -1].abs().max() > 1e-3
    # One layer of MLA alone does not.
    model = make(dataclasses.replace(SMALL, num_hidden_layers=1, full_attn_layers=(1,)))
    got, want = model(swapped)[:, -1], model(tokens)[:, -1]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


@torch.no_grad()
def test_each_layer_has_its_own_kind_of_cache_and_counts_its_own_tokens(model, tokens):
    """C27: prefill 5, decode 1."""
    cache = model.init_cache(B, capacity=6)
    assert [type(layer) for layer in cache] == [LatentCache, RecurrentCache] * 2
    assert cache[0].rows.shape == (B, 6, 14 + 4) and cache[1].S.shape == (B, 3, 8, 8)
    sizes = [layer.nbytes for layer in cache]
    model(tokens[:, :5], cache)
    model(tokens[:, 5:6], cache)
    assert [layer.length for layer in cache] == [6] * 4
    assert [layer.nbytes for layer in cache] == sizes
    assert model.init_cache(B)[0].capacity == SMALL.n_ctx


def test_a_token_of_the_released_model_takes_4032_numbers():
    with torch.device("meta"):
        model = KimiLinear(KimiLinearConfig()).bfloat16()
    one, two = (model.init_cache(1, capacity=n) for n in (1, 2))
    grown = [b.nbytes - a.nbytes for a, b in zip(one, two, strict=True)]
    assert sum(grown) == 4032 * 2 and grown.count(576 * 2) == 7 and grown.count(0) == 20
    states = sum(layer.S.nbytes for layer in one if type(layer) is RecurrentCache)
    assert states == 20 * 32 * 128 * 128 * 4


@torch.no_grad()
def test_an_overflow_is_refused_before_any_layer_is_written(model, tokens):
    """C25: also by the last layer, when KDA before it could have gone on for ever."""
    model = make(dataclasses.replace(SMALL, full_attn_layers=(4,)))
    cache = model.init_cache(B, capacity=5)
    model(tokens[:, :4], cache)
    before = held(cache)
    with pytest.raises(ValueError, match=r"cache\[3\] overflow: capacity 5, length 4, new 2"):
        model(tokens[:, 4:6], cache)
    same(cache, before)
    model(tokens[:, 4:5], cache)
    assert [layer.length for layer in cache] == [5] * 4


@torch.no_grad()
@pytest.mark.parametrize("full", [(1, 3), ()])
def test_the_context_is_never_passed(tokens, full):
    """C25: offset + T counts; also where no cache has a capacity."""
    model = make(dataclasses.replace(SMALL, n_ctx=10, full_attn_layers=full))
    cache = model.init_cache(B, capacity=20)
    model(tokens, cache)
    before = held(cache)
    with pytest.raises(ValueError, match="7 cached.*4 new.*n_ctx=10"):
        model(tokens[:, :4], cache)
    same(cache, before)
    assert model(tokens[:, :3], cache).shape == (B, 3, 97)
    with pytest.raises(ValueError, match="0 cached.*14 new.*n_ctx=10"):
        model(torch.cat([tokens, tokens], dim=1))


@torch.no_grad()
def test_a_cache_that_does_not_fit_is_refused_before_it_is_written(model, tokens):
    cache, used = model.init_cache(B), model.init_cache(B)
    model(tokens, used)
    before = held(used)
    for bad, message in [
        (cache[:3], "cache has 3 layers, the model 4"),
        (cache[::-1], r"cache\[0\] is a RecurrentCache, the layer has a LatentCache"),
        ([*cache[:3], cache[2]], r"cache\[3\] is a LatentCache, the layer has a RecurrentCache"),
        ([*cache[:3], used[3]], r"cache\[3\] holds 7 tokens, cache\[0\] 0"),
        (model.init_cache(2), r"cache\[0\] has batch 2, tokens has 3"),
        ([*cache[:3], model.init_cache(2)[3]], r"cache\[3\] has batch 2, tokens has 3"),
        (make(dtype=torch.float32).init_cache(B), "rows has dtype torch.float64, expected"),
    ]:
        with pytest.raises(ValueError, match=f"^{message}"):
            model(tokens, bad)
    same(cache, held(model.init_cache(B)))
    same(used, before)


@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (0, 1)])
def test_an_empty_sequence_or_batch_gives_empty_logits(model, shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    with torch.no_grad():
        assert model(tokens).shape == (*shape, 97)
        assert model(tokens, model.init_cache(shape[0])).shape == (*shape, 97)


@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.zeros(5, dtype=torch.int64), r"tokens has shape \(5,\)"),
        (torch.zeros(1, 5, 2, dtype=torch.int64), r"tokens has shape \(1, 5, 2\)"),
        (torch.zeros(1, 5), "tokens has dtype torch.float32"),
        (torch.zeros(1, 5, dtype=torch.int32), "tokens has dtype torch.int32"),
        (torch.tensor([[0, 97]]), "tokens holds id 97, vocab_size is 97"),
        (torch.tensor([[0, -1]]), "tokens holds id -1"),
        (torch.zeros(1, 5, dtype=torch.int64, device="meta"), "tokens is on meta"),
    ],
)
def test_bad_tokens_are_refused(model, tokens, message):
    for call in (model, lambda tokens: model.generate(tokens, 1)):
        with pytest.raises(ValueError, match=f"^{message}"):
            call(tokens)


# Weights


def test_scaling_any_tensor_changes_the_logits(model, tokens):
    """C51: weights and router biases. Half of the rows: a norm may take back a factor of all."""
    with torch.no_grad():
        want = model(tokens)
        for name, w in model.state_dict().items():
            half, before = w[: (len(w) + 1) // 2], w.clone()
            half.mul_(30 if name.endswith("e_score_correction_bias") else 3)
            assert (model(tokens) - want).abs().max() > 1e-6, name
            w.copy_(before)
    assert len(model.state_dict()) == 2 + 1 + 4 * 2 + 2 * 5 + 2 * 15 + 3 + 3 * 8


def test_gradients_reach_every_weight(model, tokens):
    model(tokens).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.grad.isfinite().all() and p.grad.abs().sum() > 0, name


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
    model = KimiLinear(MINI)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert torch.equal(model.generate(tokens[:, :1], 6), tokens)


# Generation


def test_greedy_ids_agree_with_and_without_a_cache_and_on_a_second_call(model, tokens):
    """C26."""
    runs = [model.generate(tokens, 5, use_cache=c) for c in (True, False, True, False)]
    assert runs[0].shape == (3, 12) and torch.equal(runs[0][:, :7], tokens)
    assert all(torch.equal(r, runs[0]) for r in runs)
    assert torch.equal(runs[0][:, 7:], model(runs[0])[:, 6:-1].argmax(-1))
    assert len(set(runs[0][:, 7:].flatten().tolist())) > 3  # not one id over and over


@pytest.mark.parametrize("top_k", [None, 3])
def test_sampling_is_reproducible_and_equal_with_and_without_a_cache(model, tokens, top_k):
    def sample(seed, use_cache):
        g = torch.Generator().manual_seed(seed)
        options = dict(use_cache=use_cache, temperature=0.8, top_k=top_k, generator=g)
        return model.generate(tokens, 10, **options)

    first = sample(0, True)
    assert torch.equal(sample(0, True), first) and torch.equal(sample(0, False), first)
    assert not torch.equal(sample(1, True), first)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_may_fill_the_context_but_not_pass_it(tokens, use_cache):
    """C25: context 10, prompt 5, generate 10."""
    model = make(dataclasses.replace(SMALL, n_ctx=10))
    calls = []
    model.embed_tokens.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="prompt of 5.*max_new_tokens=10.*n_ctx=10"):
        model.generate(tokens[:, :5], 10, use_cache=use_cache)
    assert calls == []
    assert model.generate(tokens[:, :5], 5, use_cache=use_cache).shape == (B, 10)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(tokens[:, :0], 1)


def test_generate_leaves_no_trace(model, tokens):
    state, prompt = copy.deepcopy(model.state_dict()), tokens.clone()
    assert torch.equal(model.generate(tokens, 3), model.generate(tokens, 3))
    assert torch.equal(run(model, tokens, [3, 1, 3]), run(model, tokens, [3, 1, 3]))
    assert torch.equal(tokens, prompt) and torch.is_grad_enabled() and model.training
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())

"""What GPT2, KimiLinear and KimiK3 promise alike: sequences, caches, tokens, generation."""

import copy
import dataclasses

import pytest
import torch
from model_cases import HYBRIDS, MODELS, SMALL, B, T, held, make, name, run, same

from gpt2_to_k3.models import GPT2


@pytest.fixture(params=SMALL, ids=name)
def config(request):
    return request.param


# Sequences and caches


@pytest.mark.parametrize("split", [[n, T - n] for n in range(T + 1)] + [[1] * T, [2, 0, 3, 2]])
def test_prefill_and_decode_equal_one_pass_at_every_split(model, tokens, split):
    want = model(tokens)
    assert want.std() > 0.5
    torch.testing.assert_close(run(model, tokens, split), want, rtol=0, atol=1e-11)


@pytest.mark.parametrize("split", [[T], [3, 1, 3]])
def test_each_sequence_of_a_batch_is_on_its_own(model, tokens, split):
    alone = torch.cat([run(model, row[None], split) for row in tokens])
    torch.testing.assert_close(run(model, tokens, split), alone, rtol=0, atol=1e-11)


def test_a_later_token_does_not_move_earlier_logits(model, tokens):
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 97
    before, after = model(tokens), model(changed)
    # An expert that gets another number of tokens may round them differently.
    atol = 0 if type(model) is GPT2 else 1e-11
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=0, atol=atol)
    assert (before[:, -1] != after[:, -1]).any()


@torch.no_grad()
def test_each_layer_counts_its_own_tokens(model, tokens):
    """C27: prefill 5, decode 1."""
    cache = model.init_cache(B, capacity=6)
    sizes = [layer.nbytes for layer in cache]
    model(tokens[:, :5], cache)
    model(tokens[:, 5:6], cache)
    assert [layer.length for layer in cache] == [6] * len(cache)
    assert [layer.nbytes for layer in cache] == sizes
    assert model.init_cache(B)[0].capacity == model.config.n_ctx


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [dataclasses.replace(config, n_ctx=10) for config in SMALL]
    + [dataclasses.replace(config, n_ctx=10, full_attn_layers=()) for config in HYBRIDS],
    ids=name,
)
def test_the_context_is_never_passed(model, tokens):
    """C25: offset + T counts; also where no cache has a capacity."""
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
@pytest.mark.parametrize("shape", [(3, 0), (0, 5), (0, 1)])
def test_an_empty_sequence_or_batch_gives_empty_logits(model, shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
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


def test_it_learns_one_sequence_by_heart(config, tokens):
    torch.manual_seed(0)
    model = MODELS[type(config)](type(config).mini())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    for use_cache in (True, False):
        assert torch.equal(model.generate(tokens[:, :1], 6, use_cache=use_cache), tokens)


# Generation


def test_greedy_ids_agree_with_and_without_a_cache_and_on_a_second_call(model, tokens):
    """C26."""
    runs = [model.generate(tokens, 5, use_cache=c) for c in (True, False, True, False)]
    assert runs[0].shape == (3, 12) and torch.equal(runs[0][:, :7], tokens)
    assert all(torch.equal(r, runs[0]) for r in runs)
    assert torch.equal(runs[0][:, 7:], model(runs[0])[:, 6:-1].argmax(-1))
    assert len(set(runs[0][:, 7:].flatten().tolist())) > 3  # not one id over and over


@pytest.mark.parametrize("top_k", [None, 3, 1000])
def test_sampling_is_reproducible_and_equal_with_and_without_a_cache(model, tokens, top_k):
    def sample(seed, use_cache):
        g = torch.Generator().manual_seed(seed)
        options = dict(use_cache=use_cache, temperature=0.8, top_k=top_k, generator=g)
        return model.generate(tokens, 20, **options)

    first = sample(0, True)
    assert torch.equal(sample(0, True), first) and torch.equal(sample(0, False), first)
    assert not torch.equal(sample(1, True), first)


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_may_fill_the_context_but_not_pass_it(config, tokens, use_cache):
    """C25: context 10, prompt 5, generate 10."""
    model, calls = make(dataclasses.replace(config, n_ctx=10)), []
    embedding = next(model.children())
    embedding.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="prompt of 5.*max_new_tokens=10.*n_ctx=10"):
        model.generate(tokens[:, :5], 10, use_cache=use_cache)
    assert calls == []
    assert model.generate(tokens[:, :5], 5, use_cache=use_cache).shape == (B, 10)
    assert len(calls) == 5
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.generate(tokens[:, :0], 1)


@pytest.mark.parametrize("training", [True, False])
def test_generate_leaves_no_trace(model, tokens, training):
    model.train(training)
    state, prompt = copy.deepcopy(model.state_dict()), tokens.clone()
    out = model.generate(tokens, 3)
    assert torch.equal(model.generate(tokens, 3), out)
    assert torch.equal(run(model, tokens, [3, 1, 3]), run(model, tokens, [3, 1, 3]))
    assert not out.is_inference() and torch.is_grad_enabled()
    assert all(m.training is training for m in model.modules())
    assert torch.equal(tokens, prompt)
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model(tokens).requires_grad


# Failures


@torch.no_grad()
def test_after_any_failure_the_cache_is_as_it_was(model, tokens, monkeypatch):
    """Also when a layer fails after others have written: an error, or an interrupt."""
    cache, other = model.init_cache(B), model.init_cache(B)
    for c in (cache, other):
        model(tokens[:, :3], c)
    layers = model.h if type(model) is GPT2 else model.layers

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(layers[-1].mlp, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(tokens[:, 3:], cache)
    assert [layer.length for layer in cache] == [3] * len(cache)
    assert torch.equal(model(tokens[:, 3:], cache), model(tokens[:, 3:], other))
    same(cache, held(other))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda cache: cache[0], "cache must be a list of one a layer, got"),
        (lambda cache: [None, *cache[1:]], r"cache\[0\] is a NoneType, the layer has a"),
        (lambda cache: [*cache[:-1], "x"], r"cache\[\d\] is a str, the layer has a"),
    ],
)
def test_what_is_no_cache_is_refused_by_name(model, tokens, bad, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        model(tokens, bad(model.init_cache(B)))


def test_one_cache_for_two_layers_is_refused(model, tokens):
    cache = model.init_cache(B)
    first = next(c for c in cache[:-1] if type(c) is type(cache[-1]))
    with pytest.raises(ValueError, match="^cache holds one layer's cache twice"):
        model(tokens, [*cache[:-1], first])


def test_tokens_that_are_no_tensor_are_refused(model, tokens):
    for bad in (tokens.tolist(), tokens.numpy()):
        with pytest.raises(ValueError, match="^tokens must be a tensor, got (list|ndarray)"):
            model(bad)


# Autocast and ties


def test_autocast_trains_and_decodes(config, tokens):
    """Master weights in float32, projections in bfloat16; what a cache holds is a projection's."""
    model = make(config, torch.float32)
    want = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        got = model(tokens)
        model(tokens).float().square().mean().backward()
        with torch.no_grad():
            pieces = run(model, tokens, [4, 1, 1, 1])
        ids = model.generate(tokens, 4)
    assert ids.shape == (B, T + 4)
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    # Not by much: another choice of experts for one token is within 16 bits.
    for found in (got, pieces):
        assert ((found - want).abs() < 0.1 * want.std()).float().mean() > 0.7
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="float64"):
        model(tokens, make(config, torch.float64).init_cache(B))


def test_top_k_breaks_ties(model, tokens):
    """Of equal logits as many as k, and not all: in bfloat16 they are often equal."""
    head = model.wte if type(model) is GPT2 else model.lm_head
    torch.nn.init.zeros_(head.weight)
    generator = torch.Generator().manual_seed(0)
    options = dict(temperature=1.0, generator=generator)
    seen = [model.generate(tokens, 20, top_k=k, **options)[:, T:].unique().numel() for k in (1, 3)]
    assert seen == [1, 3]

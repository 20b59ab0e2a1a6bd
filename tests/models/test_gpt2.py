import dataclasses

import pytest
import torch

from gpt2_to_k3.models import GPT2, GPT2Config

MINI = GPT2Config.mini()


@pytest.fixture
def model():
    """A mini GPT-2 in float64 whose logits spread over several units, biases included."""
    torch.manual_seed(0)
    model = GPT2(MINI).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.1)
            elif "ln_" not in name:
                p.mul_(10)
    return model


@pytest.fixture
def tokens():
    return torch.randint(256, (3, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def run(model, tokens, lengths):
    cache = model.init_cache(len(tokens))
    return torch.cat([model(piece, cache) for piece in tokens.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize(
    "name, count",
    [
        ("gpt2", 124_439_808),
        ("gpt2_medium", 354_823_168),
        ("gpt2_large", 774_030_080),
        ("gpt2_xl", 1_557_611_200),
    ],
)
def test_published_sizes_count_as_published(name, count):
    with torch.device("meta"):
        model = GPT2(getattr(GPT2Config, name)())
    assert model.num_parameters() == count


def test_the_default_config_is_the_124m_model():
    assert GPT2Config() == GPT2Config.gpt2()


def test_a_tied_tensor_counts_once(model):
    count = model.num_parameters()
    model.h[1].mlp.c_fc.weight = model.h[0].mlp.c_fc.weight
    assert model.num_parameters() == count - 4 * 32 * 32


def test_the_meta_device_gives_shapes():
    with torch.device("meta"):
        tokens = torch.zeros(2, 5, dtype=torch.int64)
        assert GPT2(MINI)(tokens).shape == (2, 5, 256)


def test_weights_start_as_in_the_release():
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(MINI, n_embd=64))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "ln_" in name:
            assert (p == 1).all(), name
        else:
            std = 0.01 if name == "wpe.weight" else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.05), name
            assert p.mean().abs().item() < 0.05 * std, name


@pytest.mark.parametrize("split", [[n, 7 - n] for n in range(8)] + [[1] * 7])
def test_prefill_and_decode_equal_one_pass_at_every_split(model, tokens, split):
    want = model(tokens)
    torch.testing.assert_close(run(model, tokens, split), want, rtol=0, atol=1e-11)


def test_a_later_token_does_not_move_earlier_logits(model, tokens):
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 256
    assert torch.equal(model(tokens)[:, :-1], model(changed)[:, :-1])


def test_each_layer_counts_its_own_tokens(model, tokens):
    """C27: prefill 5, decode 1."""
    cache = model.init_cache(3)
    with torch.no_grad():
        model(tokens[:, :5], cache)
        model(tokens[:, 5:6], cache)
    assert [layer.length for layer in cache] == [6, 6]


def test_greedy_ids_agree_with_and_without_a_cache_and_on_a_second_call(model, tokens):
    """C26."""
    runs = [model.generate(tokens, 5, use_cache=c) for c in (True, False, True, False)]
    assert runs[0].shape == (3, 12) and torch.equal(runs[0][:, :7], tokens)
    assert all(torch.equal(r, runs[0]) for r in runs)
    assert len(set(runs[0][:, 7:].flatten().tolist())) > 3  # not one id over and over


def test_greedy_takes_the_most_likely_token(model, tokens):
    out = model.generate(tokens, 4)
    logits = model(out)
    assert torch.equal(out[:, 7:], logits[:, 6:-1].argmax(-1))


@pytest.mark.parametrize("top_k", [None, 3, 1000])
def test_sampling_is_reproducible_and_equal_with_and_without_a_cache(model, tokens, top_k):
    def sample(seed, use_cache):
        g = torch.Generator().manual_seed(seed)
        options = dict(use_cache=use_cache, temperature=0.8, top_k=top_k, generator=g)
        return model.generate(tokens, 20, **options)

    first = sample(0, True)
    assert torch.equal(sample(0, True), first) and torch.equal(sample(0, False), first)
    assert not torch.equal(sample(1, True), first)


def test_sampling_follows_the_softmax_at_its_temperature(model, tokens):
    model.wte.weight.data.mul_(0.2)  # flat enough that many tokens are drawn
    prompt = tokens[:1].expand(5000, 7)
    g = torch.Generator().manual_seed(0)
    drawn = model.generate(prompt, 1, temperature=2.0, generator=g)[:, -1]
    want = (model(tokens[:1])[0, -1] / 2).softmax(-1)
    share = torch.bincount(drawn, minlength=256) / 5000
    assert want.max() < 0.5 and (share - want).abs().max() < 0.03


def test_top_k_keeps_the_k_most_likely(model, tokens):
    prompt = tokens[:1].expand(2000, 7)
    g = torch.Generator().manual_seed(0)
    drawn = model.generate(prompt, 1, temperature=50.0, top_k=3, generator=g)[:, -1]
    best = model(tokens[:1])[0, -1].topk(3).indices
    assert set(drawn.tolist()) == set(best.tolist())


def test_a_tiny_temperature_or_top_k_of_one_is_greedy(model, tokens):
    want = model.generate(tokens, 4)
    assert torch.equal(model.generate(tokens, 4, temperature=1e-30), want)
    assert torch.equal(model.generate(tokens, 4, temperature=1.0, top_k=1), want)


@pytest.mark.parametrize("training", [True, False])
def test_generate_leaves_no_trace(model, tokens, training):
    model.train(training)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    prompt = tokens.clone()
    out = model.generate(tokens, 3)
    assert not out.is_inference() and torch.is_grad_enabled()
    assert all(m.training is training for m in model.modules())
    assert torch.equal(tokens, prompt)
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model(tokens).requires_grad


def test_no_new_tokens_returns_a_copy_of_the_prompt(model, tokens):
    out = model.generate(tokens, 0)
    assert torch.equal(out, tokens) and out.data_ptr() != tokens.data_ptr()


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_may_fill_the_context_but_not_pass_it(tokens, use_cache):
    """C25: context 10, prompt 5, generate 10."""
    torch.manual_seed(0)
    model = GPT2(dataclasses.replace(MINI, n_ctx=10))
    model.wte.register_forward_hook(lambda *_: calls.append(1))
    calls = []
    with pytest.raises(ValueError, match="prompt of 5.*max_new_tokens=10.*n_ctx=10"):
        model.generate(tokens[:, :5], 10, use_cache=use_cache)
    assert calls == []
    assert model.generate(tokens[:, :5], 5, use_cache=use_cache).shape == (3, 10)


@torch.no_grad()
def test_a_context_overflow_is_refused_before_the_cache_is_written(tokens):
    """C25: offset + T counts, not T alone."""
    model = GPT2(dataclasses.replace(MINI, n_ctx=10))
    cache = model.init_cache(3, capacity=20)
    model(tokens, cache)
    before = [layer.k.clone() for layer in cache]
    with pytest.raises(ValueError, match="7 cached.*4 new.*n_ctx=10"):
        model(tokens[:, :4], cache)
    assert [layer.length for layer in cache] == [7, 7]
    assert all(torch.equal(layer.k, k) for layer, k in zip(cache, before, strict=True))
    assert model(tokens[:, :3], cache).shape == (3, 3, 256)
    with pytest.raises(ValueError, match="0 cached.*14 new.*n_ctx=10"):
        model(torch.cat([tokens, tokens], dim=1))


@torch.no_grad()
def test_a_cache_that_does_not_fit_is_refused_before_it_is_written(model, tokens):
    small, large = model.init_cache(3, capacity=5), model.init_cache(3)
    for cache in (small, [large[0], small[1]]):
        with pytest.raises(ValueError, match=r"cache\[.\] overflow: capacity 5, .*new 7"):
            model(tokens, cache)
    with pytest.raises(ValueError, match="cache has 1 layers, the model 2"):
        model(tokens, large[:1])
    with pytest.raises(ValueError, match=r"cache\[0\] has batch 2, tokens has 3"):
        model(tokens, model.init_cache(2))
    assert all(layer.length == 0 for layer in small + large)
    model(tokens[:, :2], small)
    with pytest.raises(ValueError, match=r"cache\[1\] holds 2 tokens, cache\[0\] 0"):
        model(tokens[:, :1], [large[0], small[1]])


@torch.no_grad()
@pytest.mark.parametrize("shape", [(3, 0), (0, 5)])
def test_an_empty_sequence_or_batch_gives_empty_logits(model, shape):
    tokens = torch.zeros(shape, dtype=torch.int64)
    assert model(tokens).shape == (*shape, 256)
    assert model(tokens, model.init_cache(shape[0])).shape == (*shape, 256)


@pytest.mark.parametrize(
    "tokens, message",
    [
        (torch.zeros(5, dtype=torch.int64), r"tokens has shape \(5,\)"),
        (torch.zeros(1, 5, 2, dtype=torch.int64), r"tokens has shape \(1, 5, 2\)"),
        (torch.zeros(1, 5), "tokens has dtype torch.float32"),
        (torch.zeros(1, 5, dtype=torch.int32), "tokens has dtype torch.int32"),
        (torch.tensor([[0, 256]]), "tokens holds id 256, vocab_size is 256"),
        (torch.tensor([[0, -1]]), "tokens holds id -1"),
        (torch.zeros(1, 5, dtype=torch.int64, device="meta"), "tokens is on meta"),
    ],
)
def test_bad_tokens_are_refused(model, tokens, message):
    for call in (model, lambda t: model.generate(t, 1)):
        with pytest.raises(ValueError, match=message):
            call(tokens)


@pytest.mark.parametrize(
    "message, arguments",
    [
        ("max_new_tokens", dict(max_new_tokens=-1)),
        ("max_new_tokens", dict(max_new_tokens=1.0)),
        ("temperature", dict(temperature=-0.1)),
        ("temperature", dict(temperature=float("inf"))),
        ("temperature", dict(temperature=float("nan"))),
        ("top_k", dict(top_k=0)),
        ("top_k", dict(top_k=1.5)),
        ("prompt is empty", dict(tokens=torch.zeros(2, 0, dtype=torch.int64))),
    ],
)
def test_bad_options_of_generate_are_refused(model, tokens, message, arguments):
    with pytest.raises(ValueError, match=message):
        model.generate(**(dict(tokens=tokens, max_new_tokens=1) | arguments))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(GPT2Config)])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_a_bad_config_value_names_its_field(field, value):
    with pytest.raises(ValueError, match=field):
        GPT2Config(**{field: value})


def test_heads_must_divide_the_channels_and_a_config_is_frozen():
    with pytest.raises(ValueError, match="n_embd=10.*n_head=3"):
        GPT2Config(n_embd=10, n_head=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        MINI.n_layer = 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_runs_and_stays_close(model, tokens, dtype):
    want = model(tokens)
    model.to(dtype)
    logits = model(tokens)
    assert logits.dtype == dtype
    # Ten times the release's weights: rounding is compared with the spread of the logits.
    assert (logits.double() - want).square().mean().sqrt() < 0.1 * want.std()
    cached, plain = (model.generate(tokens, 5, use_cache=c) for c in (True, False))
    assert cached.shape == plain.shape == (3, 12)


def test_it_learns_one_sequence_by_heart(tokens):
    torch.manual_seed(0)
    model = GPT2(MINI)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert torch.equal(model.generate(tokens[:, :1], 6), tokens)

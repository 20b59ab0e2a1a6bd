import dataclasses

import pytest
import torch

from gpt2_to_k3.models import GPT2, GPT2Config

MINI = GPT2Config.mini()


@pytest.fixture
def config():
    return MINI


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


def test_no_new_tokens_returns_a_copy_of_the_prompt(model, tokens):
    out = model.generate(tokens, 0)
    assert torch.equal(out, tokens) and out.data_ptr() != tokens.data_ptr()


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
    # Weights far larger than the release's: rounding is compared with the spread of the logits.
    assert (logits.double() - want).square().mean().sqrt() < 0.1 * want.std()
    cached, plain = (model.generate(tokens, 5, use_cache=c) for c in (True, False))
    assert cached.shape == plain.shape == (3, 12)

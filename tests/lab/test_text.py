"""The course's own prose as bytes, and the ablation that trains on it."""

import json

import ablate
import pytest
import torch

from gpt2_to_k3.lab.text import byte_batches, prose_bytes
from gpt2_to_k3.layers import KimiDeltaAttention, LatentMoE, MultiHeadLatentAttention
from gpt2_to_k3.models import KimiK3


def test_prose_is_split_in_order_and_is_text():
    training, held_out = prose_bytes()
    assert abs(len(held_out) / (len(training) + len(held_out)) - 0.1) < 1e-4
    text = bytes(torch.cat([training, held_out]).tolist()).decode("utf-8")
    assert text.startswith("# 0.") and len(text) > 100_000 and "\r" not in text
    less, more = prose_bytes(held_out=0.5)
    assert torch.equal(torch.cat([less, more]), torch.cat([training, held_out]))


def test_a_batch_foretells_the_next_byte_and_reaches_both_ends():
    data, generator = torch.arange(7), torch.Generator().manual_seed(0)
    tokens, targets, mask = byte_batches(data, 200, 3, generator)
    assert tokens.shape == targets.shape == mask.shape == (200, 3) and mask.all()
    assert torch.equal(targets, tokens + 1)
    assert tokens.min() == 0 and targets.max() == 6
    again = byte_batches(data, 200, 3, torch.Generator().manual_seed(0))
    assert torch.equal(again.tokens, tokens)


def test_bad_input_is_refused_by_name():
    for part in (0, 1, -0.5, float("nan")):
        with pytest.raises(ValueError, match="held_out"):
            prose_bytes(held_out=part)
    with pytest.raises(ValueError, match="data.*length=7.*7"):
        byte_batches(torch.arange(7), 1, 7, torch.Generator())
    with pytest.raises(ValueError, match="length must be an integer >= 1, got 0"):
        byte_batches(torch.arange(7), 1, 0, torch.Generator())
    with pytest.raises(ValueError, match="batch_size must be an integer >= 1, got -1"):
        byte_batches(torch.arange(7), -1, 3, torch.Generator())


@pytest.mark.parametrize("name", ablate.variants())
def test_a_variant_lacks_what_it_says_and_still_computes(name):
    torch.manual_seed(0)
    config, change = ablate.variants()[name]
    model = change(KimiK3(config)).eval()
    kinds = [type(x.self_attn) for x in model.layers]
    assert (KimiDeltaAttention in kinds) == (name != "every layer MLA")
    assert (MultiHeadLatentAttention in kinds) == (name != "every layer KDA")
    assert any(isinstance(m, LatentMoE) for m in model.modules()) == (name != "no routed experts")
    tokens = torch.randint(256, (1, 12))
    seen, hooks = [], []
    for layer in ablate.modules(model, KimiDeltaAttention):
        hooks.append(
            layer.q_conv1d.register_forward_hook(lambda m, a, y: seen.append((a[0], y[0])))
        )
    with torch.no_grad():
        logits = model(tokens)
    assert logits.isfinite().all()
    if seen:  # without the convolution a token sees itself alone
        x, y = seen[0]
        assert torch.allclose(y, torch.nn.functional.silu(x)) == (name == "no short convolution")
    if name == "one sum over depth":
        x = [torch.randn(2, 3) for _ in range(3)]
        assert torch.allclose(model.output_attn_res(x), x[0] + x[1] + x[2])
    if name == "no decay":
        assert all(layer.lower_bound > -1e-5 for layer in ablate.modules(model, KimiDeltaAttention))


def test_the_ablation_runs_and_keeps_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(ablate, "held_out_loss", lambda model, data: 5.0)
    file = tmp_path / "k3_ablation.json"
    few = ["--only", "all pieces", "no decay", "--steps", "1", "--seeds", "1"]
    ablate.main([*few, "--save", str(file)])
    result = json.loads(file.read_text("utf-8"))["result"]
    assert [r["variant"] for r in result["rows"]] == ["all pieces", "no decay"]
    assert result["steps"] == 1 and all(4 < r["training"] < 7 for r in result["rows"])

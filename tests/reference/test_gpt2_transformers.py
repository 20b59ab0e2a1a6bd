import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2_to_k3.models import GPT2

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def peer():
    """Their GPT-2: a few layers, weights large enough that logits differ by units."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=97,
        n_positions=23,
        n_embd=20,
        n_layer=3,
        n_head=5,
        layer_norm_epsilon=1e-3,
        bos_token_id=None,
        eos_token_id=None,
    )
    peer = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, p in peer.named_parameters():
            if name.endswith("bias"):
                p.normal_(std=0.3)
            elif "ln_" in name:
                p.add_(torch.randn_like(p), alpha=0.2)
            else:
                p.mul_(10)
    return peer


@pytest.fixture
def folder(peer, tmp_path):
    peer.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def tokens():
    return torch.randint(97, (3, 11), generator=torch.Generator().manual_seed(1))


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({k: x.contiguous() for k, x in change(tensors).items()}, path)


def reconfigure(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@torch.no_grad()
def test_logits_equal(peer, folder, tokens):
    want = peer(tokens).logits
    assert want.std() > 0.5
    torch.testing.assert_close(GPT2.from_pretrained(folder)(tokens), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_greedy_ids_equal(peer, folder, tokens):
    options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
    want = peer.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    model = GPT2.from_pretrained(str(folder))
    for use_cache in (True, False):
        assert torch.equal(model.generate(tokens, 12, use_cache=use_cache), want)


@torch.no_grad()
def test_prefill_and_decode_equal_their_one_pass_at_every_split(peer, folder, tokens):
    model, want = GPT2.from_pretrained(folder), peer(tokens).logits
    for lengths in [[n, 11 - n] for n in range(12)] + [[1] * 11]:
        cache = model.init_cache(3)
        got = torch.cat([model(t, cache) for t in tokens.split(lengths, dim=1)], dim=1)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_equal(peer, folder, tokens):
    model = GPT2.from_pretrained(folder)
    for logits in (peer(tokens).logits, model(tokens)):
        logits.logsumexp(-1).sum().backward()
    want, got = peer.transformer.h[0], model.h[0]
    pairs = [
        (got.attn.c_attn.weight.grad, want.attn.c_attn.weight.grad.t()),
        (got.ln_1.bias.grad, want.ln_1.bias.grad),
        (model.wte.weight.grad, peer.transformer.wte.weight.grad),
    ]
    peer.zero_grad()
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())


def test_count_equals_theirs(peer, folder):
    assert GPT2.from_pretrained(folder).num_parameters() == peer.num_parameters()


@torch.no_grad()
def test_keys_may_lack_the_prefix_and_carry_masks_and_the_tied_head(peer, folder, tokens):
    def older(tensors):
        tensors = {k.removeprefix("transformer."): x for k, x in tensors.items()}
        for i in range(3):
            tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, 23, 23).tril()
            tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
        return tensors | {"lm_head.weight": tensors["wte.weight"].clone()}

    rewrite(folder, older)
    want = peer(tokens).logits
    torch.testing.assert_close(GPT2.from_pretrained(folder)(tokens), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weights_come_in_the_dtype_asked_for(folder, dtype):
    model = GPT2.from_pretrained(folder, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(p.requires_grad and p.is_contiguous() for p in model.parameters())
    with pytest.raises(ValueError, match="dtype"):
        GPT2.from_pretrained(folder, dtype=torch.int8)


def test_weights_do_not_depend_on_the_file_afterwards(folder, tokens):
    model = GPT2.from_pretrained(folder)
    before = model(tokens).detach()
    path = folder / "model.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(model(tokens), before)


def test_a_head_that_is_not_tied_is_refused(folder):
    head = {"lm_head.weight": torch.zeros(97, 20)}
    rewrite(folder, lambda tensors: tensors | head)
    with pytest.raises(ValueError, match="lm_head.weight differs from wte.weight"):
        GPT2.from_pretrained(folder)


@pytest.mark.parametrize(
    "field, value",
    [
        ("model_type", "llama"),
        ("activation_function", "relu"),
        ("activation_function", "gelu"),
        ("n_inner", 79),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", False),
    ],
)
def test_an_unsupported_config_value_is_named(folder, field, value):
    reconfigure(folder, **{field: value})
    with pytest.raises(ValueError, match=f"{field}={value!r}"):
        GPT2.from_pretrained(folder)


@pytest.mark.parametrize(
    "field, value", [("n_inner", 80), ("activation_function", "gelu_pytorch_tanh")]
)
def test_another_spelling_of_the_same_model_is_accepted(folder, tokens, field, value):
    want = GPT2.from_pretrained(folder)(tokens)
    reconfigure(folder, **{field: value})
    assert torch.equal(GPT2.from_pretrained(folder)(tokens), want)


def test_a_config_without_a_size_is_refused(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["n_positions"]
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="n_positions is missing"):
        GPT2.from_pretrained(folder)


def test_missing_and_left_over_keys_are_listed(folder):
    def change(tensors):
        del tensors["transformer.h.1.mlp.c_fc.bias"]
        return tensors | {"transformer.h.1.mlp.gate.weight": torch.zeros(2)}

    rewrite(folder, change)
    with pytest.raises(ValueError, match=r"missing: .*h\.1\.mlp\.c_fc\.bias.*left over: .*gate"):
        GPT2.from_pretrained(folder)


def test_weights_of_another_shape_are_refused(folder):
    reconfigure(folder, n_positions=24)
    with pytest.raises(ValueError, match=r"^wpe\.weight has shape \(23, 20\), expected \(24, 20\)"):
        GPT2.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(FileNotFoundError, match=name):
        GPT2.from_pretrained(folder)


def test_a_missing_folder_is_not_taken_for_a_repository(tmp_path):
    for path in (tmp_path / "no", str(tmp_path / "no"), "./no/such/folder"):
        with pytest.raises(FileNotFoundError, match="config.json"):
            GPT2.from_pretrained(path)


def test_a_repository_is_fetched_without_its_other_files(folder, tokens, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot_download(repo_id, *, allow_patterns):
        asked.append((repo_id, sorted(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = GPT2.from_pretrained("owner/name")
    assert asked == [("owner/name", ["config.json", "model.safetensors"])]
    assert torch.equal(model(tokens), GPT2.from_pretrained(folder)(tokens))


@pytest.mark.parametrize("package", ["safetensors", "huggingface_hub"])
def test_a_missing_optional_package_comes_with_the_command(package, monkeypatch):
    for name in (package, f"{package}.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{package}: pip install safetensors"):
        GPT2.from_pretrained("owner/name")

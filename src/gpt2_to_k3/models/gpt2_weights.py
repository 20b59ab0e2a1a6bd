"""Read Hugging Face GPT-2 checkpoints: config.json and model.safetensors."""

import json
import re
from pathlib import Path

import torch

_FILES = ["config.json", "model.safetensors"]
_INSTALL = "from_pretrained needs {}: pip install safetensors huggingface_hub"
# Our field: theirs. Theirs for the context is n_positions; n_ctx is an older copy of it.
_SIZES = {
    "vocab_size": "vocab_size",
    "n_ctx": "n_positions",
    "n_embd": "n_embd",
    "n_layer": "n_layer",
    "n_head": "n_head",
    "layer_norm_epsilon": "layer_norm_epsilon",
}
# What our model computes, for the fields that would change it. The first is also the default.
_FIXED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # one formula under two names
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "tie_word_embeddings": (True,),
}
# Older checkpoints carry the causal mask as buffers.
_BUFFER = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
_CONV1D = re.compile(r"h\.\d+\.(attn|mlp)\.c_\w+\.weight")


def read_pretrained(path_or_repo_id):
    """Return (GPT2Config fields, tensors by name) of a local directory or a Hub repository.

    Errors: ImportError, FileNotFoundError, or ValueError: see GPT2.from_pretrained.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(_INSTALL.format("safetensors")) from error
    folder = _folder(path_or_repo_id)
    for name in _FILES:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"no file {name} in {folder}")
    sizes = _sizes(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return sizes, load_file(folder / "model.safetensors")


def load_weights(model, tensors, dtype):
    """Put a checkpoint's tensors into a model made on the meta device, and return it.

    Shapes: those of the checkpoint; matrices of its Conv1D layers are [in, out] and turned to
    Linear's [out, in]. Dtype: converted to `dtype`, always copied.
    Errors: ValueError: see GPT2.from_pretrained.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating point dtype, got {dtype}")
    tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    tensors = {name: x for name, x in tensors.items() if not _BUFFER.fullmatch(name)}
    head = tensors.pop("lm_head.weight", None)
    want = {name: p.shape for name, p in model.named_parameters()}
    missing, left_over = sorted(want.keys() - tensors), sorted(tensors.keys() - want)
    if missing or left_over:
        raise ValueError(f"checkpoint keys missing: {missing}, left over: {left_over}")
    if head is not None and not torch.equal(head, tensors["wte.weight"]):
        raise ValueError("lm_head.weight differs from wte.weight: the head must be tied")
    state = {}
    for name, x in tensors.items():
        x = x.t() if _CONV1D.fullmatch(name) and x.ndim == 2 else x
        if x.shape != want[name]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {tuple(want[name])}")
        state[name] = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
    model.load_state_dict(state, assign=True)
    return model


def _folder(path_or_repo_id):
    folder = Path(path_or_repo_id)
    # A repository is "name" or "owner/name"; anything else can only be a path.
    is_repo = isinstance(path_or_repo_id, str) and re.fullmatch(
        r"[\w-][\w.-]*(/[\w-][\w.-]*)?", path_or_repo_id
    )
    if folder.is_dir() or not is_repo:
        return folder
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(_INSTALL.format("huggingface_hub")) from error
    return Path(snapshot_download(path_or_repo_id, allow_patterns=_FILES))


def _sizes(config):
    for name, allowed in _FIXED.items():
        if config.get(name, allowed[0]) not in allowed:
            raise ValueError(f"config.json: {name}={config[name]!r}, supported: {allowed}")
    for name in _SIZES.values():
        if name not in config:
            raise ValueError(f"config.json: {name} is missing")
    n_inner, n_embd = config.get("n_inner"), config["n_embd"]
    if n_inner not in (None, 4 * n_embd):
        raise ValueError(f"config.json: n_inner={n_inner!r}, supported: None or 4 * {n_embd}")
    return {ours: config[theirs] for ours, theirs in _SIZES.items()}

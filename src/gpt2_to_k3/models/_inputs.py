"""What every model asks of its tokens and its cache."""

from contextlib import contextmanager

import torch

from ..layers import RecurrentCache


def check_inputs(tokens, cache, *, embedding, kinds, n_ctx):
    """Return the number of tokens in the cache, or raise ValueError before any layer is written.

    kinds: the class of each layer's cache; embedding [vocab_size, D].
    """
    check_tokens(tokens, embedding)
    offset = 0 if cache is None else _check_cache(cache, kinds, *tokens.shape)
    if offset + tokens.shape[1] > n_ctx:
        raise ValueError(f"{offset} cached + {tokens.shape[1]} new tokens > n_ctx={n_ctx}")
    return offset


def check_tokens(tokens, embedding):
    """Raise ValueError unless tokens are int64 [B, T], beside embedding [vocab_size, D], and in it."""
    if not isinstance(tokens, torch.Tensor):
        raise ValueError(f"tokens must be a tensor, got {type(tokens).__name__}")
    if tokens.ndim != 2:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}, expected [B, T]")
    if tokens.dtype != torch.int64:
        raise ValueError(f"tokens has dtype {tokens.dtype}, expected torch.int64")
    if tokens.device != embedding.device:
        raise ValueError(f"tokens is on {tokens.device}, the model on {embedding.device}")
    # On a GPU, to look at the values would wait for all queued work at every token.
    if tokens.device.type == "cpu" and tokens.numel() > 0:
        low, high = tokens.min().item(), tokens.max().item()
        if low < 0 or high >= len(embedding):
            bad = low if low < 0 else high
            raise ValueError(f"tokens holds id {bad}, vocab_size is {len(embedding)}")


def _check_cache(cache, kinds, B, T):
    if not isinstance(cache, (list, tuple)):
        raise ValueError(f"cache must be a list of one a layer, got {type(cache).__name__}")
    if len(cache) != len(kinds):
        raise ValueError(f"cache has {len(cache)} layers, the model {len(kinds)}")
    for i, (held, kind) in enumerate(zip(cache, kinds, strict=True)):
        if type(held) is not kind:
            raise ValueError(
                f"cache[{i}] is a {type(held).__name__}, the layer has a {kind.__name__}"
            )
        if held.batch_size != B:
            raise ValueError(f"cache[{i}] has batch {held.batch_size}, tokens has {B}")
        if held.length != cache[0].length:
            raise ValueError(f"cache[{i}] holds {held.length} tokens, cache[0] {cache[0].length}")
        if kind is not RecurrentCache and held.length + T > held.capacity:
            raise ValueError(
                f"cache[{i}] overflow: capacity {held.capacity}, length {held.length}, new {T}"
            )
    if len({id(held) for held in cache}) < len(cache):
        raise ValueError("cache holds one layer's cache twice")
    return cache[0].length


@contextmanager
def unchanged_on_error(cache):
    """Context after whose failure each layer's cache holds what it held before."""
    # What a cache holds is never overwritten: it writes behind it, or holds new tensors.
    before = [dict(vars(held)) for held in cache or ()]
    try:
        yield
    except BaseException:
        for held, was in zip(cache or (), before, strict=True):
            vars(held).update(was)
        raise

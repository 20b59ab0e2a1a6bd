"""What the models with two kinds of layers share: checks of their sizes, tokens and caches."""

from dataclasses import fields

from ..layers import LatentCache, MultiHeadLatentAttention, RecurrentCache
from ._tokens import check_tokens


def check_config(config):
    """Raise ValueError naming the first bad size or layer number of a hybrid's configuration."""
    for field in fields(config):
        n, least = getattr(config, field.name), int(field.name != "first_k_dense_replace")
        if field.type is int and (type(n) is not int or n < least):
            raise ValueError(f"{field.name} must be an integer >= {least}, got {n!r}")
    L = config.num_hidden_layers
    if type(config.full_attn_layers) is not tuple or config.full_attn_layers != tuple(
        n for n in range(1, L + 1) if n in config.full_attn_layers
    ):
        raise ValueError(
            f"full_attn_layers must be a rising tuple of numbers from 1 to {L}, "
            f"got {config.full_attn_layers!r}"
        )
    if config.first_k_dense_replace > L:
        raise ValueError(
            f"first_k_dense_replace={config.first_k_dense_replace} is more than "
            f"num_hidden_layers={L}"
        )
    if config.num_experts_per_token > config.num_experts:
        raise ValueError(
            f"num_experts_per_token={config.num_experts_per_token} is more than "
            f"num_experts={config.num_experts}"
        )


def check_inputs(model, tokens, cache):
    """Raise ValueError, before any layer is written, for tokens or a cache that do not fit."""
    config = model.config
    check_tokens(tokens, model.embed_tokens.weight)
    offset = 0 if cache is None else _check_cache(model.layers, cache, *tokens.shape)
    if offset + tokens.shape[1] > config.n_ctx:
        raise ValueError(f"{offset} cached + {tokens.shape[1]} new tokens > n_ctx={config.n_ctx}")


def _check_cache(layers, cache, B, T):
    # All layers before any is written: a state cannot be taken back to what it was.
    if len(cache) != len(layers):
        raise ValueError(f"cache has {len(cache)} layers, the model {len(layers)}")
    offset = cache[0].length
    for i, (held, layer) in enumerate(zip(cache, layers, strict=True)):
        latent = isinstance(layer.self_attn, MultiHeadLatentAttention)
        kind = LatentCache if latent else RecurrentCache
        if type(held) is not kind:
            raise ValueError(
                f"cache[{i}] is a {type(held).__name__}, the layer has a {kind.__name__}"
            )
        if held.batch_size != B:
            raise ValueError(f"cache[{i}] has batch {held.batch_size}, tokens has {B}")
        if held.length != offset:
            raise ValueError(f"cache[{i}] holds {held.length} tokens, cache[0] {offset}")
        if latent and offset + T > held.capacity:
            raise ValueError(
                f"cache[{i}] overflow: capacity {held.capacity}, length {offset}, new {T}"
            )
    return offset

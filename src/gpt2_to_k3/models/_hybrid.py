"""What the models with two kinds of layers share: all but the layers and the path through them."""

from dataclasses import fields

from torch import nn

from ..layers import (
    Experts,
    LatentCache,
    MultiHeadLatentAttention,
    RecurrentCache,
    RMSNorm,
    Router,
)
from ._inputs import check_inputs
from .gpt2 import GPT2

NORM_EPS = 1e-5  # config.json's rms_norm_eps, of both releases
KERNEL_SIZE = 4  # and short_conv_kernel_size


class HybridModel(nn.Module):
    """logits = head(hidden(tokens)), where hidden, the path through the layers, is the child's.

    layer(config, number) makes a layer, counted from 1: it has self_attn, KDA or MLA, and
    init_cache(batch_size, capacity).

    Shapes: tokens int64 [B, T] -> logits [B, T, vocab_size]. Dtype: the weights'.
    Weights start normal with std 0.02, the releases' initializer_range, in projections, embedding,
    routers and experts; the others as in their layers.
    Errors, source: as the children's.
    """

    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layer(config, i + 1) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, NORM_EPS)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, Router, Experts)):
                for weight in module.parameters():
                    nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, cache=None):
        """Return logits [B, T, vocab_size] for tokens int64 [B, T] that follow those in the cache.

        Errors: ValueError for tokens of another rank, dtype or device, for an id outside the
        vocabulary (looked at on the CPU only), for a cache of other layers or batch, and for more
        than n_ctx tokens with those in the cache. The cache is as it was after these, and after
        whatever fails in a layer.
        """
        return self.head(self.hidden(tokens, cache))

    def head(self, x):
        """Return logits [B, T, vocab_size] for x [B, T, hidden_size]."""
        return self.lm_head(x)

    def init_cache(self, batch_size, capacity=None):
        """Return an empty cache a layer (eq. 10.1): RecurrentCache for KDA, LatentCache for MLA.

        Units: capacity counts tokens, default n_ctx.
        """
        capacity = self.config.n_ctx if capacity is None else capacity
        return [layer.init_cache(batch_size, capacity) for layer in self.layers]

    def num_parameters(self):
        """Return the number of weights and router biases; works on the meta device."""
        return sum(x.numel() for x in [*self.parameters(), *self.buffers()])

    generate = GPT2.generate  # it needs _check, init_cache, hidden, head and config.n_ctx

    def _check(self, tokens, cache):
        """Raise, before any layer is written, for tokens or a cache that do not fit."""
        latent = [isinstance(x.self_attn, MultiHeadLatentAttention) for x in self.layers]
        check_inputs(
            tokens, cache, embedding=self.embed_tokens.weight, n_ctx=self.config.n_ctx,
            kinds=[LatentCache if x else RecurrentCache for x in latent],
        )  # fmt: skip


def check_config(config):
    """Raise ValueError naming the first bad size or layer number of a hybrid's configuration."""
    for field in fields(config):
        n, least = getattr(config, field.name), int(field.name != "first_k_dense_replace")
        if field.type is int and (type(n) is not int or n < least):
            raise ValueError(f"{field.name} must be an integer >= {least}, got {n!r}")
    L = config.num_hidden_layers
    listed = config.full_attn_layers
    rising = tuple(n for n in range(1, L + 1) if type(listed) is tuple and n in listed)
    if listed != rising or any(type(n) is not int for n in listed):
        raise ValueError(
            f"full_attn_layers must be a rising tuple of numbers from 1 to {L}, got {listed!r}"
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

"""What a bill needs to know of a model: what its layers keep and compute, its weights, their bytes.

Conventions. A multiply-add is 2 FLOPs. Norms, activations and softmax are not counted, and neither
are the tails of short convolutions (3 rows of 3 projections in each KDA layer).
"""

import sys
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from ..models import KimiK3Config, kimi_k3, kimi_linear

LARGEST = 10**15  # of a count: the page's JavaScript holds it exactly
CHUNK = 64  # tokens, in KDA's prefill


def check_whole(name, n, least=1, most=LARGEST):
    """Raise ValueError naming n if it is no integer from least to most; True and 2.0 are none."""
    if type(n) is not int or not least <= n <= most:
        raise ValueError(f"{name}: expected a whole number from {least} to {most:,}, got {n!r}")


def check_number(name, x, zero=False):
    """Raise ValueError naming x if it is not finite and above 0 (from 0 on with zero=True)."""
    if type(x) not in (int, float) or not 0 <= x <= sys.float_info.max or not (x or zero):
        raise ValueError(f"{name}: expected a finite number {'>=' if zero else '>'} 0, got {x!r}")


class _Checked:
    """Every whole number of a part from 1 on, those in `may_be_0` from 0 on."""

    may_be_0: ClassVar = ("layers",)

    def __post_init__(self):
        for f in fields(self):
            if f.type is int:
                name = f"{self.part} {f.name}"
                check_whole(name, getattr(self, f.name), least=int(f.name not in self.may_be_0))


@dataclass(frozen=True)
class GrowingLayers(_Checked):
    """Layers of softmax attention: what each keeps grows with every token.

    Units, of one layer: weights; cache_numbers that a token adds; FLOPs that one query spends on
    one cached token: decode_flops in a decode step (MLA: absorbed, eq. 9.2), prefill_flops in a
    prompt (MLA: naive, eq. 9.1); expand_flops to make a cached token's keys and values, which a
    prompt after a cache needs again (0 where they are what is cached). layers counts them.
    Errors: ValueError naming the bad field.
    """

    part: ClassVar = "growing"
    may_be_0: ClassVar = ("layers", "expand_flops")
    kind: str
    layers: int
    weights: int
    cache_numbers: int
    decode_flops: int
    prefill_flops: int
    expand_flops: int = 0


@dataclass(frozen=True)
class StateLayers(_Checked):
    """Layers with a state, which is as large at any length.

    Units, of one layer: weights; state_numbers; FLOPs of one token: decode_flops by the recurrence,
    prefill_flops by chunks. layers counts them.
    Errors: ValueError naming the bad field.
    """

    part: ClassVar = "state"
    kind: str
    layers: int
    weights: int
    state_numbers: int
    decode_flops: int
    prefill_flops: int


@dataclass(frozen=True)
class Experts(_Checked):
    """Routed experts: of number in a layer a token uses per_token; none by default.

    Units: weights of one expert; layers counts the layers that have them.
    Errors: ValueError naming the bad field.
    """

    part: ClassVar = "experts'"
    layers: int = 0
    number: int = 1
    per_token: int = 1
    weights: int = 1

    def __post_init__(self):
        super().__post_init__()
        if self.per_token > self.number:
            raise ValueError(
                f"experts' per_token: expected at most number={self.number}, got {self.per_token}"
            )


@dataclass(frozen=True)
class ModelShape:
    """A model as its bill sees it; made by gpt2, kimi and own, or part by part.

    Units: weights counts those in layers that every token is multiplied with, besides growing's,
    state's and routed experts'; head_weights those of the output layer; lookup_weights what is
    stored and not multiplied. The bytes are of one number each, 0.5 for 4 bits.
    Errors: ValueError naming the bad field, or without a layer.
    """

    name: str
    growing: GrowingLayers
    state: StateLayers
    weights: int
    head_weights: int
    lookup_weights: int
    experts: Experts = field(default_factory=Experts)
    bytes_per_weight: float = 2
    bytes_per_expert_weight: float = 2
    bytes_per_cache_number: float = 2
    bytes_per_state_number: float = 4

    def __post_init__(self):
        for f in fields(self):
            if f.type is int:
                check_whole(f.name, getattr(self, f.name), least=0)
            elif f.type is float:
                check_number(f.name, getattr(self, f.name))
        if not self.layers:
            raise ValueError("layers: expected at least one, growing or with a state, got none")

    @property
    def dense_weights(self):
        """Weights that every token is multiplied with: not routed experts, nor lookup_weights."""
        growing, state = (part.layers * part.weights for part in (self.growing, self.state))
        return growing + state + self.weights + self.head_weights

    @property
    def active_weights(self):
        """Weights that one token is multiplied with: the dense ones, and the experts it uses."""
        e = self.experts
        return self.dense_weights + e.layers * e.per_token * e.weights

    @property
    def layers(self):
        """The number of layers, growing and with a state."""
        return self.growing.layers + self.state.layers

    def with_growing(self, layers):
        """The same shape with so many growing layers; the others have a state."""
        check_whole("growing layers", layers, least=0, most=self.layers)
        return replace(
            self,
            growing=replace(self.growing, layers=layers),
            state=replace(self.state, layers=self.layers - layers),
        )

    def all_growing(self):
        """The same shape with a growing layer in the place of each layer with a state."""
        return self.with_growing(self.layers)

    @classmethod
    def gpt2(cls, config, name="GPT-2", number_bytes=2):
        """The shape of a GPT2Config, weights and cache in number_bytes each.

        Biases, norms and positions are stored, and not counted as multiplied.
        """
        D, L, K = config.n_embd, config.n_layer, config.n_embd // config.n_head
        growing = _keys_and_values("MHA", L, D, config.n_head, config.n_head, K)
        vectors = L * 13 * D + 2 * D + config.n_ctx * D
        return cls(
            name, growing, _kda(0, 4 * D * D, config.n_head, K), weights=L * 8 * D * D,
            head_weights=config.vocab_size * D, lookup_weights=vectors,
            bytes_per_weight=number_bytes, bytes_per_cache_number=number_bytes,
        )  # fmt: skip

    @classmethod
    def kimi(cls, config, name=None, mixing=None, kv_heads=8):
        """The shape of a KimiLinearConfig or KimiK3Config, by its model's count_parameters.

        mixing: None for its own KDA and MLA, or "MLA", "GQA" or "MHA" in every layer; the last two
        with the heads and the head width (v_head_dim) of its MLA, and no output gate. A layer with
        a state, where one is asked for later (with_growing), is then its KDA.
        In 16 bits, K3's routed experts in MXFP4's 4.25.
        """
        k3 = isinstance(config, KimiK3Config)
        count = (kimi_k3 if k3 else kimi_linear).count_parameters
        L, n_moe = config.num_hidden_layers, config.num_hidden_layers - config.first_k_dense_replace
        D, H, V = config.hidden_size, config.num_attention_heads, config.v_head_dim
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        every, none = (replace(config, full_attn_layers=x) for x in (tuple(range(1, L + 1)), ()))
        n_mla = len(config.full_attn_layers) if mixing is None else L
        if mixing in (None, "MLA"):
            growing = GrowingLayers(
                "MLA", n_mla, count(every)["MLA"] // L, cache_numbers=rank + rope,
                decode_flops=2 * H * (rank + rope) + 2 * H * rank,
                prefill_flops=2 * H * (config.qk_nope_head_dim + rope) + 2 * H * V,
                expand_flops=2 * H * rank * (config.qk_nope_head_dim + V),
            )  # fmt: skip
        elif mixing in ("GQA", "MHA"):
            growing = _keys_and_values(mixing, L, D, H, kv_heads if mixing == "GQA" else H, V)
        else:
            raise ValueError(f"mixing: expected None, 'MLA', 'GQA' or 'MHA', got {mixing!r}")
        parts = count(config)
        apart = ("KDA", "MLA", "embedding", "head", "routed experts")
        experts = Experts()
        if n_moe:
            one = parts["routed experts"] // (n_moe * config.num_experts)
            experts = Experts(n_moe, config.num_experts, config.num_experts_per_token, one)
        kda = _kda(
            L - n_mla, count(none)["KDA"] // L, config.linear_num_heads, config.linear_head_dim
        )
        own_name = f"Kimi {'K3' if k3 else 'Linear'}{f', all {mixing}' if mixing else ''}"
        return cls(
            name or own_name, growing, kda,
            weights=sum(n for part, n in parts.items() if part not in apart),
            head_weights=parts["head"], lookup_weights=parts["embedding"], experts=experts,
            bytes_per_expert_weight=4.25 / 8 if k3 else 2,
        )  # fmt: skip

    @classmethod
    def own(
        cls, *, layers, width, heads, kv_heads, head_dim, ffn_width, vocabulary,
        name="own numbers",
    ):  # fmt: skip
        """A dense model of the reader's own: GQA (MHA with kv_heads=heads) and SwiGLU, in 16 bits.

        A layer with a state, where one is asked for (with_growing), is KDA with as many heads of
        head_dim, its gates' small projections left out.
        Errors: ValueError naming the bad number.
        """
        own = dict(width=width, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        for key, n in dict(own, ffn_width=ffn_width, vocabulary=vocabulary).items():
            check_whole(key, n)
        return cls(
            name,
            _keys_and_values("MHA" if heads == kv_heads else "GQA", layers, **own),
            _kda(0, 4 * width * heads * head_dim, heads, head_dim),
            weights=layers * 3 * width * ffn_width,
            head_weights=vocabulary * width, lookup_weights=vocabulary * width,
        )  # fmt: skip


def _keys_and_values(kind, layers, width, heads, kv_heads, head_dim):
    if heads % kv_heads:
        raise ValueError(f"heads: expected a multiple of kv_heads={kv_heads}, got {heads}")
    flops = 4 * heads * head_dim  # a score over head_dim, and a mean over as many, in each head
    weights = width * head_dim * (2 * heads + 2 * kv_heads)
    return GrowingLayers(kind, layers, weights, 2 * kv_heads * head_dim, flops, flops)


def _kda(layers, weights, heads, d):
    # A token decays S, reads k S, writes k^T u and reads q S. By chunks, Kimi Linear's eq. 13.
    by_chunks = 6 * d * d + 3 * CHUNK * d + CHUNK * CHUNK
    return StateLayers("KDA", layers, weights, heads * d * d, 7 * heads * d * d, heads * by_chunks)

"""GPT-2 (Radford et al. 2019), as released: pre-LN blocks, learned positions, tied head."""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import nn

from ..layers import CausalSelfAttention, KVCache
from ._inputs import check_inputs, unchanged_on_error
from .gpt2_weights import load_weights, read_pretrained


@dataclass(frozen=True)
class GPT2Config:
    """The sizes of a GPT-2; the defaults are the released 124M model's.

    Units: n_ctx counts tokens, n_embd channels. Errors: ValueError naming the bad field.
    Source: Radford et al. 2019, table 2; openai/gpt-2, src/model.py, `default_hparams`.
    """

    vocab_size: int = 50257
    n_ctx: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    layer_norm_epsilon: float = 1e-5

    def __post_init__(self):
        for field in fields(self)[:-1]:
            n = getattr(self, field.name)
            if type(n) is not int or n < 1:
                raise ValueError(f"{field.name} must be an integer >= 1, got {n!r}")
        if not 0 < self.layer_norm_epsilon < 1:
            raise ValueError(f"layer_norm_epsilon must be in (0, 1): {self.layer_norm_epsilon!r}")
        if self.n_embd % self.n_head != 0:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")

    @classmethod
    def gpt2(cls):
        """The 124M model, announced as 117M."""
        return cls()

    @classmethod
    def gpt2_medium(cls):
        """The 355M model."""
        return cls(n_layer=24, n_embd=1024, n_head=16)

    @classmethod
    def gpt2_large(cls):
        """The 774M model."""
        return cls(n_layer=36, n_embd=1280, n_head=20)

    @classmethod
    def gpt2_xl(cls):
        """The 1.5B model."""
        return cls(n_layer=48, n_embd=1600, n_head=25)

    @classmethod
    def mini(cls):
        """A model over bytes that runs in milliseconds: for tests and examples, not released."""
        return cls(vocab_size=256, n_ctx=64, n_embd=32, n_layer=2, n_head=4)


class MLP(nn.Module):
    """y = c_proj(gelu(c_fc(x))), 4 times wider inside, GELU in its tanh form.

    Shapes: x [B, T, n_embd] -> y [B, T, n_embd]. Dtype: the weights'.
    Source: Hendrycks and Gimpel 2016 (arXiv 1606.08415), section 2; openai/gpt-2, src/model.py.
    """

    def __init__(self, n_embd):
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        """Return y [B, T, n_embd]."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """x = x + attn(ln_1(x)); x = x + mlp(ln_2(x)): normalised before each layer, not after.

    Shapes: x [B, T, n_embd] -> [B, T, n_embd]. Dtype: the weights'.
    Source: Radford et al. 2019, section 2.3.
    """

    def __init__(self, config):
        super().__init__()
        D, eps = config.n_embd, config.layer_norm_epsilon
        self.ln_1 = nn.LayerNorm(D, eps=eps)
        self.attn = CausalSelfAttention(D, config.n_head, config.n_ctx)
        self.ln_2 = nn.LayerNorm(D, eps=eps)
        self.mlp = MLP(D)

    def forward(self, x, cache=None):
        """Return [B, T, n_embd]; cache is this layer's own KVCache."""
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """logits = ln_f(blocks(wte[tokens] + wpe[positions])) wte^T.

    Shapes: tokens int64 [B, T] -> logits [B, T, vocab_size]. Dtype: the weights'.
    Weights start as in the release: normal with std 0.02 (wpe 0.01), biases 0. Dropout is not
    implemented: the course decodes (the release trained with 0.1).
    Source: Radford et al. 2019 (GPT-2); openai/gpt-2, src/model.py.
    """

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.n_ctx, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.01 if module is self.wpe else 0.02)

    @classmethod
    def from_pretrained(cls, path_or_repo_id, *, dtype=torch.float32):
        """Return a GPT-2 with the weights of a Hugging Face checkpoint, on the CPU.

        path_or_repo_id: a directory with config.json and model.safetensors, or a repository of
        the Hugging Face Hub, such as "openai-community/gpt2". Dtype: every weight in `dtype`.
        Errors: ImportError without the optional packages; FileNotFoundError naming a missing
        file; ValueError for a configuration this model does not have, or for weights missing,
        left over, of another shape, or untied.
        """
        sizes, tensors = read_pretrained(path_or_repo_id)
        with torch.device("meta"):
            model = cls(GPT2Config(**sizes))
        return load_weights(model, tensors, dtype)

    def forward(self, tokens, cache=None):
        """Return logits [B, T, vocab_size] for tokens int64 [B, T] that follow those in the cache.

        Errors: ValueError for tokens of another rank, dtype or device, for an id outside the
        vocabulary (looked at on the CPU only), for a cache of other layers or batch, and for more
        than n_ctx tokens with those in the cache. The cache is as it was after these, and after
        whatever fails in a layer.
        """
        return self.head(self.hidden(tokens, cache))

    def hidden(self, tokens, cache=None):
        """Return what the head reads, [B, T, n_embd]; arguments and errors as in forward."""
        offset = self._check(tokens, cache)
        positions = torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        x = self.wte(tokens) + self.wpe(positions)
        with unchanged_on_error(cache):
            for i, block in enumerate(self.h):
                x = block(x, None if cache is None else cache[i])
        return self.ln_f(x)

    def head(self, x):
        """Return logits [B, T, vocab_size] for x [B, T, n_embd]: the products with every row of wte."""
        # wte itself, not a second Linear: the tie exists once and counts once.
        return F.linear(x, self.wte.weight)

    def init_cache(self, batch_size, capacity=None):
        """Return one empty KVCache a layer, each for capacity (default n_ctx) tokens."""
        return [block.attn.init_cache(batch_size, capacity) for block in self.h]

    def num_parameters(self):
        """Return the number of weights, a shared tensor counted once; works on the meta device."""
        return sum(p.numel() for p in self.parameters())

    @torch.no_grad()
    def generate(
        self, tokens, max_new_tokens, *, use_cache=True, temperature=0.0, top_k=None, generator=None
    ):
        """Return tokens [B, T + max_new_tokens]: the prompt [B, T] and what the model adds.

        use_cache: prefill once, then feed one token at a time; without, the whole sequence runs
        again for each token. temperature: divides the logits; 0 takes the most likely token.
        top_k: sample among the k most likely. generator: the torch.Generator to sample with.
        Errors: ValueError for an empty prompt, a bad option, or T + max_new_tokens > n_ctx,
        before any work. No state is left behind, and the training flag is not touched.
        """
        self._check(tokens, None)
        if tokens.shape[1] == 0:
            raise ValueError(f"tokens has shape {tuple(tokens.shape)}: the prompt is empty")
        if type(max_new_tokens) is not int or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be an integer >= 0, got {max_new_tokens!r}")
        if not 0 <= temperature < float("inf"):
            raise ValueError(f"temperature must be finite and >= 0, got {temperature!r}")
        if top_k is not None and (type(top_k) is not int or top_k < 1):
            raise ValueError(f"top_k must be an integer >= 1 or None, got {top_k!r}")
        B, T = tokens.shape
        if T + max_new_tokens > self.config.n_ctx:
            raise ValueError(
                f"prompt of {T} + max_new_tokens={max_new_tokens} > n_ctx={self.config.n_ctx}"
            )
        cache = self.init_cache(B, T + max_new_tokens) if use_cache else None
        tokens = step = tokens.clone()
        for _ in range(max_new_tokens):
            logits = self.head(self.hidden(step, cache)[:, -1])
            new = _sample(logits, temperature, top_k, generator)
            tokens = torch.cat([tokens, new], dim=1)
            step = new if use_cache else tokens
        return tokens

    def _check(self, tokens, cache):
        """Return the number of tokens in the cache, or raise."""
        return check_inputs(
            tokens, cache, embedding=self.wte.weight, n_ctx=self.config.n_ctx,
            kinds=[KVCache] * self.config.n_layer,
        )  # fmt: skip


def _sample(logits, temperature, top_k, generator):
    """Return one token id [B, 1] for logits [B, vocab_size]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits.float()
    if top_k is not None:
        # Not all that reach the k-th logit: in 16 bits many can be equal to it.
        best = logits.topk(min(top_k, logits.shape[-1]))
        logits = torch.full_like(logits, float("-inf")).scatter(-1, best.indices, best.values)
    # The largest logit becomes 0 first, so that a small temperature cannot make it inf - inf.
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)

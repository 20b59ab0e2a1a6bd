"""Four layers with what they have kept of a long context, one decode step at a time: for benchmarks/decode.py."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpt2_to_k3.layers import KimiDeltaAttention, MultiHeadLatentAttention, RMSNorm, SwiGLU
from gpt2_to_k3.ops import kda_log_decay, recurrent_kda, softmax_attention


@dataclass(frozen=True)
class Sizes:
    """Kimi Linear's, by default."""

    hidden: int = 2304
    heads: int = 32
    head_dim: int = 128
    kv_heads: int = 8
    rank: int = 512
    shared: int = 64
    intermediate: int = 9216

    def token_bytes(self, kind):
        """What one token adds to a layer's cache, in bfloat16."""
        kv = {"GQA": self.kv_heads, "MHA": self.heads}.get(kind, 0)
        return 2 * (self.rank + self.shared if kind == "MLA" else 2 * kv * self.head_dim)

    def state_bytes(self, kind):
        """A KDA layer's states in float32, and the tails of its convolutions."""
        width = self.heads * self.head_dim
        return 4 * width * self.head_dim + 2 * 3 * 3 * width if kind == "KDA" else 0

    def sequence_bytes(self, kinds, tokens):
        return sum(tokens * self.token_bytes(k) + self.state_bytes(k) for k in kinds)


class KeyValueAttention(nn.Module):
    """q, k, v and output projections of attention with a cache of keys and values."""

    def __init__(self, sizes, kv_heads):
        super().__init__()
        D, self.head_dim, self.kv_heads = sizes.hidden, sizes.head_dim, kv_heads
        self.q_proj = nn.Linear(D, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(D, kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(D, kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, D, bias=False)

    def project(self, x):
        """q, k, v as [B, heads, 1, head_dim]."""
        return [
            p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        ]


def plain_latent(q, rows, scale, rank):
    return softmax_attention(
        q[:, :, None], rows[:, :, None], rows[:, :, None, :rank], scale=scale, causal=False
    )[:, :, 0]  # all heads' queries are rows of one head's


def plain_kda_step(q, k, v, g, beta, S):
    o, new = recurrent_kda(
        *(x[:, None] for x in (q, k, v)), g=g[:, None], beta=beta[:, None], initial_state=S
    )
    S.copy_(new)
    return o[:, 0]


class Memory:
    """What one layer has kept of `tokens` tokens, the newest not yet in it, and how it is read."""

    def __init__(self, kind, layer, batch, tokens, buffer, latent, kda):
        self.kind, self.layer, self.latent, self.kda = kind, layer, latent, kda
        if kind == "KDA":
            self.cache = layer.init_cache(0)
            self.cache.tails = [tail.new_zeros(batch, *tail.shape[1:]) for tail in self.cache.tails]
            # Thousands of states do not fit beside the buffer: they are a part of it.
            S = self.cache.S
            self.cache.S = buffer.take(batch, *S.shape[1:], dtype=S.dtype)
        elif kind == "MLA":
            width = sum(layer.row_dims)
            self.rows = buffer.take(batch, tokens, width)
        else:
            # One tensor, since a compiled graph may copy inputs that share memory and are written to.
            self.kv = buffer.take(2, batch, layer.kv_heads, tokens, layer.head_dim)

    def read(self, *x):
        """The token's reading: what "mixing" times, with inputs of the shape that `step` gives."""
        if self.kind == "KDA":
            return self.kda(*x, self.cache.S)
        if self.kind == "MLA":
            return self.latent(x[0], self.rows, self.layer.scale, self.layer.row_dims[0])
        # Few keys with many queries, or the library would fall back to an expanded copy.
        return F.scaled_dot_product_attention(x[0], *self.kv, enable_gqa=True)

    def inputs(self, batch, sizes):
        """Random ones for `read` alone."""
        H, K = sizes.heads, sizes.head_dim
        weight = self.layer.o_proj.weight
        new = functools.partial(torch.randn, device=weight.device, dtype=weight.dtype)
        if self.kind == "MLA":
            return (new(batch, H, sizes.rank + sizes.shared),)
        if self.kind != "KDA":
            return (new(batch, H, 1, K),)
        q, k = (F.normalize(new(batch, H, K), dim=-1) for _ in range(2))
        g = -torch.rand(batch, H, K, device=weight.device)
        return q, k, new(batch, H, K), g, torch.rand(batch, H, device=weight.device)

    def before(self, x):
        """What `read` takes for the layer's input x [B, 1, D], and the gate of its output, if any."""
        layer = self.layer
        if self.kind == "KDA":
            q, k, v, beta, tails = layer.project(x, self.cache)
            z = layer.f_b_proj(layer.f_a_proj(x)).unflatten(-1, (layer.num_heads, -1))
            g = kda_log_decay(z, layer.A_log, layer.dt_bias, layer.lower_bound)
            for held, tail in zip(self.cache.tails, tails, strict=True):
                held.copy_(tail)
            gate = layer.g_b_proj(layer.g_a_proj(x)).sigmoid()
            return tuple(a[:, 0] for a in (q, k, v, g, beta)), gate
        if self.kind == "MLA":
            q, rows = layer.project(x)
            self.rows[:, -1:] = rows
            q, q_shared = q[:, 0].split(layer.query_dims, -1)
            q = torch.cat([torch.einsum("bhn,hnc->bhc", q, self.absorbed()[0]), q_shared], -1)
            return (q,), None
        q, k, v = layer.project(x)
        self.kv[..., -1:, :] = torch.stack([k, v])
        return (q,), None

    def absorbed(self):
        """W_k and W_v of MLA, a head each."""
        heads = self.layer.kv_b_proj.weight.unflatten(0, (self.layer.num_heads, -1))
        return heads.split(self.layer.kv_dims, 1)

    def after(self, o, gate):
        """The layer's output, from what `read` gave."""
        layer = self.layer
        if self.kind == "KDA":
            return layer.o_proj(layer.o_norm(o[:, None]).flatten(2) * gate)
        if self.kind == "MLA":
            o = torch.einsum("bhc,hvc->bhv", o, self.absorbed()[1])
            return layer.o_proj(o.flatten(1)[:, None])
        return layer.o_proj(o.transpose(1, 2).flatten(2))

    def step(self, x):
        """The layer's output for x [B, 1, D], as the library's forward computes it."""
        inputs, gate = self.before(x)
        return self.after(self.read(*inputs), gate)


def before(memory, norm, x):
    return memory.before(norm(x))


def after(memory, norm, feed_forward, x, o, gate):
    x = x + memory.after(o, gate)
    return x + feed_forward(norm(x))


class Buffer:
    """One allocation of random numbers, from which each measurement takes its caches anew."""

    def __init__(self, memory_bytes, device, dtype):
        self.all = torch.empty(memory_bytes // dtype.itemsize, device=device, dtype=dtype)
        self.used = self.spoilt = len(self.all)
        self.reset()

    def reset(self):
        """Take all back. What was written to as another dtype need not be a number in this one."""
        for part in self.all[: self.spoilt].split(2**28):
            part.normal_()
        self.used = self.spoilt = 0

    def take(self, *shape, dtype=None):
        """A tensor of `shape`; in float32 its numbers are pairs of the buffer's, read as one."""
        dtype = dtype or self.all.dtype
        n = torch.Size(shape).numel() * dtype.itemsize // self.all.dtype.itemsize
        self.used += n
        if self.used > len(self.all):
            raise ValueError(f"shape {shape}: more than the {self.all.nbytes:,} bytes there are")
        if dtype != self.all.dtype:
            self.spoilt = self.used
        return self.all[self.used - n : self.used].view(dtype).view(shape)


class Stack(nn.Module):
    """The weights of four layers: norm, mixing, norm, feed-forward.

    With compiled=True, torch.compile fuses what stands between two readings.
    """

    def __init__(self, kinds, sizes, compiled=False):
        super().__init__()
        # One graph serves all layers of a kind, once for batch 1 and once for all others.
        self.before, self.after = (
            torch.compile(f, dynamic=True) if compiled else f for f in (before, after)
        )
        D, H, K = sizes.hidden, sizes.heads, sizes.head_dim
        made = {
            "KDA": lambda: KimiDeltaAttention(D, H, K),
            "MLA": lambda: MultiHeadLatentAttention(
                D, H, kv_lora_rank=sizes.rank, qk_nope_head_dim=K,
                qk_rope_head_dim=sizes.shared, v_head_dim=K, n_ctx=1,
            ),
            "GQA": lambda: KeyValueAttention(sizes, sizes.kv_heads),
            "MHA": lambda: KeyValueAttention(sizes, H),
        }  # fmt: skip
        self.kinds, self.sizes = kinds, sizes
        self.mixing = nn.ModuleList(made[kind]() for kind in kinds)
        self.feed_forward = nn.ModuleList(SwiGLU(D, sizes.intermediate) for _ in kinds)
        self.norms = nn.ModuleList(RMSNorm(D, 1e-5) for _ in range(2 * len(kinds)))

    def memories(self, batch, tokens, buffer, latent, kda):
        buffer.reset()
        return [
            Memory(kind, layer, batch, tokens, buffer, latent, kda)
            for kind, layer in zip(self.kinds, self.mixing, strict=True)
        ]

    def step(self, x, memories):
        for i, memory in enumerate(memories):
            inputs, gate = self.before(memory, self.norms[2 * i], x)
            o = memory.read(*inputs)
            x = self.after(memory, self.norms[2 * i + 1], self.feed_forward[i], x, o, gate)
        return x

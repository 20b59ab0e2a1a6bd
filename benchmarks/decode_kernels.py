"""Triton kernels of a decode step, for benchmarks/decode.py alone: the library stays pure PyTorch.

latent_attention reads each cached row once for all heads. kda_step reads and writes each state once.
"""

import torch
import triton
import triton.language as tl

# What is tried on a device for rows of 512 + 64; the fastest is kept: tokens a tile, warps, stages, and
# how many programs share a multiprocessor (one loads while another computes).
LATENT_TILES = ((64, 4, 2, 2), (32, 4, 3, 2), (128, 8, 2, 1))


@triton.jit
def _latent_part(
    q, rows, o, lse, length, per_split, scale,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One sequence's tokens split * per_split onwards: the heads' reading, and its log-sum."""
    b, split, splits = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    heads, c, r = tl.arange(0, H), tl.arange(0, C), tl.arange(0, R)
    query = q + b * H * (C + R) + heads[:, None] * (C + R)
    q_c, q_r = tl.load(query + c[None]), tl.load(query + C + r[None])
    top = tl.full([H], -float("inf"), tl.float32)
    total, acc = tl.zeros([H], tl.float32), tl.zeros([H, C], tl.float32)
    start = split * per_split
    end = tl.minimum(start + per_split, length)
    base = rows + b * length * (C + R)
    for first in range(start, end, TILE):
        t = first + tl.arange(0, TILE)
        inside = (t < end)[:, None]
        row = base + t[:, None].to(tl.int64) * (C + R)
        latent = tl.load(row + c[None], mask=inside, other=0.0)
        shared = tl.load(row + C + r[None], mask=inside, other=0.0)
        s = tl.dot(q_c, tl.trans(latent)) + tl.dot(q_r, tl.trans(shared))
        s = tl.where((t < end)[None], s * scale, -float("inf"))
        new = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new[:, None])
        keep = tl.exp2(top - new)
        total = total * keep + tl.sum(p, 1)
        acc = acc * keep[:, None] + tl.dot(p.to(latent.dtype), latent)
        top = new
    part = (b * splits + split) * H + heads
    tl.store(o + part[:, None] * C + c[None], acc / total[:, None])
    tl.store(lse + part, top + tl.log2(total))


@triton.jit
def _merge(o, lse, merged, splits, H: tl.constexpr, C: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr):  # fmt: skip
    """TILE columns of one head's reading: the parts', weighted by their sums."""
    b, head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    c, top = tile * TILE + tl.arange(0, TILE), -float("inf")
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        x = tl.load(lse + (b * splits + part) * H + head, mask=part < splits, other=-float("inf"))
        top = tl.maximum(top, tl.max(x, 0))
    total, acc = 0.0, tl.zeros([TILE], tl.float32)
    for first in range(0, splits, PARTS):
        part = first + tl.arange(0, PARTS)
        at, inside = (b * splits + part) * H + head, part < splits
        weight = tl.exp2(tl.load(lse + at, mask=inside, other=-float("inf")) - top)
        total += tl.sum(weight, 0)
        parts = tl.load(o + at[:, None] * C + c[None], mask=inside[:, None], other=0.0)
        acc += tl.sum(weight[:, None] * parts, 0)
    tl.store(merged + (b * H + head) * C + c, acc / total)


def splits_for(batch, length, tile, programs):
    """Into how many parts to cut `length`, so that `programs` at once are busy to the end."""
    tiles, best = triton.cdiv(length, tile), None
    for splits in range(1, min(tiles, 2 * programs) + 1):
        # rounds of programs, each as long as the longest part; a part costs a little by itself
        cost = triton.cdiv(batch * splits, programs) * (triton.cdiv(tiles, splits) + 2)
        if best is None or cost < best[0]:
            best = cost, splits
    return best[1]


def latent_attention(q, rows, scale, rank, tiles=LATENT_TILES[0]):
    """o = softmax(scale q . rows) rows[..., :rank]: one token's H queries [B, H, rank + R] -> [B, H, rank].

    rows [B, T, rank + R], contiguous, are keys and values of all heads. The parts of T are read by
    programs of their own and merged by the merge rule of chapter 3, here in powers of 2.
    """
    (B, T, width), H = rows.shape, q.shape[1]
    tile, warps, stages, together = tiles
    cuda = rows.is_cuda
    processors = torch.cuda.get_device_properties(rows.device).multi_processor_count if cuda else 4
    splits = splits_for(B, T, tile, processors * together)
    per_split = triton.cdiv(triton.cdiv(T, tile), splits) * tile
    splits = triton.cdiv(T, per_split)  # rounding up to tiles may leave the last parts empty
    o = torch.empty(B, splits, H, rank, device=q.device)
    lse = torch.empty(B, splits, H, device=q.device)
    _latent_part[B, splits](
        q, rows, o, lse, T, per_split, scale * 1.4426950408889634, H, rank, width - rank, tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits == 1:
        return o[:, 0].to(q.dtype)
    merged = torch.empty_like(q[..., :rank], memory_format=torch.contiguous_format)
    columns = min(rank, 128)
    _merge[B, H, rank // columns](o, lse, merged, splits, H, rank, columns, 64, num_warps=4)
    return merged


@triton.jit
def _kda_step(q, k, v, g, beta, S, o, scale, K: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr):
    """One head of one sequence, TILE columns of its state."""
    head, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, c = tl.arange(0, K), tile * TILE + tl.arange(0, TILE)
    k_d = tl.load(k + head * K + d).to(tl.float32)
    q_d = tl.load(q + head * K + d).to(tl.float32) * scale
    at = S + head * K * V + d[:, None] * V + c[None]
    state = tl.load(at) * tl.exp(tl.load(g + head * K + d))[:, None]
    old = tl.sum(k_d[:, None] * state, 0)
    u = tl.load(beta + head) * (tl.load(v + head * V + c).to(tl.float32) - old)
    state += k_d[:, None] * u[None]
    tl.store(at, state)
    tl.store(o + head * V + c, tl.sum(q_d[:, None] * state, 0))


def kda_step(q, k, v, g, beta, S):
    """ops.recurrent_kda for one token, in place: q, k, g [B, H, K], v [B, H, V], beta [B, H], S [B, H, K, V]."""
    B, H, K, V = S.shape
    o = torch.empty(B, H, V, device=v.device)
    tile = min(V, 32)
    _kda_step[B * H, V // tile](
        *(x.contiguous() for x in (q, k, v, g, beta)), S, o, K**-0.5, K, V, tile, num_warps=4
    )
    return o.to(v.dtype)

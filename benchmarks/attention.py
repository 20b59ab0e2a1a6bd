"""Softmax attention on a GPU: the plain form against a fused FlashAttention kernel, by length.

Both in bfloat16, causal, on the same q, k, v; medians of forms that take turns. The plain form is
the usual four PyTorch calls; the fused one is PyTorch's FlashAttention backend.

usage: python benchmarks/attention.py [--save FILE]
"""

import argparse
import functools

import torch
import torch.nn.functional as F
from memory import peak_bytes
from record import write
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt2_to_k3.lab import pick_device, side_by_side

SEED = 0
SIZES = {"B": 1, "H": 12, "K": 64}  # GPT-2 small's heads


def plain(q, k, v):
    T = q.shape[-2]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(T, T, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def flash(q, k, v):
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def forward(form, x):
    with torch.no_grad():
        return form(*x)


def backward(form, x):
    o = form(*x)
    torch.autograd.grad(o, x, torch.ones_like(o))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    arguments = parser.parse_args()
    device, rows = pick_device(), []
    torch.manual_seed(SEED)
    for T in (1024, 2048, 4096, 8192, 16_384, 32_768):
        shape = (SIZES["B"], SIZES["H"], T, SIZES["K"])
        x = [
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        ]
        error = (forward(plain, x) - forward(flash, x)).abs().max().item()
        for direction, run in (("forward", forward), ("forward+backward", backward)):
            steps = {form.__name__: functools.partial(run, form, x) for form in (plain, flash)}
            seconds = side_by_side(steps, rounds=7, inner=3, device=device)
            for name, step in steps.items():
                row = {"form": name, "direction": direction, "T": T, **SIZES}
                row |= {"seconds": seconds[name], "peak_bytes": peak_bytes(step, device)}
                rows.append(row | {"largest_difference": error})
                print(row, flush=True)
    if arguments.save:
        write(arguments.save, device, SEED, {"rows": rows})


if __name__ == "__main__":
    main()

"""The two ceilings of a device: bytes read per second and bfloat16 FLOPs per second.

usage: python benchmarks/roofline.py [--save FILE]
"""

import argparse

import torch
from record import write

from gpt2_to_k3.lab import pick_device, side_by_side

SEED = 0


def seconds(step, device):
    return side_by_side({"step": step}, rounds=9, inner=10, device=device)["step"]


def read_bandwidth(device, numbers):
    """Bytes per second of a sum over `numbers` float32 values: reads everything, writes almost nothing."""
    x = torch.rand(numbers, device=device)
    return x.nbytes / seconds(lambda: x.sum(), device)


def matmul_flops(device, n):
    """FLOPs per second of an [n, n] x [n, n] product in bfloat16."""
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * n**3 / seconds(lambda: a @ b, device)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    save = parser.parse_args().save
    device = pick_device()
    torch.manual_seed(SEED)
    big = device.type == "cuda"
    result = {
        "read_bytes_per_second": read_bandwidth(device, 2**31 if big else 2**26),
        "bf16_matmul_flops_per_second": matmul_flops(device, 8192 if big else 1024),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if big else None,
    }
    print(result)
    if save:
        write(save, device, SEED, result)


if __name__ == "__main__":
    main()

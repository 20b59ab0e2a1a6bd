"""Microscaling formats: numbers of 4 or 8 bits, and a power of two for every 32 of them.

MXFP4 has elements E2M1 and takes 4.25 bits a number, MXFP8 here E4M3 and 8.25. An element's code is
an index into the table of its values; a scale's code e stands for 2^(e - 127). Kimi K3 stores the
weights of its routed experts in MXFP4, and nothing else.
"""

import math

import torch

from ..ops._check import compute_dtype

BLOCK = 32


def element_values(exponent_bits, mantissa_bits):
    """The numbers of a small float (eq. 13.1), by code: from the top bit sign, exponent, mantissa.

    (-1)^sign 2^(exponent - bias) (1 + mantissa / 2^mantissa_bits), with
    bias = 2^(exponent_bits - 1) - 1. Exponent 0 is subnormal: 2^(1 - bias) mantissa /
    2^mantissa_bits. Every code is a number.
    Shapes: -> [2^(1 + exponent_bits + mantissa_bits)], the positive codes first and ascending.
    Dtype: float32, exact.
    Source: OCP Microscaling Formats (MX) v1.0, section 5.3.
    """
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    positive = [
        2.0 ** (max(e, 1) - bias) * ((e > 0) + m / steps)
        for e in range(2**exponent_bits)
        for m in range(steps)
    ]
    return torch.tensor(positive + [-v for v in positive], dtype=torch.float32)


E2M1 = element_values(2, 1)
"""Values of MXFP4's 16 codes (eq. 13.1): 0, 0.5, 1, 1.5, 2, 3, 4, 6, then the same negative."""

E4M3 = element_values(4, 3)
"""Values of MXFP8's 256 codes: up to 448, and NaN at 127 and 255."""
E4M3[[127, 255]] = torch.nan

E8M0 = torch.tensor([2.0 ** (e - 127) for e in range(255)] + [torch.nan], dtype=torch.float32)
"""Values of a scale's 256 codes: 2^-127 to 2^127, and NaN at 255."""


def quantize_mxfp4(x):
    """codes, scales of x in MXFP4: scale 2^(floor(log2(block max)) - 2), elements E2M1 (eq. 13.2).

    An element is x / scale rounded to the nearest value, of two equally near ones to the even code,
    and at most 6: what lies between 6 and 8 times the scale saturates. Scales end at 2^-127, which
    a block of zeros has too, and at 2^127: beyond, a block is rounded away or saturates.

    Shapes: x [..., n], n a multiple of 32 -> codes uint8 [..., n], one element a byte; scales
    uint8 [..., n / 32].
    Dtype: x may be float16, bfloat16, float32 or float64; the rounding is exact.
    Errors: ValueError if x is not floating point, if n is not a multiple of 32, or for NaN or
    infinity.
    Source: OCP Microscaling Formats (MX) v1.0, section 6.3; `microsoft/microxcaling`.
    """
    return _quantize(x, E2M1)


def quantize_mxfp8(x):
    """codes, scales of x in MXFP8: scale 2^(floor(log2(max of the block)) - 8), elements E4M3.

    As quantize_mxfp4 (eq. 13.2, with 8 for 2), at most 448: what lies between 448 and 512 times the
    scale saturates.
    Source: as quantize_mxfp4.
    """
    return _quantize(x, E4M3)


def dequantize(codes, scales, elements, dtype=torch.float32):
    """x = elements[code] * 2^(scale - 127): a code's value times its block's scale (eq. 13.2).

    Shapes: codes uint8 [..., n], scales uint8 [..., n / 32], elements E2M1 or E4M3 -> x [..., n].
    Dtype: dtype; exact in float32 and wider, but for what float32 does not hold: a product from
    2^128 up is infinite there. Code 255 of a scale, and a NaN element, give NaN.
    Errors: ValueError if codes or scales are not uint8, if their shapes do not fit, or for a code
    that elements does not have.
    Source: OCP Microscaling Formats (MX) v1.0, section 6.1.
    """
    for name, t in (("codes", codes), ("scales", scales)):
        if t.dtype != torch.uint8:
            raise ValueError(f"{name} must be uint8, got {t.dtype}")
    n = _blocks("codes", codes)
    if scales.shape != (*codes.shape[:-1], n):
        raise ValueError(
            f"scales has shape {tuple(scales.shape)}, expected {[*codes.shape[:-1], n]}, as codes "
            f"has shape {tuple(codes.shape)}"
        )
    # As a Python number: 256 is no uint8.
    if codes.numel() and (largest := codes.max().item()) >= len(elements):
        raise ValueError(f"codes must be below {len(elements)}, got {largest}")
    wide = torch.promote_types(dtype, torch.float32)
    values = elements.to(codes.device, wide)[codes.int()].unflatten(-1, (n, BLOCK))
    return (values * E8M0.to(codes.device, wide)[scales.int()][..., None]).flatten(-2).to(dtype)


def fake_quantize(x, elements):
    """y = dequantize(quantize(x)) forward, dy/dx = 1 backward (eq. 13.3): training sees rounding.

    The straight-through estimator: the step function's own gradient is 0 almost everywhere. Values
    that saturate let the gradient through too.

    Shapes: x [..., n], n a multiple of 32; elements E2M1 (MXFP4) or E4M3 (MXFP8) -> y [..., n].
    Dtype: x's; y holds the quantised values exactly, unless float16's range cuts them.
    Errors: as quantize_mxfp4.
    Source: Bengio et al. 2013 (arXiv 1308.3432); Jacob et al. 2017 (arXiv 1712.05877), section 3.
    """
    codes, scales = _quantize(x, elements)
    # x - x.detach() is 0, and has the gradient 1.
    return dequantize(codes, scales, elements, x.dtype) + (x - x.detach())


def _quantize(x, elements):
    dtype = compute_dtype(x=x)
    n = _blocks("x", x)
    if not x.isfinite().all():
        bad = x[~x.isfinite()].flatten()[0].item()
        raise ValueError(f"x must be finite, got {bad}: MX has no code for it")
    x = x.detach().to(dtype).unflatten(-1, (n, BLOCK))
    positive = elements[: len(elements) // 2]
    positive = positive[positive.isfinite()].to(x.device, x.dtype)
    largest = x.abs().amax(-1)
    # frexp: largest = m 2^e, 0.5 <= m < 1, exact where log2 rounds up just below a power of two.
    e = largest.frexp().exponent - math.frexp(positive[-1].item())[1]
    scales = torch.where(largest > 0, e.clamp(-127, 127) + 127, 0).to(torch.uint8)
    y = x / E8M0.to(x.device, x.dtype)[scales.int()][..., None]
    size = y.abs().contiguous()  # or bucketize warns
    # The last pair of neighbours takes all that lies above it too: it saturates.
    below = (torch.bucketize(size, positive, right=True) - 1).clamp(max=len(positive) - 2)
    middle = (positive[below] + positive[below + 1]) / 2
    up = (size > middle) | ((size == middle) & (below % 2 == 1))
    codes = below + up + y.signbit() * (len(elements) // 2)
    return codes.to(torch.uint8).flatten(-2), scales


def _blocks(name, x):
    """Return the number of blocks in the last axis."""
    if x.ndim < 1 or x.shape[-1] % BLOCK != 0:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected [..., n] with n a multiple of {BLOCK}"
        )
    return x.shape[-1] // BLOCK

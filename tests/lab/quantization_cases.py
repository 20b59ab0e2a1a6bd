"""The two formats, and what it is for their values to be the same."""

import pytest
import torch

from gpt2_to_k3.lab.quantization import E2M1, E4M3, quantize_mxfp4, quantize_mxfp8

FORMATS = {"mxfp4": (quantize_mxfp4, E2M1, 2), "mxfp8": (quantize_mxfp8, E4M3, 8)}
both = pytest.mark.parametrize("quantize, elements, emax", FORMATS.values(), ids=FORMATS)


def same(a, b):
    """Equal bit for bit: -0 is not 0; a NaN is any NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan())
    a, b = a.nan_to_num(nan=1.5), b.nan_to_num(nan=1.5)
    assert torch.equal(a, b) and torch.equal(a.signbit(), b.signbit())

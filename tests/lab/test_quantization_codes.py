"""What the codes of elements and scales stand for, and dequantize."""

import numpy as np
import pytest
import torch
from quantization_cases import FORMATS, both, same

from gpt2_to_k3.lab.quantization import E2M1, E4M3, E8M0, dequantize, quantize_mxfp4

F64 = torch.float64
BYTES = torch.arange(256).to(torch.uint8)
# OCP MX v1.0, section 5.3.3: the table of E2M1, code by code.
OCP_E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_all_codes_of_e2m1():
    same(E2M1, torch.tensor(OCP_E2M1))


def test_all_codes_of_e4m3_and_e8m0():
    same(E4M3, BYTES.view(torch.float8_e4m3fn).float())
    same(E8M0, BYTES.view(torch.float8_e8m0fnu).float())
    # OCP 8-bit floating point, table of E4M3: largest, smallest normal and smallest number.
    assert E4M3[[126, 8, 1]].tolist() == [448, 2**-6, 2**-9] and E4M3[[127, 255]].isnan().all()
    assert E8M0[[0, 127, 254]].tolist() == [2**-127, 1, 2**127]


@both
def test_every_code_with_every_scale(quantize, elements, emax):
    codes = torch.arange(max(32, len(elements))).remainder(len(elements)).to(torch.uint8)
    codes = codes.repeat(256, 1)
    scales = BYTES[:, None].repeat(1, codes.shape[1] // 32)
    want = elements.double()[codes.int()] * torch.pow(2.0, BYTES.double() - 127)[:, None]
    want[255] = torch.nan
    for dtype in (torch.float32, F64):
        same(dequantize(codes, scales, elements, dtype), want.to(dtype))
    same(dequantize(codes, scales, elements), want.float())
    assert want[:255].abs().nan_to_num().max() > torch.finfo(torch.float32).max  # inf in float32


@pytest.mark.parametrize("mode, bits", [("mxfp4", 4), ("mxfp8", 8)])
def test_mlx_reads_every_code_alike(mode, bits):
    """Packed its way, the first code in the lowest bits. Its bfloat16 holds all values."""
    try:
        import mlx.core as mx
    except ImportError:
        pytest.fail('mlx is missing: pip install "mlx[cpu]"', pytrace=False)
    mx.set_default_device(mx.cpu)
    elements = FORMATS[mode][1]
    codes = np.arange(256) % len(elements)
    codes = np.where(np.isnan(elements.numpy())[codes], 0, codes).astype(np.uint8)
    codes = np.tile(codes, (240, 1))  # scales from 2^-112, below which it may flush to 0
    scales = np.repeat(np.arange(7, 247, dtype=np.uint8)[:, None], 8, 1)
    packed = codes if bits == 8 else codes[:, ::2] | codes[:, 1::2] << 4
    words = mx.array(np.ascontiguousarray(packed).view(np.uint32))
    theirs = mx.dequantize(words, mx.array(scales), mode=mode).astype(mx.float32)
    ours = dequantize(torch.from_numpy(codes), torch.from_numpy(scales), elements)
    same(ours, torch.from_numpy(np.array(theirs)))


def test_bad_codes_are_named():
    codes, scales = quantize_mxfp4(torch.ones(2, 64))
    with pytest.raises(ValueError, match="^codes must be uint8, got torch.int32"):
        dequantize(codes.int(), scales, E2M1)
    with pytest.raises(ValueError, match="^scales must be uint8, got torch.float32"):
        dequantize(codes, scales.float(), E2M1)
    with pytest.raises(ValueError, match=r"^codes has shape \(2, 63\), expected .* multiple of 32"):
        dequantize(codes[:, 1:], scales, E2M1)
    for wrong in (scales[:1], scales[:, :1], scales[0]):
        with pytest.raises(ValueError, match=r"^scales has shape .*, expected \[2, 2\], as codes"):
            dequantize(codes, wrong, E2M1)
    with pytest.raises(ValueError, match="^codes must be below 16, got 16"):
        dequantize(torch.full_like(codes, 16), scales, E2M1)

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantization_cases import FORMATS, both, same

from gpt2_to_k3.lab.quantization import (
    E2M1,
    E4M3,
    dequantize,
    fake_quantize,
    quantize_mxfp4,
    quantize_mxfp8,
)

F64 = torch.float64


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def block(*values, dtype=torch.float32):
    """A block of these values, and zeros."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))], dtype=dtype)


def by_definition(x, elements, emax):
    """In exact fractions: of all elements the nearest to x / scale; of two, the even code."""
    half = len(elements) // 2
    finite = {c: Fraction(v) for c, v in enumerate(elements[:half].tolist()) if v == v}
    codes, scales = [], []
    for row in x.reshape(-1, 32).tolist():
        largest = max(map(abs, row))
        e = -127
        if largest:
            e = max(-127, min(127, math.frexp(largest)[1] - 1 - emax))
        scales.append(e + 127)
        for v in row:
            y = min(abs(Fraction(v)) / Fraction(2) ** e, max(finite.values()))
            code = min(finite, key=lambda c: (abs(finite[c] - y), c % 2))
            codes.append(code + half * (math.copysign(1, v) < 0))
    codes, scales = (torch.tensor(c, dtype=torch.uint8) for c in (codes, scales))
    return codes.view(x.shape), scales.view(*x.shape[:-1], -1)


@both
def test_every_code_and_scale_survives(quantize, elements, emax):
    """A block that has the largest element is read back with the codes it was written with."""
    finite = torch.arange(len(elements))[elements.isfinite()].to(torch.uint8)
    top = int(elements.nan_to_num().argmax())
    codes = torch.cat([torch.tensor([top], dtype=torch.uint8).expand(len(finite), 1),
                       finite[:, None].expand(-1, 31)], 1)  # fmt: skip
    for scale in range(255):
        scales = torch.full((len(finite), 1), scale, dtype=torch.uint8)
        x = dequantize(codes, scales, elements, F64)
        got = quantize(x)
        assert torch.equal(got[0], codes) and torch.equal(got[1], scales)
        if x.abs().max() <= torch.finfo(torch.float32).max:
            got = quantize(x.float())
            assert torch.equal(got[0], codes) and torch.equal(got[1], scales)


def test_mxfp4_by_hand():
    """Largest 7: scale 2^(2 - 2) = 1. The ties from 0.25 to 5 go to the even code."""
    x = block(7, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.2501, -0.25, -0.7499, 5.001)
    codes, scales = quantize_mxfp4(x)
    assert scales.tolist() == [127]
    want = [6, 0, 1, 1, 2, 2, 4, 4, 0.5, -0.0, -0.5, 6]
    same(dequantize(codes, scales, E2M1), block(*want))
    codes, scales = quantize_mxfp4(block(-0.5, 3 / 64))  # 2^-1, so the scale is 2^-3
    assert scales.tolist() == [124] and codes[:2].tolist() == [14, 1]


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_random_blocks_are_the_definition(quantize, elements, emax, dtype):
    x = (normal(3, 2, 64) * torch.exp(3 * normal(3, 2, 64, seed=1))).to(dtype)
    for got, want in zip(quantize(x), by_definition(x, elements, emax), strict=True):
        assert torch.equal(got, want) and got.dtype == torch.uint8


@both
@settings(max_examples=20, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=12),
    places=st.integers(-40, 40),
)
def test_any_floats_are_the_definition(quantize, elements, emax, values, places):
    """Subnormals, both zeros and the largest numbers; and values close to each other."""
    near = [math.ldexp(1 + i / 64, places) for i in range(20)]
    for dtype in (torch.float32, F64):
        for x in (block(*values, dtype=dtype), block(*near, *values[:1], dtype=dtype)):
            for got, want in zip(quantize(x), by_definition(x, elements, emax), strict=True):
                assert torch.equal(got, want)


def test_e4m3_elements_are_rounded_as_torch_does():
    """With scale 1 (largest 448) the codes are those of torch.float8_e4m3fn, ties and all."""
    ties = (E4M3[:126] + E4M3[1:127]) / 2
    x = torch.cat([ties, ties * (1 + 2**-20), -ties * (1 - 2**-20), normal(326)])
    x = torch.cat([torch.full((22, 1), 448.0), x[: 22 * 31].view(22, 31)], 1)
    codes, scales = quantize_mxfp8(x)
    assert (scales == 127).all()
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))


@both
def test_the_scale_just_below_and_at_a_power_of_two(quantize, elements, emax):
    """log2 of the number before 2^k rounds to k in float32: exponents must come from bits."""
    for k in (-100, -1, 0, 1, 7, 100):
        power = torch.tensor(2.0**k)
        below = torch.nextafter(power, torch.tensor(0.0))
        assert quantize(block(below.item()))[1].item() == k - 1 - emax + 127
        assert quantize(block(2.0**k))[1].item() == k - emax + 127


@both
def test_values_above_the_largest_element_saturate(quantize, elements, emax):
    top = elements.nan_to_num().max().item()
    limit = 2.0 ** (emax + 1)
    x = block(math.nextafter(limit, 0), top + 0.99 * (limit - top), -top * 1.01, dtype=F64)
    got = dequantize(*quantize(x), elements, F64)
    assert got[:3].tolist() == [top, top, -top]
    assert quantize(block(limit))[1].item() == 128


@both
def test_the_ends_of_the_scales(quantize, elements, emax):
    codes, scales = quantize(torch.zeros(2, 64))
    assert not codes.any() and not scales.any()
    codes, scales = quantize(block(-0.0))
    assert codes[:2].tolist() == [len(elements) // 2, 0] and scales.item() == 0
    smallest = block(2.0**-149)  # float32's
    assert quantize(smallest)[1].item() == 0 and not quantize(smallest)[0].any()
    least = elements[1].item() * 2.0**-127  # the smallest number that the format has
    assert quantize(block(least))[0][0] == 1
    assert dequantize(*quantize(block(least)), elements)[0].item() == least
    huge = block(1e300, -1e300, 1.0, dtype=F64)
    codes, scales = quantize(huge)
    top = elements.nan_to_num().max().item() * 2.0**127
    assert scales.item() == 254
    assert dequantize(codes, scales, elements, F64)[:3].tolist() == [top, -top, 0]
    largest = block(torch.finfo(torch.float32).max)
    assert dequantize(*quantize(largest), elements).isfinite().all()


@both
def test_blocks_are_on_their_own_and_inputs_unchanged(quantize, elements, emax):
    x = normal(2, 3, 64)
    kept, (codes, scales) = x.clone(), quantize(x)
    assert codes.shape == (2, 3, 64) and scales.shape == (2, 3, 2) and torch.equal(x, kept)
    for i in (0, 1):
        part = x[1, 2, 32 * i : 32 * i + 32]
        assert torch.equal(quantize(part)[0], codes[1, 2, 32 * i : 32 * i + 32])
        assert torch.equal(quantize(part)[1], scales[1, 2, i : i + 1])
    turned = x.transpose(0, 1)  # not contiguous
    assert torch.equal(quantize(turned)[0], codes.transpose(0, 1))
    twice = quantize(dequantize(codes, scales, elements))
    same(dequantize(*twice, elements), dequantize(codes, scales, elements))
    for shape in ((0,), (3, 0), (0, 32)):
        empty = quantize(torch.zeros(shape))
        assert dequantize(*empty, elements).shape == shape


def test_how_large_the_errors_are():
    """Of a Gaussian: about 12 % (root mean square) in MXFP4, 3 % in MXFP8."""
    x = normal(512, 64)
    for (quantize, elements, _), low, high in zip(
        FORMATS.values(), (0.1, 0.02), (0.14, 0.04), strict=True
    ):
        error = dequantize(*quantize(x), elements) - x
        assert low < (error.square().mean() / x.square().mean()).sqrt() < high


# Training with it


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_fake_quantize(quantize, elements, emax, dtype):
    """Forward exactly the quantised values, backward the identity."""
    x = normal(64, 96, dtype=dtype).requires_grad_()
    y = fake_quantize(x, elements)
    q = dequantize(*quantize(x), elements, dtype)
    assert y.dtype == dtype and torch.equal(y, q) and not torch.equal(y, x)
    weigh = normal(64, 96, seed=1, dtype=dtype)
    assert torch.equal(torch.autograd.grad((weigh * y).sum(), x)[0], weigh)
    assert torch.equal(fake_quantize(y.detach(), elements), y)
    assert not fake_quantize(x.detach(), elements).requires_grad
    wide = dequantize(*quantize(x.float()), elements)
    assert torch.equal(q.float(), wide)  # bfloat16 holds every value


def test_float16_holds_the_usual_values():
    x = normal(64, dtype=torch.float16)
    y = fake_quantize(x, E2M1)
    assert y.dtype == torch.float16 and torch.equal(y.float(), fake_quantize(x.float(), E2M1))


def test_a_weight_learns_through_the_rounding():
    """The master weight moves by steps too small to change a code, until the sum does."""
    w = torch.full((32,), 1.0, requires_grad=True)
    w.data[0] = 4.0
    for _ in range(80):
        loss = (fake_quantize(w, E2M1)[1] - 2).square()
        (grad,) = torch.autograd.grad(loss, w)
        w.data -= 0.01 * grad
    assert fake_quantize(w, E2M1)[1] == 2 and loss == 0


# Errors


@both
def test_bad_inputs_are_named(quantize, elements, emax):
    for f in (quantize, lambda x: fake_quantize(x, elements)):
        for bad in (torch.nan, torch.inf, -torch.inf):
            with pytest.raises(ValueError, match=f"^x must be finite, got {bad}: MX has no code"):
                f(block(1.0, bad))
        for shape in ((), (31,), (2, 33), (32, 16)):
            with pytest.raises(ValueError, match=r"^x has shape .*, expected .* multiple of 32"):
                f(torch.ones(shape))
        with pytest.raises(ValueError, match="^x must be a floating point tensor, got torch.int64"):
            f(torch.ones(32, dtype=torch.int64))

import math
from itertools import product

import pytest
import torch

from gpt2_to_k3.ops import chunk_kda, kda_log_decay

B, T, H, K = 2, 7, 3, 5
F32, F64 = torch.float32, torch.float64


def make(dtype=F64, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = dict(z=(B, T, H, K), A_log=(H,), dt_bias=(H * K,))
    return {n: (2 * torch.randn(*s, generator=g)).to(dtype) for n, s in shapes.items()}


def by_hand(z, A_log, dt_bias, lower_bound=None):
    """An entry at a time, in Python's floats."""
    g = torch.empty(z.shape, dtype=F64)
    for b, t, h, d in product(*map(range, z.shape)):
        x = z[b, t, h, d].item() + dt_bias[h * z.shape[-1] + d].item()
        rate = math.exp(A_log[h].item())
        if lower_bound is None:
            g[b, t, h, d] = -rate * (max(x, 0) + math.log1p(math.exp(-abs(x))))
        else:
            g[b, t, h, d] = lower_bound / (1 + math.exp(-rate * x))
    return g


@pytest.mark.parametrize("lower_bound", [None, -5.0, -5, -0.5, -20.0])
def test_both_forms_are_their_formulas(lower_bound, compare):
    """Entry h * K + d of dt_bias belongs to head h (C14)."""
    x = make()
    want = {"g": by_hand(**x, lower_bound=lower_bound)}
    compare("float64", {"g": kda_log_decay(**x, lower_bound=lower_bound)}, want)
    x = make(F32)
    want = {"g": by_hand(**x, lower_bound=lower_bound)}
    compare("float32", {"g": kda_log_decay(**x, lower_bound=lower_bound)}, want)


def test_a_tiny_softplus_is_not_lost():
    """C8: log(1 + e^-18) is 0 in float32 when written so; times e^18 it is a decay of 1."""
    z, A_log, dt_bias = torch.full((1, 1, 1, 1), -18.0), torch.tensor([18.0]), torch.zeros(1)
    assert torch.log(1 + z.exp()).item() == 0
    assert kda_log_decay(z, A_log, dt_bias).item() == pytest.approx(-1.0, rel=1e-6)
    assert kda_log_decay(z - 60, A_log, dt_bias).item() == pytest.approx(-math.exp(-60), rel=1e-5)


def test_the_bias_is_added_before_the_rate_multiplies():
    z, A_log, dt_bias = torch.full((1, 1, 1, 1), 2.0), torch.tensor([math.log(3)]), torch.ones(1)
    got = kda_log_decay(z, A_log, dt_bias, lower_bound=-4.0).item()
    assert got == pytest.approx(-4 / (1 + math.exp(-9)), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32, F64])
def test_bounds_and_limits(dtype):
    """Never positive, never NaN; the second form keeps above its bound, which is no clamp of the first."""
    z = torch.cat([torch.linspace(-1e4, 1e4, 201), torch.linspace(-9, 9, 199)])
    z = z.view(1, -1, 1, 1).to(dtype)
    for A_log, bias in product((-9.0, 0.0, 2.77, 16.0), (-3.0, 0.0, 3.0)):
        args = z, torch.tensor([A_log]), torch.tensor([bias])
        free, bounded = kda_log_decay(*args), kda_log_decay(*args, lower_bound=-5.0)
        assert (free <= 0).all() and ((bounded >= -5) & (bounded <= 0)).all()
    free, bounded = (
        kda_log_decay(z, torch.zeros(1), torch.zeros(1), lower_bound=b) for b in (None, -5.0)
    )
    assert free[:, 200].item() == -1e4 or dtype == torch.bfloat16 and free[:, 200] < -9e3
    assert bounded[:, 200].item() == -5 and bounded[:, 0].item() == free[:, 0].item() == 0
    assert (bounded - free.clamp(min=-5.0)).abs().max() > 0.5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, F32, F64])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_the_result_is_wide_whatever_z_is(dtype, lower_bound):
    """C9: float32 at least, from float32 parameters, also under autocast; a rule accepts it."""
    x = make(F32)
    x["z"] = x["z"].to(dtype)
    g = kda_log_decay(**x, lower_bound=lower_bound)
    assert g.dtype == (F64 if dtype == F64 else F32) and g.shape == (B, T, H, K)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kda_log_decay(**x, lower_bound=lower_bound), g)
    torch.testing.assert_close(g.double(), by_hand(**x, lower_bound=lower_bound), rtol=1e-5, atol=0)
    q = x["z"]
    o, _ = chunk_kda(q, q, q, g=g, beta=torch.ones_like(q[..., 0]))
    assert o.dtype == dtype


def test_no_token_and_unchanged_arguments():
    x = make()
    before = {n: y.clone() for n, y in x.items()}
    for lower_bound in (None, -5.0):
        kda_log_decay(**x, lower_bound=lower_bound)
        assert kda_log_decay(**x | {"z": x["z"][:, :0]}, lower_bound=lower_bound).shape == (
            B, 0, H, K,
        )  # fmt: skip
    assert all(torch.equal(x[n], y) for n, y in before.items())


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gradcheck(lower_bound):
    args = [y.requires_grad_() for y in make().values()]
    assert torch.autograd.gradcheck(lambda *x: kda_log_decay(*x, lower_bound=lower_bound), args)


@pytest.mark.parametrize(
    "name, change, shapes",
    [
        ("z", dict(z=torch.zeros(B, T, H * K)), [(B, T, H * K)]),
        ("z", dict(z=torch.zeros(B, T, H, K, dtype=torch.int64)), []),
        ("z", dict(z=0.5), []),
        ("A_log", dict(A_log=torch.zeros(K)), [(K,), (B, T, H, K)]),
        ("A_log", dict(A_log=torch.zeros(H, 1)), [(H, 1), (B, T, H, K)]),
        ("A_log", dict(A_log=torch.zeros(H, dtype=torch.int64)), []),
        ("A_log", dict(A_log=torch.zeros(H, device="meta")), []),
        ("A_log", dict(A_log=None), []),
        ("dt_bias", dict(dt_bias=torch.zeros(H, K)), [(H, K), (B, T, H, K)]),
        ("dt_bias", dict(dt_bias=torch.zeros(K)), [(K,), (B, T, H, K)]),
        ("dt_bias", dict(dt_bias=torch.zeros(H * K, device="meta")), []),
        ("lower_bound", dict(lower_bound=0.0), []),
        ("lower_bound", dict(lower_bound=5.0), []),
        ("lower_bound", dict(lower_bound=math.nan), []),
    ],
)
def test_bad_input_names_the_argument(name, change, shapes):
    with pytest.raises(ValueError, match=rf"^{name} ") as error:
        kda_log_decay(**make() | change)
    assert all(str(shape) in str(error.value) for shape in shapes)

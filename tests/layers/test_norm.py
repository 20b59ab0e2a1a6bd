import pytest
import torch

from gpt2_to_k3.layers import RMSNorm, l2norm

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def normal(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        dtype
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("amplitude", [1e-4, 1e-3, 1e-2, 1.0, 1e3])
def test_l2norm_adds_eps_to_the_sum(amplitude, dtype):
    """C42: added to the mean it is 128 times larger, and a key of size 1e-3 31 % shorter."""
    x = (amplitude * normal(5, 128)).to(dtype)
    wide = x.double()
    want = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(l2norm(x), want.to(dtype))
    on_mean = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() / 128**0.5
    assert amplitude > 1e-3 or (want.norm(dim=-1) > 1.2 * on_mean.norm(dim=-1)).all()


def test_l2norm_with_an_eps_of_the_callers():
    x = torch.tensor([3.0, 4.0])
    torch.testing.assert_close(l2norm(x, eps=11.0), x / 6)


def test_rmsnorm_adds_eps_to_the_mean():
    norm = RMSNorm(4, eps=3.0)
    norm.weight.data = torch.tensor([1.0, 2.0, -1.0, 0.0])
    x = torch.tensor([1.0, -1.0, 1.0, 1.0])  # mean of squares 1
    torch.testing.assert_close(norm(x), torch.tensor([0.5, -1.0, -0.5, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.1])
def test_rmsnorm_equals_torchs(dtype, eps):
    norm, peer = RMSNorm(11, eps).to(dtype), torch.nn.RMSNorm(11, eps, dtype=dtype)
    norm.weight.data = peer.weight.data = normal(11, dtype=dtype)
    for x in (normal(2, 7, 3, 11, dtype=dtype), 1e-3 * normal(11, dtype=dtype)):
        torch.testing.assert_close(norm(x), peer(x))
    assert (RMSNorm(11, eps).weight == 1).all()


@pytest.mark.parametrize("norm", [l2norm, RMSNorm(5, 1e-5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_vector_gives_zero_with_finite_gradients(norm, dtype):
    x = torch.cat([torch.zeros(1, 5), torch.ones(1, 5)]).to(dtype).requires_grad_()
    y = norm(x)
    (grad,) = torch.autograd.grad(y.square().sum() + y.sum(), x)
    assert torch.equal(y[0], torch.zeros(5, dtype=dtype)) and y[1].abs().min() > 0
    assert grad.isfinite().all() and grad.abs().max() < 1.1e3


@pytest.mark.parametrize("norm", [l2norm, RMSNorm(128, 1e-5)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_inputs_are_normed_in_float32_and_rounded_once(norm, dtype):
    """Squares of 300 overflow float16, and a sum of 128 equal squares stalls in bfloat16."""
    large, equal = (300 * normal(7, 128)).to(dtype), torch.full((1, 128), 3.0, dtype=dtype)
    for x in (large, equal):
        y = norm(x)
        assert y.dtype == dtype and torch.equal(y, norm(x.float()).to(dtype))


def test_a_16_bit_norm_rounds_once():
    norm = RMSNorm(64, 1e-5)
    norm.weight.data = normal(64, dtype=torch.bfloat16).float()
    x = normal(9, 64, dtype=torch.bfloat16)
    want = norm(x.float()).bfloat16()
    norm.bfloat16()
    assert norm.weight.dtype == torch.bfloat16
    assert torch.equal(norm(x), want)


@pytest.mark.parametrize("norm", [l2norm, RMSNorm(3, 1e-5).double()])
def test_gradients(norm):
    x = normal(2, 3).requires_grad_()
    assert torch.autograd.gradcheck(norm, x)
    small = (1e-3 * normal(2, 3)).requires_grad_()
    assert torch.autograd.gradcheck(norm, small, eps=1e-8, atol=1e-3)


@pytest.mark.parametrize("norm", [l2norm, RMSNorm(5, 1e-5).double()])
def test_the_input_is_unchanged(norm):
    x = normal(2, 5)
    norm(x)
    assert torch.equal(x, normal(2, 5))
    assert norm(x[:0]).shape == (0, 5)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"^x has shape \(2, 4\), expected \[\.\.\., 5\]"):
        RMSNorm(5, 1e-5)(torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"^x has shape \(2, 1\)"):  # would broadcast
        RMSNorm(5, 1e-5)(torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"^x has shape \(\)"):
        RMSNorm(5, 1e-5)(torch.tensor(1.0))
    for dim in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="^dim must be an integer >= 1"):
            RMSNorm(dim, 1e-5)
    for eps in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"^eps must be finite and >= 0, got {eps}"):
            RMSNorm(5, eps)

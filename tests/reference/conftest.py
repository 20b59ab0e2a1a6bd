import pytest
import torch
from hybrid_tests import B, T


@pytest.fixture(scope="module")
def mlx():
    try:
        import mlx.core as mlx
    except ImportError:
        pytest.fail('mlx is missing: pip install "mlx[cpu]" mlx-lm', pytrace=False)
    mlx.set_default_device(mlx.cpu)
    mlx.disable_compile()  # that would call a C++ compiler
    return mlx


@pytest.fixture(scope="module")
def kimi_k3(mlx):
    """mlx-lm's model of K3."""
    try:
        from mlx_lm.models import kimi_k3
    except ImportError:
        pytest.fail("mlx-lm is missing: pip install mlx-lm", pytrace=False)
    return kimi_k3


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(97, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def close(request):
    """close(got, want): logits of two implementations, in float32."""
    record = {"tensors": 0, "logits": 0.0}
    request.node.user_properties.append(("compared", record))

    def check(got, want):
        record["tensors"] += 1
        record["logits"] = max(record["logits"], (got - want).abs().max().item())
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)

    return check

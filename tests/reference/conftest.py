import pytest


@pytest.fixture(scope="module")
def mlx():
    try:
        import mlx.core as mlx
    except ImportError:
        pytest.fail('mlx is missing: pip install "mlx[cpu]" mlx-lm', pytrace=False)
    mlx.set_default_device(mlx.cpu)
    mlx.disable_compile()  # that would call a C++ compiler
    return mlx

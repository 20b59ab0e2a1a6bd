import pytest
import torch
from model_cases import B, T, make


@pytest.fixture
def model(config):
    """The model of the small configuration that a file names."""
    return make(config)


@pytest.fixture
def tokens():
    return torch.randint(97, (B, T), generator=torch.Generator().manual_seed(1))

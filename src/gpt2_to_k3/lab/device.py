"""The one place that chooses a device."""

import torch


def pick_device(prefer=None):
    """``torch.device`` to work on: ``prefer`` if given, else CUDA, else Apple's MPS, else the CPU.

    Chapters whose numbers matter stay on the CPU; only cells that measure speed ask for more.

    Raises:
        ValueError: ``prefer`` names a device that this machine does not have.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    name = prefer or available[0]
    if torch.device(name).type not in available:
        raise ValueError(f"prefer: expected one of {available} on this machine, got {prefer!r}")
    return torch.device(name)

"""The one place that chooses a device."""

import torch


def pick_device(device=None):
    """``torch.device`` to work on: ``device`` if given, else CUDA, else Apple's MPS, else the CPU.

    Chapters whose numbers matter stay on the CPU; only cells that measure speed ask for more.

    Raises:
        ValueError: ``device`` names one that this machine does not have.
    """
    available = ["cpu"]
    if torch.backends.mps.is_available():
        available.insert(0, "mps")
    if torch.cuda.is_available():
        available.insert(0, "cuda")
    name = str(device or available[0])
    if name.partition(":")[0] not in available:
        raise ValueError(f"device: expected one of {available} on this machine, got {device!r}")
    return torch.device(name)

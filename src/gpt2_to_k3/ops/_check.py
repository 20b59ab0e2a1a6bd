"""Checks that every rule makes of its arguments."""

from contextlib import nullcontext

import torch

_COMPUTE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def compute_dtype(**tensors):
    """Return float64 for float64 tensors, else float32; ValueError if dtypes or devices differ."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dtype not in _COMPUTE_DTYPE:
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")
    (first, a), *rest = tensors.items()
    for name, x in rest:
        if x.dtype != a.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}, but {first} has {a.dtype}")
        if x.device != a.device:
            raise ValueError(f"{name} is on {x.device}, but {first} is on {a.device}")
    return _COMPUTE_DTYPE[a.dtype]


def check_shape(name, x, axes, sizes, other=None, other_x=None):
    """Raise ValueError unless x has these sizes (None: any) on these axes, as `other` asks."""
    if x.ndim == len(sizes) and all(n in (None, m) for n, m in zip(sizes, x.shape, strict=True)):
        return
    want = ", ".join("any" if n is None else str(n) for n in sizes)
    because = "" if other is None else f", as {other} has shape {tuple(other_x.shape)}"
    raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [{axes}] = [{want}]{because}")


def full_precision(device):
    """Context in which autocast does not narrow a rule's float32 products to half precision."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()

"""Checks that every rule makes of its arguments, and the form in which it computes."""

from contextlib import nullcontext

import torch

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def compute_dtype(**tensors):
    """Return float64 for float64 tensors, else float32; ValueError if dtypes or devices differ."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dtype not in _FLOATS:
            raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")
    (first, a), *rest = tensors.items()
    for name, x in rest:
        if x.dtype != a.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}, but {first} has {a.dtype}")
        if x.device != a.device:
            raise ValueError(f"{name} is on {x.device}, but {first} is on {a.device}")
    return torch.promote_types(a.dtype, torch.float32)


def check_shape(name, x, axes, sizes, other=None, other_x=None):
    """Raise ValueError unless x has these sizes (None: any) on these axes, as `other` asks."""
    if x.ndim == len(sizes) and all(n in (None, m) for n, m in zip(sizes, x.shape, strict=True)):
        return
    want = ", ".join("any" if n is None else str(n) for n in sizes)
    because = "" if other is None else f", as {other} has shape {tuple(other_x.shape)}"
    raise ValueError(f"{name} has shape {tuple(x.shape)}, expected [{axes}] = [{want}]{because}")


def full_precision(device):
    """Context in which autocast does not narrow a rule's float32 products to half precision."""
    if device.type == "meta":  # nothing is computed there, and autocast does not know it
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def check_values(name, x, holds, expected):
    """Raise ValueError unless `holds(x)` everywhere; NaN holds nothing.

    Looking at values waits for a GPU, and neither a compiler nor a graph capture can do it:
    there the check is left out.
    """
    if torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    if not holds(x).all():
        bad = x[~holds(x)].flatten()[0].item()
        raise ValueError(f"{name} must be {expected}, got {bad}")


def prepare(q, k, v, *, g=None, g_axes="B, T, H", beta=None, scale=None, state=None, chunk_size=1):
    """Check a rule's arguments; return q * scale, k, v, g, beta and the state, all to compute with.

    g and beta may be wider than q, k, v: a decay of 0.999 is 1 in bfloat16, and forgets nothing.
    """
    dtype = compute_dtype(q=q, k=k, v=v)
    check_shape("q", q, "B, T, H, K", (None,) * 4)
    B, T, H, K = q.shape
    check_shape("k", k, "B, T, H, K", (B, T, H, K), "q", q)
    check_shape("v", v, "B, T, H, V", (B, T, H, None), "k", k)
    if K == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}, expected at least one key channel K")
    if type(chunk_size) is not int or chunk_size < 1:
        raise ValueError(f"chunk_size must be an integer >= 1, got {chunk_size!r}")
    gates = {"g": (g, g_axes), "beta": (beta, "B, T, H")}
    for name, (x, axes) in gates.items():
        if x is not None:
            check_float(name, x, q)
            check_shape(name, x, axes, (B, T, H, K)[: axes.count(",") + 1], "q", q)
    if g is not None:
        check_values("g", g, lambda x: x <= 0, "a log-decay <= 0")
    if beta is not None:
        check_values("beta", beta, lambda x: (x >= 0) & (x <= 2), "in [0, 2]")
    state = prepare_state(state, (B, H, K, v.shape[-1]), q, dtype)
    scale = K**-0.5 if scale is None else scale
    g, beta = (None if x is None else x.to(dtype) for x in (g, beta))
    return q.to(dtype) * scale, k.to(dtype), v.to(dtype), g, beta, state


def check_float(name, x, other, other_name="q"):
    if not isinstance(x, torch.Tensor) or x.dtype not in _FLOATS:
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a floating point tensor, got {kind}")
    if x.device != other.device:
        raise ValueError(f"{name} is on {x.device}, but {other_name} is on {other.device}")


def prepare_state(state, shape, q, dtype, name="initial_state", axes="B, H, K, V"):
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=q.device)
    check_float(name, state, q)
    check_shape(name, state, axes, shape, "q", q)
    return state.to(dtype)

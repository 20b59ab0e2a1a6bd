"""Other people's implementations of the same rules."""

import importlib.metadata
import importlib.util

RULES = ("linear_attn", "delta_rule", "gated_delta_rule", "kda")


def fla_naive(rule):
    """flash-linear-attention's plain PyTorch reference of `rule` (one of RULES), as a module.

    Loaded by path: `import fla.ops` would import the kernels, and so need triton.
    """
    files = importlib.metadata.files("fla-core")
    path = next(f for f in files if f.as_posix() == f"fla/ops/{rule}/naive.py").locate()
    spec = importlib.util.spec_from_file_location(f"fla_{rule}_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

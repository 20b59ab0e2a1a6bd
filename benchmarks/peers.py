"""Other people's implementations of the same rules, for the benchmarks and the tests."""

import importlib.metadata
import importlib.util


def fla_file(name):
    """Path of `fla/ops/<name>` in the installed fla-core (pip install --no-deps fla-core einops)."""
    for file in importlib.metadata.files("fla-core"):
        if file.as_posix() == f"fla/ops/{name}":
            return file.locate()
    raise FileNotFoundError(f"fla-core {importlib.metadata.version('fla-core')} has no {name}")


def fla_naive(rule):
    """flash-linear-attention's plain PyTorch reference of `rule` ("kda", "delta_rule"...), as a module.

    Loaded by path: `import fla.ops` would import the kernels, and so need triton.
    """
    path = fla_file(f"{rule}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_{rule.replace('/', '_')}_naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

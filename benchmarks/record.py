"""Write a measurement with its provenance, in the form that gpt2_to_k3.lab.load_record reads."""

import contextlib
import importlib.metadata
import json
import platform
import sys
from datetime import date
from pathlib import Path

import torch


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = [] if not info.exists() else info.read_text(encoding="utf-8").splitlines()
    models = [x.partition(":")[2].strip() for x in models if x.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.get_num_threads()} thread(s)"


def versions():
    """Of Python, torch, and the peers that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "fla-core"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write(path, device, seed, result):
    """Save `result` to `path` with device, versions, date, command and seed."""
    record = {
        "device": device_name(device),
        "versions": versions(),
        "date": date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "seed": seed,
        "result": result,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")

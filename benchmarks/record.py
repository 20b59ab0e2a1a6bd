"""Write a measurement with its provenance, in the form that gpt2_to_k3.lab.load_record reads."""

import json
import platform
import sys
from datetime import date
from pathlib import Path

import torch


def device_name(device):
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )


def write(path, device, seed, result):
    """Save `result` to `path` with device, versions, date, command and seed."""
    record = {
        "device": device_name(device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "seed": seed,
        "result": result,
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")

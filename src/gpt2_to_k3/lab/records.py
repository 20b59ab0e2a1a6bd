"""Recorded measurements and published values that ship with the package."""

import json
from importlib import resources

PROVENANCE = ("device", "versions", "date", "command", "seed")


def load_record(name):
    """The measurement `data/<name>.json`: its `result`, and who measured it how.

    Raises:
        ValueError: no such record, or one that does not say device, versions, date, command and seed.
    """
    record = load_data(name)
    missing = [key for key in (*PROVENANCE, "result") if key not in record]
    if missing:
        raise ValueError(f"name: record {name!r} does not say its {', '.join(missing)}")
    return record


def load_data(name):
    """`data/<name>.json` as Python objects."""
    folder = resources.files("gpt2_to_k3") / "data"
    file = folder / f"{name}.json"
    if not file.is_file():
        known = sorted(
            f.name.removesuffix(".json") for f in folder.iterdir() if f.name.endswith(".json")
        )
        raise ValueError(f"name: expected one of {known}, got {name!r}")
    return json.loads(file.read_text(encoding="utf-8"))

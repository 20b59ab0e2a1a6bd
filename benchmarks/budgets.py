"""What the course costs its readers and builders: seconds and memory of a chapter, weight of a page, minutes of a build.

Chapters run one at a time, each in a fresh kernel. --fresh clones the repository into an empty
folder and times `make book`, then `make test` (both from nothing), then `make test` again.

usage: python benchmarks/budgets.py [--fresh] [--save FILE]
"""

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import nbformat
import torch
from nbclient import NotebookClient
from record import write

ROOT = Path(__file__).resolve().parents[1]
PEAK = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def chapter(path):
    """Seconds to run a notebook, and the largest resident memory of its kernel, in bytes."""
    nb = nbformat.read(path, 4)
    nb.cells.append(nbformat.v4.new_code_cell(PEAK))
    start = time.perf_counter()
    client = NotebookClient(nb, timeout=300, kernel_name="python3")
    client.execute(cwd=str(path.parent))
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": 1024 * int(nb.cells[-1].outputs[0].text)}


def minutes(*command, cwd):
    start = time.perf_counter()
    subprocess.run(command, cwd=cwd, check=True)
    return (time.perf_counter() - start) / 60


def builds():
    """Minutes of each step in a clone with nothing installed."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), folder], check=True)
        return {
            "make book, from nothing": minutes("make", "book", cwd=folder),
            "make test after it": minutes("make", "test", cwd=folder),
            "make book again": minutes("make", "book", cwd=folder),
            "make test again": minutes("make", "test", cwd=folder),
        }


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fresh", action="store_true", help="also time the builds")
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    result = {"chapters": {}, "pages": {}}
    if options.save and options.save.is_file():
        result = json.loads(options.save.read_text(encoding="utf-8"))["result"]
    for path in sorted((ROOT / "book").glob("*.ipynb")):
        result["chapters"][path.stem] = chapter(path)
        print(path.stem, result["chapters"][path.stem], flush=True)
    pages = sorted((ROOT / "_build" / "html" / "book").glob("*.html"))
    # With its figures, which stand in it; style, scripts and fonts are the same for all pages.
    result["pages"] = {path.stem: path.stat().st_size for path in pages}
    if options.fresh:
        result["minutes"] = builds()
        print(result["minutes"])
    if options.save:
        write(options.save, torch.device("cpu"), None, result)


if __name__ == "__main__":
    main()

"""Bring notebooks into the form that is committed: no outputs but the checked ones, and the one setup cell first.

usage: notebooks.py [--run] NOTEBOOK...
--run executes each notebook in a fresh kernel first, which refreshes the stored outputs.
"""

import sys
from pathlib import Path

import nbformat
import yaml
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
CHECKED = "nbval-check-output"  # nbval compares the outputs of cells with this tag
KEPT_METADATA = {"tags", "nbgrader"}


def version():
    source = (ROOT / "src" / "gpt2_to_k3" / "__init__.py").read_text(encoding="utf-8")
    return source.split('__version__ = "')[1].split('"')[0]


def setup_cell():
    """First cell of every notebook: a no-op where the package is importable, else the release without its needs."""
    repository = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"][
        "url"
    ]
    return (
        "# Setup, the same in every chapter: installs the course's library where it\n"
        "# is missing (Colab), and nothing else: loaded packages stay as they are.\n"
        "import importlib.util\n"
        "\n"
        'if importlib.util.find_spec("gpt2_to_k3") is None:\n'
        f'    repository = "{repository}"\n'
        f"    %pip install --quiet --no-deps {{repository}}/archive/refs/tags/v{version()}.zip"
    )


def normal(nb):
    """``nb`` as it is committed."""
    first = next((cell for cell in nb.cells if cell.cell_type == "code"), None)
    if first is None or not first.source.startswith("# Setup"):
        first = nbformat.v4.new_code_cell(id="setup")
        nb.cells.insert(1, first)
    first.source, first.metadata = setup_cell(), {"tags": ["hide-input"]}
    for cell in nb.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k in KEPT_METADATA and v}
        if cell.cell_type != "code":
            cell.pop("attachments", None)
        elif CHECKED in cell.metadata.get("tags", []):
            # nbval skips the comparison where the count is null
            cell.execution_count = 1
            for output in cell.outputs:
                output.pop("execution_count", None)
                if output.output_type == "execute_result":
                    output["execution_count"] = 1
        else:
            cell.outputs, cell.execution_count = [], None
    nb.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nb.nbformat, nb.nbformat_minor = 4, 5
    return nb


def dumps(nb):
    return nbformat.writes(nbformat.from_dict(nb)) + "\n"


def main(arguments):
    run = "--run" in arguments
    for path in [Path(a) for a in arguments if a != "--run"]:
        old = path.read_text(encoding="utf-8")
        nb = nbformat.reads(old, 4)
        if run:
            NotebookClient(
                nb,
                timeout=120,
                kernel_name="python3",
                resources={"metadata": {"path": path.parent}},
            ).execute()
        new = dumps(normal(nb))
        if new != old:
            path.write_text(new, encoding="utf-8")
            print(f"rewrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])

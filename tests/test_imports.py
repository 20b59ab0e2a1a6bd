"""Which part may import which: the floors of the package, and what each asks to be installed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2_to_k3

PACKAGE = "gpt2_to_k3"
ROOT = Path(gpt2_to_k3.__file__).parent
# Each floor may import those to its left.
FLOORS = ["ops", "layers", "models", "lab", "notebook"]
OPTIONAL = ["matplotlib", "ipywidgets", "IPython", "safetensors", "huggingface_hub", "transformers"]


def imported(path, root=ROOT, top_level=False):
    """Yield the absolute name of everything a file imports (only at the top, if so asked)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    package = (PACKAGE, *path.relative_to(root).parent.parts)
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_arrows(root):
    """List the files that import a floor which stands after their own."""
    wrong = []
    for path in sorted(root.rglob("*.py")):
        floor = path.relative_to(root).parts[0]
        # __init__.py stands for the whole package, which is the floors that need torch alone.
        reach = FLOORS.index("models") if floor == "__init__.py" else FLOORS.index(floor)
        for name in imported(path, root):
            parts = name.split(".")
            if parts[0] != PACKAGE:
                continue
            # A bare "import gpt2_to_k3" brings everything that its __init__ imports.
            target = parts[1] if len(parts) > 1 else "models"
            if target in FLOORS and FLOORS.index(target) > reach:
                wrong.append(f"{path.relative_to(root)} imports {name}")
    return wrong


def third_party(path, **options):
    names = {name.split(".")[0] for name in imported(path, **options)}
    return names - set(sys.stdlib_module_names) - {PACKAGE}


def test_no_floor_imports_one_that_stands_on_it():
    assert wrong_arrows(ROOT) == []


@pytest.mark.parametrize(
    "path, line, is_wrong",
    [
        ("ops/a.py", "from ..layers import KVCache", True),
        ("ops/a.py", "from ..layers.cache import KVCache", True),
        ("ops/a.py", "from .. import models", True),
        ("ops/a.py", "import gpt2_to_k3", True),
        ("ops/deep/a.py", "from ...lab import costs", True),
        ("ops/a.py", "def f():\n    from gpt2_to_k3 import lab", True),
        ("models/a.py", "import gpt2_to_k3.lab.costs as costs", True),
        ("lab/a.py", "from gpt2_to_k3.notebook import figures", True),
        ("__init__.py", "from . import notebook", True),
        ("ops/a.py", "from ._check import layers", False),
        ("layers/a.py", "from ..ops import softmax_attention", False),
        ("notebook/a.py", "import gpt2_to_k3\nfrom ..lab import costs", False),
        ("__init__.py", "from . import layers, models, ops", False),
    ],
)
def test_the_check_itself_sees_a_wrong_arrow(tmp_path, path, line, is_wrong):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(line)
    assert bool(wrong_arrows(tmp_path)) == is_wrong


def test_every_file_belongs_to_a_floor_and_data_has_no_code():
    places = {path.relative_to(ROOT).parts[0] for path in ROOT.rglob("*.py")}
    assert places <= {"__init__.py", *FLOORS}


def test_ops_import_torch_alone():
    for path in ROOT.glob("ops/**/*.py"):
        assert third_party(path) <= {"torch"}, path


def test_the_package_asks_for_torch_and_numpy_alone_at_import():
    for floor in ["ops", "layers", "models"]:
        for path in ROOT.glob(f"{floor}/**/*.py"):
            assert third_party(path, top_level=True) <= {"torch", "numpy"}, path


def test_importing_the_package_loads_nothing_optional():
    code = f"import sys, {PACKAGE}; print(*sorted(m.split('.')[0] for m in sys.modules))"
    path = [str(ROOT.parent), *sys.path]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path}; {code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(result.stdout.split())
    assert PACKAGE in loaded and "torch" in loaded
    assert loaded.isdisjoint(OPTIONAL)


def test_every_public_name_is_exported_and_has_a_docstring():
    for name in gpt2_to_k3.__all__:
        floor = getattr(gpt2_to_k3, name)
        for public in floor.__all__:
            assert getattr(floor, public).__doc__, f"{name}.{public}"


def test_one_place_asks_which_devices_there_are():
    """LLMs-from-scratch #1073, #820: every file with its own selector, each a little different."""
    root = Path(__file__).parents[1]
    files = [*root.glob("src/**/*.py"), *root.glob("benchmarks/*.py"), *root.glob("book/*.ipynb")]
    asking = {f.name for f in files if "is_available(" in f.read_text(encoding="utf-8")}
    assert asking == {"device.py"}

"""The build: what invalidates executed pages, and what a failing notebook says."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]


def make(folder, *arguments):
    return subprocess.run(["make", "-C", str(folder), *arguments], capture_output=True, text=True)


@pytest.fixture
def copy(tmp_path):
    """A checkout with nothing built."""
    for name in ("src", "book", "tools", "Makefile", "requirements.txt", "pyproject.toml"):
        source = ROOT / name
        shutil.copytree(source, tmp_path / name) if source.is_dir() else shutil.copy(
            source, tmp_path
        )
    return tmp_path


@pytest.mark.parametrize(
    "file",
    ["src/gpt2_to_k3/ops/softmax.py", "src/gpt2_to_k3/data/kimi_k3.json", "requirements.txt"],
)
def test_library_data_and_lock_invalidate_executed_pages(copy, file):
    """jupyter-book #1633: the cache looks at cells alone and shows stale outputs."""

    def stamp():
        plan = make(copy, "-n", "book").stdout
        return plan.split("touch _build/")[1].split()[0]

    first = stamp()
    assert stamp() == first
    with open(copy / file, "a", encoding="utf-8") as f:
        f.write("\n")
    assert stamp() != first, f"a change in {file} keeps the old pages"


def test_an_old_build_is_removed_when_the_library_changes(copy):
    target = make(copy, "-n", "book").stdout.split("touch _build/")[1].split()[0]
    target = f"_build/{target}"
    (copy / "_build" / ".jupyter_cache").mkdir(parents=True)
    assert make(copy, target).returncode == 0
    assert (copy / target).is_file() and not (copy / "_build" / ".jupyter_cache").exists()
    (copy / "_build" / ".jupyter_cache").mkdir()
    make(copy, target)
    assert (copy / "_build" / ".jupyter_cache").exists(), "an unchanged library keeps the cache"


def test_a_failing_notebook_is_named_in_one_line(copy):
    for path in (copy / "book").glob("*.ipynb"):
        path.unlink()
    cells = [nbformat.v4.new_code_cell("1 + 1"), nbformat.v4.new_code_cell("1 / 0")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), copy / "book" / "ch99_broken.ipynb")
    result = subprocess.run(
        [sys.executable, "tools/execute.py"], cwd=copy, capture_output=True, text=True
    )
    assert result.returncode == 1
    line = [x for x in result.stderr.splitlines() if x.startswith("book/ch99_broken.ipynb:")]
    assert len(line) == 1 and "ZeroDivisionError" in line[0] and "make book" in line[0]


def test_serving_without_a_site_says_what_to_do(copy):
    result = make(copy, "serve")
    assert result.returncode != 0 and "make book" in result.stdout


def test_an_old_python_is_refused_by_name(copy, tmp_path):
    old = tmp_path / "python3.9"
    old.write_text(f"""#!/bin/sh
exec {sys.executable} -c "import sys; sys.version_info = (3, 9); sys.version = '3.9.0 x'; exec(sys.argv[1])" "$2"
""")
    old.chmod(0o755)
    result = make(copy, ".venv/installed", f"PYTHON={old}")
    assert (
        result.returncode != 0 and "Python 3.11 or newer is needed, this is 3.9.0" in result.stderr
    )


def test_the_pretrained_cell_of_chapter_1_runs_where_the_hub_is_there(tmp_path):
    """The branch that CI cannot reach, against a hub cache laid out as the client keeps it."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    folder = tmp_path / "hub" / "models--openai-community--gpt2"
    snapshot = folder / "snapshots" / "0123"
    GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2)).save_pretrained(snapshot)
    vocabulary = {"A language model remembers": 0} | {f"t{i}": i for i in range(1, 50257)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t1")).save(str(snapshot / "tokenizer.json"))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0123")
    nb = nbformat.read(ROOT / "book" / "ch01_gpt2.ipynb", 4)
    cell = next(c for c in nb.cells if "pretrained" in c.metadata.get("tags", []))
    code = f"import torch\nfrom gpt2_to_k3.models import GPT2\n{cell.source}"
    env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("A language model remembers t"), result.stdout


def test_every_public_name_is_on_the_api_page(site):
    page = (site / "book" / "api.html").read_text(encoding="utf-8")
    for floor in ("ops", "layers", "models", "lab", "notebook"):
        module = importlib.import_module(f"gpt2_to_k3.{floor}")
        for name in module.__all__:
            assert f'id="gpt2_to_k3.{floor}.{name}"' in page, f"api.md does not show {floor}.{name}"
            assert getattr(module, name).__doc__, f"{floor}.{name} has no docstring"

"""No solution, rubric or hidden test in what a student can get: the site, its downloads, the wheel, the editions."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest
from classroom import ROOT

SOURCES = sorted((ROOT / "exercises" / "source").glob("*/*.ipynb"))
MARKERS = ("BEGIN SOLUTION", "BEGIN HIDDEN TESTS", "**Rubric.**")
REGION = re.compile(r"### BEGIN (?:SOLUTION|HIDDEN TESTS)\n(.*?)### END", flags=re.S)
TEXT = {".html", ".js", ".ipynb", ".md", ".txt", ".json", ".py", ".css", ".xml", ".yml"}


def plain(text, page=False):
    """Letters, digits and signs alone: as a page, a JSON string and a reformatted line all have them."""
    if page:
        text = re.sub(r"<[^>]+>", "", text)
    for escaped, sign in (
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", '"'),
        ("&#39;", "'"),
        ("&amp;", "&"),
        ("\\n", ""),
    ):
        text = text.replace(escaped, sign)
    return re.sub(r"[\s\\]", "", text)


def parts(cell):
    """What of a cell students see, and what they do not."""
    if cell.cell_type == "markdown" and cell.metadata.get("nbgrader", {}).get("solution"):
        return [], [cell.source]
    return [REGION.sub("", cell.source)], REGION.findall(cell.source)


@pytest.fixture(scope="module")
def tokens():
    """Lines of solutions, model answers and hidden tests that stand nowhere in what is public by intent."""
    files = [
        p for folder in ("src", "book") for p in (ROOT / folder).rglob("*") if p.suffix in TEXT
    ]
    public = "".join(plain(p.read_text(encoding="utf-8")) for p in files)
    notebooks = {path.stem: nbformat.read(path, 4) for path in SOURCES}
    public += "".join(
        plain(part) for nb in notebooks.values() for c in nb.cells for part in parts(c)[0]
    )
    found = {}
    for name, nb in notebooks.items():
        for cell in nb.cells:
            if own := parts(cell)[1]:
                lines = [plain(x) for part in own for x in part.splitlines()]
                distinct = [x for x in lines if len(x) >= 30 and x not in public]
                found[f"{name} {cell.metadata.nbgrader.grade_id}"] = distinct
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def site():
    pages = ROOT / "_build" / "html"
    assert (pages / "index.html").is_file(), "no site: run make book first"
    return {
        p.relative_to(pages).as_posix(): p
        for p in pages.rglob("*")
        if p.suffix in TEXT and "mathjax" not in p.parts
    }


def texts(kind, wheel, editions):
    """(name, text) of every file that a student can get in this way."""
    if kind == "site":
        for name, path in site().items():
            yield name, path.read_text(encoding="utf-8", errors="replace")
        return
    with zipfile.ZipFile(wheel if kind == "wheel" else editions / "problem-sets.zip") as zipped:
        for name in zipped.namelist():
            yield name, zipped.read(name).decode("utf-8", errors="replace")


def test_tokens_are_many(tokens):
    few = {name for name, lines in tokens.items() if not lines}
    assert len(tokens) >= 60 and len(few) < len(tokens) / 4, few


@pytest.mark.parametrize("kind", ["site", "wheel", "editions"])
def test_nothing_leaks(kind, tokens, wheel, editions):
    """nbgrader #476, #917, #1363; otter-grader #495; jupyter-book #835."""
    lines = {line for found in tokens.values() for line in found}
    leaks, files = [], 0
    for name, text in texts(kind, wheel, editions):
        files += 1
        if "teaching" not in name:  # which explains the markers
            leaks += [f"{name}: {marker}" for marker in MARKERS if marker in text]
        text = plain(text, page=name.endswith(".html"))
        leaks += [f"{name}: {line}" for line in lines if line in text]
    assert files and not leaks, "\n".join(leaks[:20])


def test_the_scan_finds_what_is_planted(tokens):
    line = max((x for found in tokens.values() for x in found), key=len)
    page = "<span>" + line[:10] + "</span> " + line[10:].replace("<", "&lt;").replace(">", "&gt;")
    assert line in plain(page, page=True)
    assert not any("exercises" in Path(name).parts for name in site())

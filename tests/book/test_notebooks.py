"""Rules for the chapters' files. Each failure is one line: the file, the cell, and what to do."""

import importlib.util
import re
from pathlib import Path
from statistics import median, quantiles

import nbformat
import pytest
import yaml
from jupyter_cache import get_cache

ROOT = Path(__file__).parents[2]
SECTIONS = [
    "Where we are", "The pain, measured", "The idea", "The code", "Play", "The check", "The price",
    "What is still wrong", "Exercises", "Sources and claims",
]  # fmt: skip
OTHER_SECTIONS = {
    "failures": ["Where we are", "Exercises", "Sources and claims"]
}  # and numbered ones

spec = importlib.util.spec_from_file_location("notebooks", ROOT / "tools" / "notebooks.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.fixture
def nb(notebook):
    return nbformat.read(notebook, 4)


@pytest.fixture
def executed(nb, site):
    """The notebook with the outputs that the site shows."""
    return get_cache(site.parent / ".jupyter_cache").merge_match_into_notebook(nb)[1]


def prose(nb):
    return "\n\n".join(c.source for c in nb.cells if c.cell_type == "markdown")


def without_code(text):
    return re.sub(r"`[^`\n]+`", "", re.sub(r"```.*?```", "", text, flags=re.S))


def refuse(found, notebook, what, remedy):
    if found:
        pytest.fail(f"{notebook.name}: {what} {found}: {remedy}", pytrace=False)


def test_setup_cell_is_the_one_of_this_release(notebook, nb):
    """d2l-en #1639, QuantEcon lecture-source-py #536: a chapter with an old or missing preamble."""
    first = next(c for c in nb.cells if c.cell_type == "code").source
    wrong = first != tool.setup_cell()
    refuse(wrong and first.splitlines()[-1], notebook, "wrong setup cell", "run 'make notebooks'")


def test_committed_form(notebook, nb):
    """colabtools #5288 (metadata.widgets), pyhf-tutorial #13 (progress bars in outputs)."""
    nbformat.validate(nb)
    same = tool.dumps(tool.normal(nb)) == notebook.read_text(encoding="utf-8")
    refuse(not same and "it", notebook, "outputs or metadata to strip in", "run 'make notebooks'")


def test_the_text_that_chapter_14_trains_on_is_that_of_the_chapters():
    spec = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
    prose = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prose)
    assert prose.FILE.read_text(encoding="utf-8") == prose.prose(), "run 'make notebooks'"


def test_checked_outputs_can_be_compared(notebook, nb):
    """nbval skips the comparison without a count; nbval #38: times and addresses never compare."""
    cells = [c for c in nb.cells if tool.CHECKED in c.metadata.get("tags", [])]
    missing = [c.id for c in cells if not c.outputs or c.execution_count is None]
    refuse(missing, notebook, "checked cells without stored output", "run tools/notebooks.py --run")
    texts = {c.id: str(c.outputs) for c in cells}
    unstable = [
        i
        for i, t in texts.items()
        if re.search(r"0x[0-9a-f]{6}|\d (ms|s|seconds)\b|20\d\d-\d\d-\d\d", t)
    ]
    refuse(
        unstable,
        notebook,
        "times, dates or addresses in checked cells",
        "drop the tag, or print something exact",
    )


def test_outputs_are_clean(notebook, executed):
    """nbval #204 (stray reprs), MDAnalysis UserGuide #357 (warnings), jupyter-book #2064 (maths in outputs)."""
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            text = output.get("text", "") + data.get("text/plain", "")
            where = f"cell {cell.id}"
            assert output.get("name") != "stderr", (
                f"{notebook.name}: {where} writes to stderr: {text[:80]}"
            )
            refuse(
                re.findall(r"<[\w.]+ (?:object )?at 0x|^Text\(|<Axes|<Figure", text),
                notebook,
                where,
                "end with ';'",
            )
            assert text.count("\n") <= 40, f"{notebook.name}: {where} prints more than 40 lines"
            assert "image/png" not in data or "text/html" in data, (
                f"{notebook.name}: {where}: use nb.Still(fig, alt)"
            )
            assert "$" not in data.get("text/markdown", "") + data.get("text/latex", ""), (
                f"{notebook.name}: {where}"
            )


def test_every_cell_ran(notebook, executed):
    """jupyter-book #945: a page without outputs after a silent time-out."""
    checks = [
        c for c in executed.cells if "check" in c.metadata.get("tags", [])
    ]  # they come last and always print
    refuse([c.id for c in checks if not c.outputs], notebook, "cells that did not run", "make book")


def test_reads_the_same_in_colab(notebook, nb):
    """jupyter-book #1787: directives shown raw in Colab; fastbook #386: links that lead nowhere there."""
    text = without_code(prose(nb).replace("```{", ":::"))
    refuse(re.findall(r":::|\{[a-z:]+\}`", text), notebook, "MyST syntax", "use plain Markdown")
    links = re.findall(r"\]\(([^)]*)\)", text)
    refuse(
        [x for x in links if not x.startswith("https://")],
        notebook,
        "relative links",
        "name the chapter in words",
    )


def test_maths_is_for_every_renderer(notebook, nb):
    """jupyter-book #12 (| in maths), #1181 ($$ inside a line)."""
    for cell in nb.cells:
        if cell.cell_type != "markdown":
            continue
        text = without_code(cell.source)
        blocks = re.findall(r"^\$\$.*?\$\$$", text, flags=re.S | re.M)
        rest = re.sub(r"^\$\$.*?\$\$$", "", text, flags=re.S | re.M)
        refuse(
            "$$" in rest and [cell.id],
            notebook,
            "$$ inside a line, cell",
            "give it a line of its own",
        )
        assert rest.count("$") % 2 == 0, f"{notebook.name}: cell {cell.id}: an unpaired $"
        refuse(
            [m for m in re.findall(r"\$([^$]+)\$", rest) if "|" in m],
            notebook,
            "| in maths",
            r"write \mid",
        )
        refuse([b for b in blocks if r"\tag" not in b], notebook, "no number on", r"add \tag{n.m}")


def test_equation_numbers(notebook, nb):
    text = prose(nb)
    tags = re.findall(r"\\tag\{([\d.]+)\}", text)
    chapter = re.match(r"ch(\d+)", notebook.name)
    assert tags == [f"{int(chapter[1])}.{i + 1}" for i in range(len(tags))], (
        f"{notebook.name}: equations are numbered {tags}"
    )
    assert not chapter or 1 <= len(tags) <= 3, (
        f"{notebook.name}: {len(tags)} numbered equations, one to three are asked"
    )
    known = {
        t
        for p in notebook.parent.glob("ch*.ipynb")
        for t in re.findall(r"\\+tag\{([\d.]+)\}", p.read_text("utf-8"))
    }
    refuse(
        {r for r in re.findall(r"\((\d+\.\d)\)", without_code(text)) if r not in known},
        notebook,
        "unknown equations",
        "mend",
    )


def test_equations_named_in_docstrings_exist():
    """A reader goes from the library's (eq. 6.2) to the chapter, and back."""
    chapters = "".join(p.read_text("utf-8") for p in (ROOT / "book").glob("ch*.ipynb"))
    source = "".join(p.read_text("utf-8") for p in (ROOT / "src").rglob("*.py"))
    named = [
        m
        for x in re.findall(r"[Ee]q(?:uation|\.) ((?:\d+\.\d(?:, )?)+)", source)
        for m in x.split(", ")
        if m
    ]
    assert len(set(named)) >= 12
    assert not [n for n in named if rf"\\tag{{{n}}}" not in chapters]


def test_shape_of_a_chapter(notebook, nb):
    heads = re.findall(r"^## (.*)$", prose(nb), flags=re.M)
    if notebook.stem in OTHER_SECTIONS:
        heads = [h for h in heads if not re.match(r"\d+\. ", h)]
    expected = OTHER_SECTIONS.get(notebook.stem, SECTIONS)
    assert heads == expected, f"{notebook.name}: sections are {heads}"
    assert re.search(r"\*\d+ minutes to read, \d+ minutes? to run", prose(nb)), (
        f"{notebook.name}: say the minutes"
    )
    assert len(re.findall(r"^[123]\. ", nb.cells[0].source, flags=re.M)) == 3, (
        f"{notebook.name}: three learning goals"
    )


def test_failures_break_and_are_mended():
    """Each section breaks something on purpose, asserts that it does, mends it, and says where it matters."""
    nb = nbformat.read(ROOT / "book" / "failures.ipynb", 4)
    text = "\n".join(c.source if c.cell_type == "markdown" else f"\0{c.source}" for c in nb.cells)
    sections = re.findall(r"^## (\d+)\. .*?$(.*?)(?=^## )", text, flags=re.M | re.S)
    assert [n for n, _ in sections] == [str(i + 1) for i in range(len(sections))]
    assert 8 <= len(sections) <= 12
    asserted = re.compile(r"^ *(assert |torch\.testing)", re.M)
    for n, body in sections:
        assert re.search(r"^Where it matters: chapters? \d", body, flags=re.M), f"section {n}"
        cells = [c for c in body.split("\0")[1:] if asserted.search(c)]
        assert len(cells) >= 2, f"section {n}: a cell that breaks and one that holds, each asserted"


def test_shape_of_cells(notebook, nb):
    code = [c for c in nb.cells if c.cell_type == "code"]
    lines = [len(c.source.splitlines()) for c in code]
    assert max(lines) <= 40, f"{notebook.name}: {lines}"
    # What a reader of the page sees without asking.
    hidden = ["hide-input" in c.metadata.get("tags", []) for c in code]
    lines = [n for n, h in zip(lines, hidden, strict=True) if not h]
    assert median(lines) <= 8 and quantiles(lines, n=10)[-1] <= 25, f"{notebook.name}: {lines}"
    runs = re.findall(r"c{3,}", "".join("c" if c.cell_type == "code" else "m" for c in nb.cells))
    refuse(runs, notebook, "more than two code cells in a row", "put a sentence between")


def test_code_fits_a_page(notebook, nb):
    code = [c for c in nb.cells[2:] if c.cell_type == "code"]
    wide = [c.id for c in code if max(map(len, c.source.splitlines())) > 88]
    refuse(wide, notebook, "code wider than 88 characters in cells", "break the line")


def test_code_runs_anywhere(notebook, nb):
    """colabtools #5155 (backends), ipywidgets #3766, fastbook #219 (files), one device picker (LLMs-from-scratch #1073)."""
    for cell in nb.cells[2:]:
        if cell.cell_type == "code":
            bad = r"%matplotlib|ipympl|plt\.show\(|\bopen\(|urllib|requests\.|is_available\(|tqdm|interact\(|!pip|%pip"
            refuse(re.findall(bad, cell.source), notebook, f"cell {cell.id}", "see CONTRIBUTING.md")


def test_sources_are_in_the_bibliography(notebook, nb):
    bib = (ROOT / "book" / "references.bib").read_text(encoding="utf-8")
    site = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["html"]["baseurl"]
    links = set(re.findall(r"\]\((https://[^)]*)\)", prose(nb)))
    refuse(
        sorted(x for x in links if x not in bib and not x.startswith(site)),
        notebook,
        "not in references.bib:",
        "add the source",
    )


NUMBER = re.compile(
    r"(?<![\w.\-^{])(\d{1,3}(?:,\d{3})+|\d+\.\d{2,}|\d+(?:\.\d+)?(?= ?(?:%|GB|TB|MB|kB|ms|million|billion|trillion|times\b|bytes)))"
)


def test_numbers_in_prose_come_from_somewhere(notebook, executed):
    """LLMs-from-scratch #312: text and notebook disagree. Long or united numbers must stand in code or output."""
    shown = "\n".join(c.source for c in executed.cells if c.cell_type == "code")
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            shown += (
                "\n"
                + output.get("text", "")
                + "".join(data.get(k, "") for k in ("text/plain", "text/markdown"))
            )
    shown = shown.replace("_", "").replace(",", "")
    text = without_code(prose(executed).replace("{,}", ","))
    text = re.sub(
        r"\]\([^)]*\)|^Reading|^\*\d+ minutes.*$|\\tag\{.*?\}|\(\d+ minutes", "", text, flags=re.M
    )
    found = [
        n
        for n in NUMBER.findall(text)
        if not re.search(rf"(?<![\d.]){re.escape(n.replace(',', ''))}(?!\d)", shown)
    ]
    refuse(
        found,
        notebook,
        "numbers that no cell shows:",
        "compute and print them, or cite and drop them",
    )

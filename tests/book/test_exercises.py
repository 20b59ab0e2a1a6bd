"""Each exercise of a chapter: its check refuses the stub and at least three wrong answers, and takes the solution.

The wrong answers are the functions `exercise__fault` in `wrong_answers/ch00.py` and so on.
"""

import re
import runpy
import symtable
from pathlib import Path

import nbformat
from nbclient import NotebookClient

WRONG = Path(__file__).parent / "wrong_answers"


def tagged(nb, tag):
    return [i for i, c in enumerate(nb.cells) if tag in c.metadata.get("tags", [])]


def names(source):
    """The global names that a cell uses, and those that it defines."""
    top = symtable.symtable(source, "cell", "exec")
    tables = [top]
    for table in tables:
        tables += table.get_children()
    symbols = [s for table in tables for s in table.get_symbols() if s.is_global()]
    used = {s.get_name() for s in symbols if s.is_referenced()}
    return used, {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported()}


def preparation(chapter, exercises):
    """The cells of a chapter that define, directly or not, what the exercises use."""
    used, defined = zip(*map(names, exercises), strict=True)
    needed, kept = set().union(*used) - set().union(*defined), []
    for source in reversed(chapter):
        used, defined = names(source)
        if defined & needed:
            kept.insert(0, source)
            needed |= used
    return kept


def test_form(notebook):
    nb = nbformat.read(notebook, 4)
    titles = re.findall(r"^### (Exercise .*)$", "\n".join(c.source for c in nb.cells), flags=re.M)
    chapter = re.match(r"ch(\d+)", notebook.name)
    chapter = int(chapter[1]) if chapter else notebook.stem[0].upper()
    assert 2 <= len(titles) <= 5, f"{notebook.name}: {len(titles)} exercises, two to five are asked"
    for number, title in enumerate(titles, 1):
        form = rf"Exercise {chapter}\.{number}: .* \(\d+ minutes, (easy|medium|hard)\)"
        assert re.fullmatch(form, title), f"{notebook.name}: {title!r}: say minutes and difficulty"
    stubs, checks = tagged(nb, "exercise"), tagged(nb, "check")
    assert len(stubs) == len(titles) and checks == [i + 1 for i in stubs]
    for i in checks:
        assert "<details>\n<summary>Solution</summary>" in nb.cells[i + 1].source


def test_checks_tell_right_from_wrong(notebook, tmp_path):
    """khipu practicals-2023 #2, coursera #45: a check that the stub passes, a solution that fails."""
    nb = nbformat.read(notebook, 4)
    file = WRONG / f"{notebook.stem.split('_')[0]}.py"
    listed = runpy.run_path(file) if file.is_file() else []
    listed = [f for f in listed if re.fullmatch(r"[a-z]\w*?__\w+", f)]
    attempts = []  # (exercise, stub, wrong answer or solution, code), in the order they run
    for i in tagged(nb, "exercise"):
        stub, check = nb.cells[i].source, nb.cells[i + 1].source
        exercise = re.search(r"^def (\w+)", stub, flags=re.M)[1]
        wrong = [f for f in listed if f.startswith(f"{exercise}__")]
        assert len(wrong) >= 3, (
            f"{file.name}: {exercise}: {len(wrong)} wrong answers, three are asked"
        )
        solution = re.search(r"```python\n(.*?)```", nb.cells[i + 2].source, flags=re.S)[1]
        load = "{} = __import__('runpy').run_path({!r})[{!r}]"
        attempts += [(exercise, "stub", stub, check)]
        attempts += [(exercise, f, load.format(exercise, str(file), f), check) for f in wrong]
        attempts += [(exercise, "solution", solution, check)]
    stray = set(listed) - {kind for _, kind, *_ in attempts}
    assert not stray, f"{file.name}: {notebook.name} has no exercise for {stray}"

    exercises = [source for *_, answer, check in attempts for source in (answer, check)]
    first = tagged(nb, "exercise")[0]
    chapter = [c.source for c in nb.cells[2:first] if c.cell_type == "code"]  # without the setup
    cells = [nbformat.v4.new_code_cell(s) for s in preparation(chapter, exercises) + exercises]
    short = nbformat.v4.new_notebook(cells=cells, metadata=nb.metadata)
    NotebookClient(short, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()

    failures = []
    checks = cells[-len(exercises) :][1::2]
    for (_, kind, *_), cell in zip(attempts, checks, strict=True):
        verdict = cell.outputs[-1]["data"]["text/plain"]
        if kind == "solution":
            good = re.fullmatch(r"\w+: right \(\d+ cases\)", verdict)
        elif kind == "stub":
            good = ": right (" not in verdict
        else:  # a NameError would be a fault of the file
            good = re.search(
                r"\n  expected .*\n  got  |^\S.* raised (?!NameError|ImportError)",
                verdict,
                flags=re.S,
            )
        if not good:
            failures.append(f"{kind}: {verdict}")
    assert not failures, f"{notebook.name}, {len(attempts)} answers:\n" + "\n".join(failures)

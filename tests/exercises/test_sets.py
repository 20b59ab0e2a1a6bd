"""Problem sets without a grader: their form, and their checks against the stub, wrong and right answers."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
SETS = sorted((ROOT / "exercises" / "source").glob("*/*.ipynb"))
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
HIDDEN = "### BEGIN HIDDEN TESTS"


@pytest.fixture(params=SETS, ids=[path.stem for path in SETS])
def path(request):
    return request.param


def role(cell):
    meta = cell.metadata.get("nbgrader")
    if not meta:
        return None
    roles = {(1, 1): "answer", (0, 1): "solution", (1, 0): "test", (0, 0): "given"}
    return roles[meta["grade"], meta["solution"]]


def problems(nb):
    """[(title, cells)] by their second-level headings."""
    found = []
    for cell in nb.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("## "):
            found.append((cell.source.splitlines()[0], []))
        if found:
            found[-1][1].append(cell)
    return found


def test_there_are_seven():
    assert [path.stem for path in SETS] == [f"ps{n}" for n in range(1, 8)]


def test_form(path):
    nb, number = nbformat.read(path, 4), path.stem.removeprefix("ps")
    assert re.match(
        rf"# Problem set {number}: .+\n\n\*After chapters? .+\. (\d+) points, about two hours\.\*",
        nb.cells[0].source,
    )
    found = problems(nb)
    assert 4 <= len(found) <= 6
    points, minutes, kinds = 0, 0, set()
    for i, (title, cells) in enumerate(found, 1):
        said = re.fullmatch(rf"## Problem {number}\.{i}: .+ \((\d+) points, (\d+) minutes\)", title)
        assert said, f"{title}: say points and minutes"
        assert re.search(r"^\*\*Goal\.\*\* \S", cells[0].source, flags=re.M), f"{title}: no goal"
        roles = [role(c) for c in cells]
        assert "test" in roles or "answer" in roles, f"{title}: nothing is graded"
        total = sum(c.metadata["nbgrader"].get("points", 0) for c in cells if role(c))
        assert total == int(said[1]), f"{title}: its cells have {total} points"
        for cell in cells:
            if role(cell) == "answer":
                assert "**Rubric.**" in cell.source, f"{title}: no rubric"
            if role(cell) == "solution":
                # pitfalls: a stub of another kind than an error would pass a check that is weak
                assert BEGIN in cell.source and END in cell.source
        if "solution" in roles:
            tests = [c for c in cells if role(c) == "test"]
            hidden = [HIDDEN in c.source for c in tests]
            assert hidden.count(False) and hidden.count(True), f"{title}: visible and hidden tests"
        points, minutes, kinds = points + total, minutes + int(said[2]), kinds | set(roles)
    assert f"{points} points" in nb.cells[0].source and 90 <= minutes <= 135, (points, minutes)
    assert {"answer", "solution", "test"} <= kinds
    ids = [c.metadata["nbgrader"]["grade_id"] for c in nb.cells if role(c)]
    assert len(set(ids)) == len(ids) and all(i.startswith(f"{path.stem}_") for i in ids)


def stub(source):
    head, _, rest = source.partition(BEGIN)
    return head + "raise NotImplementedError" + rest.partition(END)[2]


def run(sources, namespace):
    """The first error of cells run in `namespace`, or None."""
    with contextlib.redirect_stdout(io.StringIO()):
        for source in sources:
            try:
                exec(compile(source, "<cell>", "exec"), namespace)
            except Exception as error:
                return error
    return None


def answers(path):
    """{problem: {kind: function}} of exercises/answers/psN.py, helpers and imports apart."""
    file = ROOT / "exercises" / "answers" / f"{path.stem}.py"
    found = {}
    for name, value in runpy.run_path(str(file)).items():
        problem, divider, kind = name.partition("__")
        if divider and problem and callable(value):
            found.setdefault(problem, {})[kind] = value
    return found


def test_graders_tell_right_from_wrong(path):
    nb, listed = nbformat.read(path, 4), answers(path)
    before, failures, seen = [], [], set()
    code = [c for c in nb.cells if c.cell_type == "code" and not c.source.startswith("# Setup")]
    for i, cell in enumerate(code):
        if role(cell) != "solution":
            before.append(cell)
            continue
        name = re.search(r"^def (\w+)", cell.source, flags=re.M)[1]
        tests = []
        for following in code[i + 1 :]:
            if role(following) in ("solution", "answer"):
                break
            if role(following) == "test":
                tests.append(following.source)
        kinds = listed.get(name, {})
        seen.add(name)
        right = [k for k in kinds if k.startswith("right_")]
        if len(right) < 2 or len(kinds) - len(right) < 5:
            failures.append(
                f"{name}: {len(kinds) - len(right)} wrong and {len(right)} right answers"
            )
        attempts = {"solution": cell.source, "stub": stub(cell.source)} | kinds
        for kind, answer in attempts.items():
            namespace = {"__name__": "__main__"}
            assert not (error := run([c.source for c in before], namespace)), repr(error)
            if callable(answer):
                namespace[name] = answer
            else:
                exec(compile(answer, "<cell>", "exec"), namespace)
            errors = [run([source], namespace) for source in tests]
            lost = [e for e in errors if e is not None]
            if kind == "solution" or kind.startswith("right_"):
                good = not lost
            elif kind == "stub":
                good = len(lost) == len(tests)
            else:
                good = lost and not isinstance(lost[0], NameError)
            if not good:
                failures.append(f"{name}, {kind}: {errors}")
        before += [cell]
    stray = set(listed) - seen
    assert not stray, f"answers to no problem: {stray}"
    assert not failures, "\n".join(failures)

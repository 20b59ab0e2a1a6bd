"""Planted submissions, and `make student` and `make grade` as an instructor runs them."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def run(*command, expected=0):
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == expected, (
        f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout + done.stderr


def need_namespaces():
    """Skip where the kernel lets nobody build a jail; a missing bubblewrap is a failure."""
    test = "import sys; sys.path.insert(0, 'exercises'); import jail; jail.bubblewrap()"
    command = [sys.executable, "-c", test]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "cannot start here" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr


def cell(nb, grade_id):
    return next(c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def solutions(name):
    """{grade_id: source} of a set's own solutions."""
    nb = nbformat.read(ROOT / "exercises" / "source" / name / f"{name}.ipynb", 4)
    graded = [c for c in nb.cells if c.metadata.get("nbgrader", {}).get("solution")]
    return {c.metadata.nbgrader.grade_id: c.source for c in graded}


def source_of_answers(name):
    return (ROOT / "exercises" / "answers" / f"{name}.py").read_text(encoding="utf-8")


def kinds(name, function):
    """The kinds of answer that exercises/answers has to a function, in its order."""
    return re.findall(rf"^def {function}__(\w+)", source_of_answers(name), flags=re.M)


def answer(name, function, kind):
    """A cell with one of them, under the function's own name."""
    assert kind in kinds(name, function)
    return f"{source_of_answers(name)}\n\n{function} = {function}__{kind}\n"


class Class:
    """A folder of submissions and what became of them."""

    def __init__(self, folder, editions):
        self.folder, self.editions, self.workspace = folder / "in", editions, folder / "grading"

    def hand_in(self, student, name="ps1", *, solved=True, change=None):
        nb = nbformat.read(self.editions / f"{name}.ipynb", 4)
        if solved:
            for grade_id, source in solutions(name).items():
                cell(nb, grade_id).source = source
        if change:
            change(nb)
        path = self.folder / student / f"{name}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(nb, path)
        return path

    def grade(self):
        command = ["exercises/grade.py", str(self.folder), "--workspace", str(self.workspace)]
        self.said = run(sys.executable, *command, "--timeout", "8")
        with (self.workspace / "grades.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        self.rows = {(r["student"], r["problem_set"]): r for r in rows}
        return self

    def score(self, student, name="ps1"):
        row = self.rows[student, name]
        assert row["status"] == "graded", row
        return float(row["score"])

    def notebook(self, student, name="ps1"):
        return nbformat.read(self.workspace / "autograded" / student / name / f"{name}.ipynb", 4)

    def feedback(self, student, name="ps1"):
        path = self.workspace / "feedback" / student / name / f"{name}.html"
        return path.read_text(encoding="utf-8")

"""Grade what students handed in: grades.csv, and feedback as a web page for each notebook.

usage: python exercises/grade.py SUBMISSIONS [--workspace FOLDER] [--unjailed]

SUBMISSIONS has one folder for each student, named as the student is, with ps1.ipynb and so on in it.
What was graded before and has not changed is not graded again. The workspace (default: grading/)
keeps nbgrader's gradebook.db, autograded/, where points are given by hand with nbgrader formgrader,
feedback/, and grades.csv.
"""

import argparse
import csv
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import nbformat
from course import HERE, course, problem_sets, release
from jail import bubblewrap
from nbgrader.api import MissingEntry
from tqdm import tqdm

KERNEL = "gpt2-to-k3-jail"
LARGEST = 20_000_000  # bytes of a notebook
COLUMNS = ("student", "problem_set", "score", "max_score", "by_hand", "status", "look_at")
# Words that an honest answer has no use for: a jail cannot keep code from its own kernel's checks.
LOOK_AT = re.compile(
    r"\b(?:sys\.modules|builtins|get_ipython|inspect|ctypes|setattr|globals|gc|subprocess|socket"
    r"|os\.\w+|open|exec|eval|__\w+__|gpt2_to_k3)\b|\b(?:nb|torch\.testing)\.\w+ ?=(?!=)"
)


def handed_in(folder):
    """(student, problem set, path) of every notebook that is one of the course's, and the other files."""
    found, other = [], []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        parts = path.relative_to(folder).parts
        name = path.stem
        usual = parts[1:] in ((path.name,), (name, path.name)) and path.suffix == ".ipynb"
        if usual and name in problem_sets() and not path.is_symlink():
            found.append((parts[0], name, path))
        else:
            other.append(path)
    return found, other


def kernel_files(folder, jailed):
    """Write the kernel that runs submissions, and return nbgrader's options for it."""
    if not jailed:
        return {"kernel_name": "python3"}, {}
    spec = folder / "kernels" / KERNEL
    spec.mkdir(parents=True)
    command = [sys.executable, str(HERE / "jail.py"), "{connection_file}"]
    # A signal would reach bubblewrap, not the kernel inside.
    about = {
        "argv": command,
        "display_name": KERNEL,
        "language": "python",
        "interrupt_mode": "message",
    }
    (spec / "kernel.json").write_text(json.dumps(about), encoding="utf-8")
    sockets = folder / "run"
    sockets.mkdir()
    manager = {
        "transport": "ipc",
        "ip": str(sockets / "k"),
        "connection_file": str(sockets / "kernel.json"),
    }
    return {"kernel_name": KERNEL}, manager


def problem(path):
    """Why nbgrader cannot take this file, or None."""
    if path.stat().st_size > LARGEST:
        return f"larger than {LARGEST:,} bytes"
    try:
        nb = nbformat.read(path, 4)
        nbformat.validate(nb)
    except Exception as error:
        return f"not a notebook: {str(error).splitlines()[0][:200]}"
    if not any("nbgrader" in cell.metadata for cell in nb.cells):
        return "no cell of the problem set is in it"
    return None


def look_at(path, edition):
    """Words in the student's own cells that an instructor should look at."""
    given = {cell.source for cell in nbformat.read(edition, 4).cells}
    own = [c.source for c in nbformat.read(path, 4).cells if c.cell_type == "code"]
    return sorted({m for source in own if source not in given for m in LOOK_AT.findall(source)})


def autograde(api, student, name, path):
    """Grade one notebook in place of any earlier one; its status."""
    if reason := problem(path):
        return reason
    place = Path(api.coursedir.root, "submitted", student, name)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    shutil.copy(path, place / f"{name}.ipynb")
    result = api.autograde(name, student, force=True)
    if not result["success"]:
        log = (result.get("error") or "") + (result.get("log") or "")
        (place / "log.txt").write_text(log, encoding="utf-8")
        return f"not graded: see {place / 'log.txt'}"
    return "graded"


def row(api, student, name, found):
    """One line of grades.csv, from the gradebook."""
    score, by_hand, status = 0.0, "", found["status"]
    with api.gradebook as gb:
        most = gb.find_assignment(name).max_score
        try:
            submission = gb.find_submission(name, student)
        except MissingEntry:
            submission = None
        if submission is not None and status == "graded":
            score = submission.score
            by_hand = "yes" if submission.needs_manual_grade else "no"
    cells = student, name, score, most, by_hand, status, " ".join(found["look_at"])
    return dict(zip(COLUMNS, cells, strict=True))


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def edition(api, name, released):
    """The students' edition of a set, made again only if its source has changed."""
    path = Path(api.coursedir.root, "release", name, f"{name}.ipynb")
    source = digest(HERE / "source" / name / f"{name}.ipynb")
    if released.get(name) != source or not path.is_file():
        path = release(api, name)
        released[name] = source
    return path


def arguments_of(line):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("submissions", type=Path)
    parser.add_argument("--workspace", type=Path, default=HERE.parent / "grading")
    parser.add_argument("--unjailed", action="store_true", help="run submissions as yourself")
    parser.add_argument("--timeout", type=int, default=60, help="seconds for one cell")
    options = parser.parse_args(line)
    if not options.submissions.is_dir():
        parser.error(f"no folder {options.submissions}")
    found, other = handed_in(options.submissions)
    if other:
        print("not graded, since not STUDENT/psN.ipynb:", *other, sep="\n  ")
    if not found:
        parser.error(f"nothing to grade in {options.submissions}: expected STUDENT/psN.ipynb")
    if not options.unjailed:
        try:
            bubblewrap()
        except RuntimeError as error:
            parser.error(
                f"{error}. Submissions are other people's programs. Install it, or run them as "
                "yourself, with your files and your network: make grade ... UNJAILED=1"
            )
    return options, found


def main(line=None):
    options, found = arguments_of(line)
    workspace = options.workspace.resolve()
    workspace.mkdir(parents=True, exist_ok=True)
    state_file = workspace / "graded.json"
    state = {"released": {}, "graded": {}}
    if state_file.is_file():
        state = json.loads(state_file.read_text(encoding="utf-8"))
    graded, before = state["graded"], os.environ.get("JUPYTER_PATH")
    with tempfile.TemporaryDirectory(prefix="grade-") as temporary:  # a socket's path must be short
        execute, manager = kernel_files(Path(temporary), not options.unjailed)
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (temporary, before)))
        execute["timeout"] = options.timeout
        api = course(workspace, ExecuteApart=execute, KernelManager=manager)
        names = sorted({name for _, name, _ in found})
        editions = {name: edition(api, name, state["released"]) for name in names}
        new = 0
        for student, name, path in tqdm(found, desc="grading", file=sys.stdout):
            key, mark = f"{student}/{name}", f"{digest(path)} {state['released'][name]}"
            if graded.get(key, {}).get("mark") == mark:
                continue
            new += 1
            status = autograde(api, student, name, path)
            words = look_at(path, editions[name]) if status == "graded" else []
            graded[key] = {"mark": mark, "status": status, "look_at": words}
            state_file.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    rows = [row(api, student, name, graded[f"{student}/{name}"]) for student, name, _ in found]
    for new_row in rows:
        # Also after points were given by hand: feedback shows them.
        key = f"{new_row['student']}/{new_row['problem_set']}"
        told = [new_row["score"], new_row["by_hand"], graded[key]["mark"]]
        if new_row["status"] == "graded" and graded[key].get("told") != told:
            api.generate_feedback(new_row["problem_set"], new_row["student"], force=True)
            graded[key]["told"] = told
    state_file.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    table = workspace / "grades.csv"
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    failed = sum(r["status"] != "graded" for r in rows)
    print(f"{new} looked at now, {len(found) - new} before; {failed} could not be graded")
    print(f"wrote {table}; feedback is in {workspace / 'feedback'}")


if __name__ == "__main__":
    main()

"""`make student` and `make grade`, through nbgrader itself: honest, wrong, broken and hostile submissions."""

import re
import sqlite3
import sys
import zipfile

import classroom
import nbformat
import pytest
from classroom import ROOT, Class, answer, cell, kinds, need_namespaces, run, solutions

APPEND = 4.0  # points of the problem that most planted submissions spoil
AUTOMATIC = 14.0  # points of problem set 1 that are not given by hand

HOSTILE = {
    "endless": "while True: pass",
    "endless and stubborn": """
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "hungry": "x = []\nwhile True: x.append(bytearray(10**8))",
    "forker": "import os\nwhile True: os.fork()",
    "killer of its kernel": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "killer of its parent": """
import os, signal
for process in {os.getppid(), 1} | {int(p) for p in os.listdir("/proc") if p.isdigit()} - {os.getpid()}:
    try:
        os.kill(process, signal.SIGKILL)
    except OSError as error:
        print(process, error)
""",
    "reader": """
for path in PATHS:
    try:
        print("READ", path, open(path, "rb").read()[:20])
    except OSError as error:
        print(path, type(error).__name__)
""",
    "writer": """
for path in PATHS:
    try:
        open(path, "ab").write(b"spoilt")
        print("WROTE", path)
    except OSError as error:
        print(path, type(error).__name__)
""",
    "caller": """
import socket
for address in (("127.0.0.1", 22), ("192.0.2.1", 80)):
    try:
        socket.create_connection(address, 3)
        print("CONNECTED", address)
    except OSError as error:
        print(address, error)
try:
    print("RESOLVED", socket.gethostbyname("example.org"))
except OSError as error:
    print(error)
""",
    "filler": """
for folder in ("/tmp", "/dev/shm", "/dev", "/", "/var/tmp"):
    try:
        with open(folder + "/full", "wb") as file:
            for _ in range(100):
                file.write(bytes(10**8))
        print("FILLED", folder)
    except OSError as error:
        print(folder, error)
""",
    "printer": "while True: print('x' * 10**6)",
    "faker": """
import threading, time
from IPython.core.getipython import get_ipython
from IPython.display import clear_output, display
def fake():
    kernel = get_ipython().kernel
    while True:
        content = {"data": {"text/plain": "3"}, "metadata": {}, "execution_count": 1}
        kernel.session.send(kernel.iopub_socket, "execute_result", content, parent=kernel.get_parent("shell"))
        clear_output()
        time.sleep(0.001)
threading.Thread(target=fake, daemon=True).start()
print("Score: 20/20")
display(20)
def append(*arguments):
    return 3
""",
}


def replaced(grade_id, source):
    def change(nb):
        cell(nb, grade_id).source = source

    return change


def wrong_everywhere(name):
    """Put the first wrong answer of each function in its cell."""

    def change(nb):
        for grade_id, source in solutions(name).items():
            if function := re.search(r"^def (\w+)", source, flags=re.M):
                kind = next(k for k in kinds(name, function[1]) if not k.startswith("right_"))
                cell(nb, grade_id).source = answer(name, function[1], kind)

    return change


@pytest.fixture(scope="module")
def graded(tmp_path_factory, editions):
    """All planted submissions, graded in one run."""
    need_namespaces()
    group = Class(tmp_path_factory.mktemp("class"), editions)
    group.hand_in("right")
    group.hand_in("untouched", solved=False)

    def differently(nb):
        for problem, kind in (("attend", "right_one_query_at_a_time"), ("append", "right_index"),
                              ("generate", "right_small_cache"), ("next_token_flops", "right_hidden")):  # fmt: skip
            grade_id = "ps1_flops" if problem == "next_token_flops" else f"ps1_{problem}"
            cell(nb, grade_id).source = answer("ps1", problem, kind)

    group.hand_in("right in another way", change=differently)
    wrong = answer("ps1", "attend", "mask_counts_from_the_first_key")
    group.hand_in("wrong", change=replaced("ps1_attend", wrong))

    def edited(nb):
        cell(nb, "ps1_attend").source = wrong
        cell(nb, "ps1_attend_check").source = "pass"
        cell(nb, "ps1_attend_hidden").source = "pass"

    group.hand_in("edits tests", change=edited)

    def deleted(nb):
        edited(nb)
        tests = ("ps1_attend_check", "ps1_attend_hidden")
        nb.cells = [
            c for c in nb.cells if c.metadata.get("nbgrader", {}).get("grade_id") not in tests
        ]

    group.hand_in("deletes tests", change=deleted)
    group.hand_in(
        "late error", change=lambda nb: nb.cells.append(nbformat.v4.new_code_cell("1 / 0"))
    )
    for name in ("ps1", "ps4"):
        group.hand_in("wrong everywhere", name, change=wrong_everywhere(name))
    group.hand_in("set 4", "ps4")
    group.hand_in("set 4 untouched", "ps4", solved=False)

    def scripts(nb):
        text = (
            "<script>planted()</script> <img src='x' onerror='planted()'> [x](javascript:planted())"
        )
        nb.cells.append(nbformat.v4.new_markdown_cell(text))
        cell(nb, "ps1_measured").source = text
        show = f"from IPython.display import HTML, Javascript\ndisplay(HTML({text!r}), Javascript('planted()'))"
        nb.cells.append(nbformat.v4.new_code_cell(show))

    group.hand_in("scripts", change=scripts)

    def another_kernel(nb):
        nb.metadata["kernelspec"] = {"name": "python3", "display_name": "x", "language": "python"}
        cell(nb, "ps1_append").source = f"open({str(outside)!r}, 'w').write('here')"

    outside = group.folder.parent / "written from outside the jail"
    group.hand_in("another kernel", change=another_kernel)
    for text in ("", "{}", '{"cells": ['):
        path = group.folder / f"broken {len(text)}" / "ps1.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    secret = group.workspace / "secret.txt"
    paths = [
        group.workspace / "gradebook.db",
        group.workspace / "submitted" / "right" / "ps1" / "ps1.ipynb",
        ROOT / "exercises" / "source" / "ps1" / "ps1.ipynb",
        ROOT / "exercises" / "answers" / "ps1.py",
        ROOT / "src" / "gpt2_to_k3" / "__init__.py",
        secret,
    ]
    for student, source in HOSTILE.items():
        paths_line = f"PATHS = {[str(p) for p in paths]!r}\n" if "PATHS" in source else ""
        group.hand_in(student, change=replaced("ps1_append", paths_line + source))
    tampers = "def append(*arguments):\n    pass\n\nnb.require = print"
    group.hand_in("tamperer", change=replaced("ps1_append", tampers))
    (group.folder / "notes.txt").write_text("not a submission", encoding="utf-8")
    group.outside, group.secret = outside, secret
    return group.grade()


def test_the_right_get_all_and_the_untouched_nothing(graded):
    assert graded.score("right") == graded.score("right in another way") == AUTOMATIC
    assert graded.rows["right", "ps1"]["by_hand"] == "yes"
    assert graded.score("untouched") == graded.score("set 4 untouched", "ps4") == 0
    row = graded.rows["set 4", "ps4"]
    by_hand = sum(
        c.metadata.nbgrader.points
        for c in graded.notebook("set 4", "ps4").cells
        if c.metadata.get("nbgrader", {}).get("solution") and c.metadata.nbgrader.grade
    )
    assert float(row["score"]) == float(row["max_score"]) - by_hand > 0


def test_a_wrong_answer_loses_its_points_and_no_others(graded):
    assert graded.score("wrong") in (AUTOMATIC - 3, AUTOMATIC - 4)
    assert graded.score("late error") == AUTOMATIC


@pytest.mark.parametrize("name", ["ps1", "ps4"])
def test_wrong_answers_everywhere_lose_points_everywhere(graded, name):
    lost = [
        any(o.output_type == "error" for o in c.outputs)
        for c in graded.notebook("wrong everywhere", name).cells
        if c.cell_type == "code" and c.metadata.get("nbgrader", {}).get("grade")
    ]
    # a visible and a hidden test for each function
    assert all(map(max, zip(lost[::2], lost[1::2], strict=True)))


def test_edited_and_deleted_tests_are_restored(graded):
    assert graded.score("edits tests") == graded.score("deletes tests") == graded.score("wrong")
    for test in ("ps1_attend_check", "ps1_attend_hidden"):
        honest, *others = (
            cell(graded.notebook(student), test).source
            for student in ("wrong", "edits tests", "deletes tests")
        )
        assert all(source.endswith(honest) for source in others)  # below nbgrader's remark


@pytest.mark.parametrize("student", HOSTILE)
def test_a_hostile_cell_costs_its_own_points_alone(graded, student):
    assert graded.score(student) == AUTOMATIC - APPEND


def test_a_jail_reads_and_writes_nothing_outside(graded):
    library = str(ROOT / "src" / "gpt2_to_k3" / "__init__.py")
    printed = {
        student: "".join(
            o.get("text", "") for o in cell(graded.notebook(student), "ps1_append").outputs
        )
        for student in ("reader", "writer", "caller", "filler", "killer of its parent")
    }
    assert re.findall(r"^READ (\S+)", printed["reader"], flags=re.M) == [library]
    for student, word in (
        ("writer", "WROTE"),
        ("caller", "CONNECTED|RESOLVED"),
        ("filler", "FILLED"),
    ):
        assert printed[student] and not re.search(word, printed[student]), printed[student]
    assert not graded.secret.exists()
    assert b"spoilt" not in (ROOT / "src" / "gpt2_to_k3" / "__init__.py").read_bytes()


def test_a_submission_does_not_choose_its_kernel(graded):
    assert graded.score("another kernel") == AUTOMATIC - APPEND
    assert not graded.outside.exists()


@pytest.mark.parametrize("length", [0, 2, 11])
def test_what_is_no_notebook_gets_a_line_and_no_points(graded, length):
    row = graded.rows[f"broken {length}", "ps1"]
    assert row["status"] != "graded" and float(row["score"]) == 0


def test_files_that_are_no_submissions_are_named(graded):
    assert "notes.txt" in graded.said


def test_the_gradebook_is_whole(graded):
    with sqlite3.connect(graded.workspace / "gradebook.db") as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_words_to_look_at(graded):
    assert graded.rows["right", "ps1"]["look_at"] == ""
    assert "get_ipython" in graded.rows["faker", "ps1"]["look_at"]
    assert "os.fork" in graded.rows["forker", "ps1"]["look_at"]


def test_what_a_jail_cannot_stop_is_marked(graded):
    """Code in the same kernel can replace the check: book/teaching.md says so."""
    assert graded.score("tamperer") > AUTOMATIC - APPEND
    assert graded.rows["tamperer", "ps1"]["look_at"] == "nb.require ="


def test_feedback_has_messages_and_no_hidden_tests(graded):
    page = graded.feedback("wrong")
    assert "expected" in page and "HIDDEN" not in page
    source = nbformat.read(ROOT / "exercises" / "source" / "ps1" / "ps1.ipynb", 4)
    hidden = cell(source, "ps1_attend_hidden").source
    lines = [
        x.strip()
        for x in re.findall(r"HIDDEN TESTS\n(.*)### END", hidden, flags=re.S)[0].splitlines()
    ]
    text = re.sub(r"<[^>]+>", "", page)
    assert not [x for x in lines if len(x) > 20 and x in text]
    for grade_id, solution in solutions("ps1").items():
        line = max(solution.splitlines(), key=len).strip()
        assert line not in re.sub(r"<[^>]+>", "", graded.feedback("untouched")), grade_id


def test_scripts_of_a_submission_do_not_run_in_a_browser(graded, browser):
    assert graded.score("scripts") == AUTOMATIC
    page = browser.new_page()
    calls = []
    page.expose_function("planted", lambda: calls.append("planted"))
    page.set_content(graded.feedback("scripts"))
    page.wait_for_timeout(500)
    for link in page.get_by_text("x", exact=True).all():
        link.click(timeout=1000)
    assert not calls


def test_a_second_run_grades_only_what_is_new(graded):
    before = {key: row["score"] for key, row in graded.rows.items()}
    graded.hand_in("wrong")
    graded.hand_in("newcomer")
    graded.grade()
    assert re.search(r"^2 looked at now", graded.said, flags=re.M), graded.said
    assert graded.score("wrong") == graded.score("newcomer") == AUTOMATIC
    kept = {
        key: row["score"] for key, row in graded.rows.items() if key[0] not in ("wrong", "newcomer")
    }
    assert kept == {key: score for key, score in before.items() if key[0] != "wrong"}


def test_without_bubblewrap_it_refuses(graded, monkeypatch):
    monkeypatch.setitem(classroom.ENVIRONMENT, "PATH", "/nowhere")
    said = run(sys.executable, "exercises/grade.py", str(graded.folder), expected=2)
    assert "bubblewrap is not installed" in said and "UNJAILED=1" in said


def test_editions_are_for_students(editions):
    """khipu practicals-2023 #2: every stub raises; nbgrader #476: no hidden test, no solution."""
    with zipfile.ZipFile(editions / "problem-sets.zip") as zipped:
        names = zipped.namelist()
    assert names == [f"ps{n}.ipynb" for n in range(1, 8)]
    for name in names:
        nb = nbformat.read(editions / name, 4)
        for c in nb.cells:
            meta = c.metadata.get("nbgrader", {})
            if meta.get("solution"):
                stub = "raise NotImplementedError" if c.cell_type == "code" else "YOUR ANSWER HERE"
                assert stub in c.source
        assert nb.cells[1].source.startswith("# Setup")


def test_a_message_where_there_is_nothing_to_grade(tmp_path):
    grade = sys.executable, "exercises/grade.py"
    assert "no folder" in run(*grade, str(tmp_path / "none"), expected=2)
    assert "nothing to grade" in run(*grade, str(tmp_path), expected=2)

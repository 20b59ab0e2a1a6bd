"""The page for instructors: its table says what the chapters and the problem sets say themselves."""

import re
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "book" / "teaching.md").read_text(encoding="utf-8")


def test_minutes_are_the_chapters_own():
    rows = re.findall(r"^\| \[(\d+)\. .*?\]\((ch\d+_\w+\.ipynb)\) \| (\d+) \|", PAGE, flags=re.M)
    assert [int(number) for number, *_ in rows] == list(range(16))
    for number, name, minutes in rows:
        nb = nbformat.read(ROOT / "book" / name, 4)
        text = "\n".join(c.source for c in nb.cells if c.cell_type == "markdown")
        assert name.startswith(f"ch{int(number):02}_")
        assert f"*{minutes} minutes to read" in text, name


def test_sets_are_assigned_after_their_chapters():
    after = {m[1]: int(m[0]) for m in re.findall(r"^\| \[(\d+)\. .*\| (\d) \|$", PAGE, flags=re.M)}
    assert sorted(after) == [str(n) for n in range(1, 8)]
    for number, chapter in after.items():
        nb = nbformat.read(ROOT / "exercises" / "source" / f"ps{number}" / f"ps{number}.ipynb", 4)
        line = next(x for x in nb.cells[0].source.splitlines() if x.startswith("*After chapter"))
        named = [int(n) for n in re.findall(r"\d+", line.split(".")[0])]
        assert max(named) == chapter, line

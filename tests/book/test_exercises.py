"""Each exercise of a chapter: the stub does not pass its check, the folded solution does."""

import re

import nbformat
from nbclient import NotebookClient


def tagged(nb, tag):
    return [i for i, c in enumerate(nb.cells) if tag in c.metadata.get("tags", [])]


def test_form(notebook):
    nb = nbformat.read(notebook, 4)
    titles = re.findall(r"^### (Exercise .*)$", "\n".join(c.source for c in nb.cells), flags=re.M)
    chapter = int(re.match(r"ch(\d+)", notebook.name)[1])
    assert 2 <= len(titles) <= 5, f"{notebook.name}: {len(titles)} exercises, two to five are asked"
    for number, title in enumerate(titles, 1):
        form = rf"Exercise {chapter}\.{number}: .* \(\d+ minutes, (easy|medium|hard)\)"
        assert re.fullmatch(form, title), f"{notebook.name}: {title!r}: say minutes and difficulty"
    stubs, checks = tagged(nb, "exercise"), tagged(nb, "check")
    assert len(stubs) == len(titles) and checks == [i + 1 for i in stubs]
    for i in checks:
        assert "<details>\n<summary>Solution</summary>" in nb.cells[i + 1].source


def test_solutions_pass_and_stubs_do_not(notebook, tmp_path):
    """khipu practicals-2023 #2, coursera #45: a check that the stub passes, a solution that fails."""
    nb = nbformat.read(notebook, 4)
    for i in reversed(tagged(nb, "exercise")):  # stub, check, then the solution and the check again
        solution = re.search(r"```python\n(.*?)```", nb.cells[i + 2].source, flags=re.S)[1]
        again = nbformat.v4.new_code_cell(nb.cells[i + 1].source)
        nb.cells[i + 2 : i + 2] = [nbformat.v4.new_code_cell(solution), again]
    NotebookClient(nb, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for i in tagged(nb, "check"):
        stub, solved = (nb.cells[j].outputs[-1]["data"]["text/plain"] for j in (i, i + 2))
        assert ": right (" not in stub, f"{notebook.name}: the stub passes: {stub}"
        assert re.search(r": right \(\d+ cases\)$", solved), f"{notebook.name}: {solved}"

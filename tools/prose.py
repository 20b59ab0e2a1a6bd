"""Write src/gpt2_to_k3/data/prose.txt, the text of chapters 0 to 13, on which chapter 14 trains its model.

usage: prose.py
"""

from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "src" / "gpt2_to_k3" / "data" / "prose.txt"


def prose():
    chapters = sorted((ROOT / "book").glob("ch0*.ipynb")) + sorted(
        (ROOT / "book").glob("ch1[0-3]*.ipynb")
    )
    cells = [c for path in chapters for c in nbformat.read(path, 4).cells]
    return "\n\n".join(c.source for c in cells if c.cell_type == "markdown") + "\n"


if __name__ == "__main__":
    FILE.write_text(prose(), encoding="utf-8")

"""Write the students' editions of all problem sets, and one zip of them.

usage: python exercises/student.py [--to FOLDER]
"""

import argparse
import shutil
import sys
import zipfile
from pathlib import Path

from course import course, problem_sets, release
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "student")
    options = parser.parse_args(arguments)
    api = course()
    options.to.mkdir(parents=True, exist_ok=True)
    archive = options.to / "problem-sets.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        for name in tqdm(problem_sets(), desc="student editions", file=sys.stdout):
            edition = options.to / f"{name}.ipynb"
            shutil.copy(release(api, name), edition)
            zipped.write(edition, edition.name)
    print(f"wrote {len(problem_sets())} notebooks and {archive}")


if __name__ == "__main__":
    main()

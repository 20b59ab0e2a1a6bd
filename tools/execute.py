"""Run every changed notebook in parallel into the cache that jupyter-book reads (it would run them one by one)."""

import logging
import sys
from pathlib import Path

from jupyter_cache import get_cache
from jupyter_cache.executors import load_executor

ROOT = Path(__file__).resolve().parents[1]
SECONDS_PER_CELL = 120


def main():
    logging.basicConfig(
        format="%(message)s", level=logging.INFO
    )  # jupyter-cache logs each start and end
    cache = get_cache(ROOT / "_build" / ".jupyter_cache")
    for path in sorted((ROOT / "book").glob("*.ipynb")):
        cache.add_nb_to_project(str(path))
    todo = [record.uri for record in cache.list_unexecuted()]
    if not todo:
        return 0
    print(f"Running {len(todo)} notebooks on all cores", flush=True)
    result = load_executor("local-parallel", cache, logging.getLogger("execute")).run_and_cache(
        filter_uris=todo, timeout=SECONDS_PER_CELL
    )
    failed = result.excepted + result.errored
    for uri in failed:
        reason = (
            (cache.get_project_record(uri).traceback or "could not be started")
            .strip()
            .splitlines()[-1]
        )
        print(
            f"{Path(uri).relative_to(ROOT)}: {reason} -> run it from top to bottom in Jupyter, mend the cell, make book",
            file=sys.stderr,
        )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

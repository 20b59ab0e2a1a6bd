"""A Colab user's first click: run chapter 0's setup cell in a kernel that has loaded its packages already.

The release archive is replaced by one of this commit; all else is the cell as committed.
usage: first_click.py REPOSITORY ARCHIVE
"""

import json
import re
import sys

from jupyter_client.manager import start_new_kernel

BEFORE = """
import sys, importlib.util
import numpy, torch, matplotlib, ipywidgets
assert importlib.util.find_spec("gpt2_to_k3") is None, "the package is there already"
before = {m: (sys.modules[m].__version__, sys.modules[m].__file__) for m in ("numpy", "torch", "matplotlib", "ipywidgets")}
"""
AFTER = """
import gpt2_to_k3, importlib.metadata as metadata
from gpt2_to_k3 import notebook
for m, (version, file) in before.items():
    assert metadata.version(m) == version and sys.modules[m].__file__ == file, f"{m} was replaced"
print("gpt2_to_k3", gpt2_to_k3.__version__, "installed; loaded packages as they were")
"""


def main(repository, archive):
    with open(f"{repository}/book/ch00_the_number.ipynb", encoding="utf-8") as file:
        cells = json.load(file)["cells"]
    setup = "".join(next(c["source"] for c in cells if c["cell_type"] == "code"))
    local, replaced = re.subn(r"\{repository\}/archive/\S+\.zip", archive, setup)
    assert replaced == 1, "the setup cell does not install a release archive"
    manager, client = start_new_kernel()
    try:
        for code in (BEFORE, local, AFTER, local):  # the second time it must do nothing
            reply = client.execute_interactive(code, timeout=300)
            if reply["content"]["status"] != "ok":
                sys.exit(
                    f"first click failed: {reply['content']['ename']}: {reply['content']['evalue']}"
                )
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

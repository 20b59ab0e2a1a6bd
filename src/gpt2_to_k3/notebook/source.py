"""Show the library's own source in a chapter, so that page and package cannot disagree."""

import importlib
import inspect
import os
import re
from importlib import metadata

from IPython.display import Markdown


def _site():
    """The site's address: this package's metadata, or where the build says it is (GPT2_TO_K3_SITE)."""
    if "GPT2_TO_K3_SITE" in os.environ:
        return os.environ["GPT2_TO_K3_SITE"]
    urls = dict(u.split(", ") for u in metadata.metadata("gpt2-to-k3").get_all("Project-URL"))
    return urls["Documentation"] + "/book"


def show_source(thing):
    """Source of a function, method or class of this package, with a link to its API page.

    Docstrings are left out: they are what the API page shows.

    Raises:
        ValueError: ``thing`` is not part of gpt2_to_k3.
    """
    module = inspect.getmodule(thing)
    if module is None or not module.__name__.startswith("gpt2_to_k3."):
        raise ValueError(f"thing: expected something defined in gpt2_to_k3, got {thing!r}")
    floor = importlib.import_module(".".join(module.__name__.split(".")[:2]))
    exported = thing.__qualname__.split(".")[0] in floor.__all__
    name = f"{(floor if exported else module).__name__}.{thing.__qualname__}"
    code = inspect.cleandoc("\n" + inspect.getsource(thing))
    code = re.sub(r'^ *""".*?"""\n\n?', "", code, flags=re.S | re.M)
    link = f'<a href="{_site()}/api.html#{name}">{name}</a>'
    return Markdown(f"```python\n{code}\n```\nFrom the library: {link}")

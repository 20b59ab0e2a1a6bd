"""Sphinx extension: the parts of a docstring (Shapes: ..., Dtype: ..., Source: ...) become paragraphs."""

import re

PART = re.compile(r"^(Shapes|Mask|Units|Dtype|Errors|Source): ")


def paragraphs(app, what, name, obj, options, lines):
    """A part begins a paragraph with its name in bold; in the source the parts stand line by line."""
    lines[:] = [new for line in lines for new in _split(line)]


def _split(line):
    part = PART.match(line)
    return ["", f"**{part[1]}.** {line[part.end() :]}"] if part else [line]


def setup(app):
    app.connect("autodoc-process-docstring", paragraphs)
    return {"parallel_read_safe": True}

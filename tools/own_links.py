"""Sphinx extension: a chapter's link to the published site becomes a link within this copy of it.

Chapters are opened in Colab too, where nothing but the full address leads anywhere.
"""

from docutils import nodes
from sphinx.util.osutil import relative_uri


def make_local(app, doctree, docname):
    base = app.config.html_baseurl.rstrip("/") + "/"
    here = app.builder.get_target_uri(docname)
    for link in doctree.findall(nodes.reference):
        if link.get("refuri", "").startswith(base):
            link["refuri"] = relative_uri(here, link["refuri"].removeprefix(base))


def setup(app):
    app.connect("doctree-resolved", make_local)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Pages that hold playgrounds, opened from disk."""

import re

import pytest
from bs4 import BeautifulSoup

from gpt2_to_k3 import notebook as nb


@pytest.fixture
def open_page(browser, tmp_path):
    """open_page(*playgrounds, ...) -> a page from disk, the network off; errors fail the test."""
    pages = []

    def load(*shown, css="", script="", clock=False, **arguments):
        context = browser.new_context(offline=True, **arguments)
        page = context.new_page()
        page.set_default_timeout(5000)
        page.errors = []
        page.on("console", lambda m: page.errors.append(m.text))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("request", lambda r: re.match("file:|data:", r.url) or page.errors.append(r.url))
        pages.append(page)
        if script:
            page.add_init_script(script)
        if clock:
            page.clock.install()
        body = "\n".join(p._repr_mimebundle_()["text/html"] for p in shown)
        file = tmp_path / f"page{len(pages)}.html"
        file.write_text(
            f"""<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>t</title>
<meta name="viewport" content="width=device-width"><style>{css}</style></head>
<body><main><h1>A page</h1>{body}</main></body></html>""",
            encoding="utf-8",
        )
        page.goto(file.as_uri())
        return page

    yield load
    errors = [page.errors for page in pages]
    for page in pages:
        page.context.close()
    assert not any(errors), errors


@pytest.fixture
def calculator():
    """calculator(shapes=None, ...) -> a BillCalculator with a price and an alt."""

    def make(shapes=None, **changes):
        return nb.BillCalculator(shapes, **dict(dollars_per_hour=3.0, alt="Bytes read") | changes)

    return make


@pytest.fixture
def small_stable_and_alone():
    """check(make, alt): what make(alt=alt) shows is small, the same each time, and loads nothing."""

    def check(make, alt):
        bundle = make(alt=alt)._repr_mimebundle_()
        assert bundle == make(alt=alt)._repr_mimebundle_()
        page = BeautifulSoup(bundle["text/html"], "html.parser")
        assert page.img["alt"] == alt and alt in bundle["text/plain"]
        assert page.img["src"].endswith(bundle["image/png"])
        rest = bundle["text/html"].replace(bundle["image/png"], "")
        assert len(rest.encode()) < 40_000 and not re.search("https?:|//[a-z]", rest)
        return page

    return check

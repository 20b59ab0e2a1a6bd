"""The built site, and a browser to read it with."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "book").glob("*.ipynb"))
PAGES = sorted(p.stem for p in [*NOTEBOOKS, *(ROOT / "book").glob("*.md")])


def pytest_generate_tests(metafunc):
    """`notebook` runs over the notebooks' files, `page_with_player` and `page_name` over pages."""
    if "notebook" in metafunc.fixturenames:
        metafunc.parametrize("notebook", NOTEBOOKS, ids=[p.stem for p in NOTEBOOKS])
    if "page_with_player" in metafunc.fixturenames:
        players = [p.stem for p in NOTEBOOKS if "nb.Player(" in p.read_text(encoding="utf-8")]
        metafunc.parametrize("page_with_player", players)
    if "page_name" in metafunc.fixturenames:
        metafunc.parametrize("page_name", PAGES)


@pytest.fixture(scope="session")
def site():
    folder = ROOT / "_build" / "html"
    if not (folder / "index.html").is_file():
        pytest.fail(f"{folder} has no site: run 'make book' first", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def browser_context_args():
    return {"offline": True, "viewport": {"width": 1280, "height": 900}}


@pytest.fixture
def open_page(site, browser, browser_context_args):
    """open_page(name, **context arguments) -> a loaded page of the site, opened from disk with the network off."""
    contexts = []

    def load(name, **arguments):
        context = browser.new_context(**(browser_context_args | arguments))
        contexts.append(context)
        page = context.new_page()
        page.errors, page.outside = [], []
        page.on("console", lambda m: m.type == "error" and page.errors.append(m.text))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on(
            "request", lambda r: r.url.startswith(("file:", "data:")) or page.outside.append(r.url)
        )
        page.on("requestfailed", lambda r: page.errors.append(f"could not load {r.url}"))
        page.goto((site / "book" / f"{name}.html").as_uri())
        if arguments.get("java_script_enabled", True):
            page.wait_for_function(
                "window.MathJax === undefined || (MathJax.startup && MathJax.startup.promise)"
            )
            page.evaluate("window.MathJax && MathJax.startup.promise")
        return page

    yield load
    for context in contexts:
        context.close()

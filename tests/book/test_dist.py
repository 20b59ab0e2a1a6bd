"""The site as one file: unpacked anywhere, opened from disk, the network off."""

import runpy
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    pack = runpy.run_path(str(ROOT / "tools" / "site_zip.py"))["main"]
    target = tmp_path_factory.mktemp("dist") / "site.zip"
    pack(ROOT / "_build" / "html", target)
    return target


@pytest.fixture(scope="module")
def site(packed):
    with zipfile.ZipFile(packed) as zipped:
        zipped.extractall(packed.parent)
    return packed.parent / "gpt2-to-k3"


@pytest.mark.parametrize("name", ["index", "ch05_delta_rule", "claims"])
def test_pages_of_the_zip_open_from_disk(open_page, name):
    page = open_page(name)
    page.wait_for_load_state("networkidle")
    assert page.locator("article h1").count() == 1 and not page.outside
    assert not [e for e in page.errors if "could not load" in e]
    if name == "ch05_delta_rule":
        assert page.locator("article mjx-container").count() > 20


def test_the_zip_is_smaller_than_the_site(packed):
    whole = sum(p.stat().st_size for p in (ROOT / "_build" / "html").rglob("*") if p.is_file())
    assert packed.stat().st_size < whole / 2

"""Every local link, image and anchor of the built site resolves."""

import re
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages(site):
    files = [f for f in site.rglob("*.html") if "_static" not in f.parts]
    return {f.resolve(): BeautifulSoup(f.read_text(encoding="utf-8"), "html.parser") for f in files}


def references(soup):
    for tag in soup.find_all(True):
        for key in ("href", "src"):
            if tag.get(key):
                yield tag, tag[key]


def test_local_links_resolve(site, pages):
    broken = []
    for file, soup in pages.items():
        for _, link in references(soup):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.exists():
                broken.append(f"{file.relative_to(site)}: no file {link}: mend or drop the link")
            elif parts.fragment and target in pages:
                if not pages[target].find(attrs={"id": unquote(parts.fragment)}):
                    broken.append(f"{file.relative_to(site)}: no anchor {link}: mend the link")
    if broken:
        pytest.fail("\n".join(broken), pytrace=False)


def test_links_to_the_published_site_stay_in_this_copy(pages):
    """Chapters name the full address for Colab; a copy on a disk must not need the network."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    base = config["html"]["baseurl"] + "/book/"
    chapters = [f for f in pages if re.match(r"ch\d+", f.name)]
    assert chapters
    for file in chapters:
        links = [link for tag, link in references(pages[file]) if tag.name == "a"]
        assert "claims.html" in links, f"{file.name} has no link to the claims page"
        assert not [x for x in links if x.startswith(base)], file.name


def test_nothing_is_loaded_from_elsewhere(site, pages):
    for file, soup in pages.items():
        for tag, link in references(soup):
            loads = tag.name in ("script", "img", "iframe", "source") or "stylesheet" in tag.get(
                "rel", []
            )
            assert not (loads and link.startswith(("http", "//"))), (
                f"{file.relative_to(site)}: {link}"
            )


def test_repository_address_stands_in_one_place(pages):
    """Buttons, package metadata, citation and site address all follow _config.yml."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))
    url, site_url = config["repository"]["url"], config["html"]["baseurl"]
    owner, name = url.rsplit("/", 2)[1:]
    assert site_url == f"https://{owner}.github.io/{name}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["urls"] == {"Repository": url, "Documentation": site_url}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["repository-code"] == url
    for text in ("README.md", "CONTRIBUTING.md", "book/index.md", "book/api.md"):
        for link in re.findall(r"https://[^\s)`]+", (ROOT / text).read_text(encoding="utf-8")):
            assert name not in link or link.startswith((url, site_url)), f"{text}: {link}"
    for soup in pages.values():
        for _, link in references(soup):
            if "github.com" in link and f"/{name}" in link:
                assert link.startswith(url) or link.startswith("https://colab.research"), link

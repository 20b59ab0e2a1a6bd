"""The claims page: its file, that each check in it exists, and the page as a reader uses it."""

import copy
import importlib.util
import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from bs4 import BeautifulSoup

ROOT = Path(__file__).parents[2]
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}

spec = importlib.util.spec_from_file_location("claims", ROOT / "tools" / "claims.py")
tool = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tool)


@pytest.fixture(scope="module")
def data():
    try:
        return tool.load()
    except ValueError as faults:
        pytest.fail(f"{faults}", pytrace=False)


@pytest.fixture(scope="module")
def soup(site):
    html = (site / "book" / "claims.html").read_text(encoding="utf-8")
    return BeautifulSoup(html, "html.parser")


def test_every_check_exists_and_every_text_verdict_and_subject_is_used(data):
    claims = data["claims"]
    assert {c["verdict"] for c in claims} == set(tool.VERDICTS)
    assert list(dict.fromkeys(c["subject"] for c in claims)) == data["subjects"]
    assert {s["source"] for c in claims for s in c["said_by"]} == set(data["sources"])
    for claim in claims:
        for text in (claim["claim"], claim["evidence"]):
            assert text.endswith(".") and "\n" not in text, f"{claim['id']}: a plain sentence"
            assert text.count("`") % 2 == 0, f"{claim['id']}: an unpaired `"


def saved(data, folder):
    text = yaml.safe_dump(data, allow_unicode=True, sort_keys=False)
    (folder / "claims.yml").write_text(text, encoding="utf-8")
    return folder / "claims.yml"


def change(**fields):
    return lambda claims: claims[1].update(fields)


def checks(*shown_by):
    return change(shown_by=list(shown_by))


FAULTS = [
    (checks("tests/ops/test_rules.py::test_none"), "shown_by: no test test_none in tests/ops/test_r"),
    (checks("tests/none.py::test_a"), "shown_by: no test test_a in tests/none.py"),
    (checks("tests/ops/test_rules.py::LINEAR"), "shown_by: no test LINEAR in"),
    (checks("book/ch05_delta_rule.ipynb#The"), "shown_by: no section 'The' in book/ch05"),
    (checks("book/ch99.ipynb#The idea"), "shown_by: no section 'The idea' in book/ch99.ipynb"),
    (checks("book/ch05_delta_rule.ipynb"), "shown_by: no section '' in book/ch05"),
    (
        checks("book/ch05_delta_rule.ipynb#The idea > 1066"),
        "shown_by: section 'The idea' of book/ch05_delta_rule.ipynb does not say '1066'",
    ),
    (checks("data/none.json"), "shown_by: no file src/gpt2_to_k3/data/none.json"),
    (checks("nobody1999"), "shown_by: no entry nobody1999 in book/references.bib"),
    (checks(), "shown_by: a claim with this verdict needs a check"),
    (change(verdict="true"), "verdict: 'true' is not one of holds, simplified, wrong, not ver"),
    (change(verdict=True), "verdict: missing, empty or of a wrong type"),
    (change(subject="Sorcery"), "subject: 'Sorcery' is not one of GPT-2 and the cache, "),
    (change(said_by=[]), "said_by: missing, empty or of a wrong type"),
    (change(said_by=[{"source": "x", "where": "y"}]), "said_by: 'x' is not one of worklog, "),
    (change(said_by=["worklog"]), "said_by: 'worklog' is not a source and where"),
    (change(evidence=""), "evidence: missing, empty or of a wrong type"),
    (change(note="x"), "note: unknown field"),
    (lambda claims: claims[1].pop("claim"), "claim: missing, empty or of a wrong type"),
    (lambda claims: claims[0].update(id=claims[1]["id"]), "id: not a slug, or used twice"),
]  # fmt: skip


@pytest.mark.parametrize("spoil, message", FAULTS, ids=[message[:48] for _, message in FAULTS])
def test_a_fault_is_named_with_its_claim_and_field(data, tmp_path, spoil, message):
    wrong = copy.deepcopy(data)
    name = wrong["claims"][1]["id"]
    spoil(wrong["claims"])
    path = saved(wrong, tmp_path)
    with pytest.raises(ValueError, match=rf"(?m)^claims\.yml: {name}: {re.escape(message)}"):
        tool.load(path)


def test_a_claim_out_of_order_and_a_source_without_a_title_are_named(data, tmp_path):
    wrong = copy.deepcopy(data)
    del wrong["sources"]["worklog"]["title"]
    wrong["claims"].append(wrong["claims"].pop(0))
    with pytest.raises(ValueError) as error:
        tool.load(saved(wrong, tmp_path))
    first = data["claims"][0]["id"]
    source, moved = str(error.value).splitlines()
    assert source == "claims.yml: source worklog: title: missing, or not text"
    assert moved.startswith(f"claims.yml: {first}: subject: 'GPT-2 and the cache' comes after")


def test_the_page_has_every_claim_once_as_the_file_has_it(data, soup):
    rows = soup.select(".claims-table tbody tr")
    assert [row["id"] for row in rows] == [c["id"] for c in data["claims"]]
    for row, claim in zip(rows, data["claims"], strict=True):
        text = " ".join(row.get_text().split())
        for part in (claim["claim"], claim["evidence"], claim["verdict"]):
            assert part.replace("`", "") in text, f"{claim['id']}: the page lacks {part!r}"
        assert len(row.select(".claims-shown a")) == len(claim["shown_by"])
    ids = [tag["id"] for tag in soup.find_all(id=True)]
    assert len(set(ids)) == len(ids)
    total = [int(row.find_all("td")[-1].text) for row in soup.select(".claims-summary tbody tr")]
    assert sum(total) == len(rows)


def test_what_shows_a_claim_is_where_its_link_leads(data, soup, site):
    """A test's line in the repository, a record there, a chapter's section, a reference."""
    config = yaml.safe_load((ROOT / "_config.yml").read_text(encoding="utf-8"))["repository"]
    blob, pages = f"{config['url']}/blob/{config['branch']}/", {}
    links = soup.select(".claims-shown a")
    checks = [check for claim in data["claims"] for check in claim["shown_by"]]
    for link, check in zip(links, checks, strict=True):
        url = urlsplit(link["href"])
        if link["href"].startswith(blob):
            file = ROOT / unquote(url.path.split(f"/blob/{config['branch']}/")[1])
            lines = file.read_text(encoding="utf-8").splitlines()
            if url.fragment:
                assert check.split("::")[1] in lines[int(url.fragment[1:]) - 1], check
            continue
        file = site / "book" / url.path
        if file not in pages:
            pages[file] = BeautifulSoup(file.read_text(encoding="utf-8"), "html.parser")
        target = pages[file].find(id=url.fragment)
        assert target, f"{check}: no #{url.fragment} in {url.path}"
        if "#" in check:
            heading = check.split("#")[1].split(" > ")[0]
            assert target.find(re.compile("^h[1-6]$")).get_text().startswith(heading[:8]), check


def test_the_script_is_loaded_by_this_page_alone(site):
    loaders = [p.name for p in site.rglob("*.html") if "claims.js" in p.read_text(encoding="utf-8")]
    assert loaders == ["claims.html"]


def shown(page):
    return page.locator(".claims-table tbody tr:visible").evaluate_all(
        "rows => rows.map(r => r.id)"
    )


def count(page):
    return page.locator(".claims-count").inner_text()


def test_the_filter(open_page, data):
    page = open_page("claims")
    claims = data["claims"]
    everything = [c["id"] for c in claims]
    assert shown(page) == everything and count(page) == f"{len(claims)} of {len(claims)} claims"
    assert page.locator(".claims-count").get_attribute("aria-live") == "polite"

    page.get_by_label("Verdict").select_option("wrong")
    wrong = [c for c in claims if c["verdict"] == "wrong"]
    assert shown(page) == [c["id"] for c in wrong]
    assert count(page) == f"{len(wrong)} of {len(claims)} claims"
    # A subject without a row left disappears with its heading.
    left = {c["subject"] for c in wrong}
    for subject in data["subjects"]:
        heading = page.get_by_role("heading", name=subject)
        assert heading.is_visible() == (subject in left), subject

    page.get_by_label("Said by").select_option("worklog")
    both = [c for c in wrong if "worklog" in {s["source"] for s in c["said_by"]}]
    assert shown(page) == [c["id"] for c in both] and 0 < len(both) < len(wrong)

    # The words in any order and case, in the claim, the evidence or the checks; with the keyboard.
    page.get_by_label("Said by").select_option("")
    page.get_by_label("With the words").focus()
    page.keyboard.type("DECAY equation")
    found = shown(page)
    assert "gdn-formula" in found and set(found) < {c["id"] for c in wrong}
    page.keyboard.type(" nosuchword")
    assert shown(page) == [] and count(page) == f"0 of {len(claims)} claims"
    page.keyboard.press("Enter")  # sends nothing
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the button
    page.wait_for_function("n => document.querySelector('.claims-count').textContent.startsWith(n)", arg=f"{len(claims)} ")  # fmt: skip
    assert shown(page) == everything and "?" not in page.url

    page.get_by_label("Subject").select_option("Gates")
    assert shown(page) == [c["id"] for c in claims if c["subject"] == "Gates"]
    # A link to a claim that is hidden shows it.
    page.evaluate("location.hash = 'ratio-22580'")
    page.wait_for_selector("#ratio-22580", state="visible")
    assert shown(page) == everything
    assert not [e for e in page.errors if "theme mode" not in e]


def test_on_a_phone_rows_are_cards(open_page, data):
    page = open_page("claims", **PHONE)
    page.get_by_label("Verdict").select_option("not verifiable here")
    cards = page.locator(".claims-table tbody tr:visible")
    assert cards.count() == sum(c["verdict"] == "not verifiable here" for c in data["claims"])
    cells = cards.first.locator("td")
    boxes = [cells.nth(i).bounding_box() for i in range(3)]
    assert boxes[0]["y"] < boxes[1]["y"] < boxes[2]["y"] and boxes[0]["width"] > 280
    for label in ("Verdict", "Said by", "Subject", "With the words"):
        assert page.get_by_label(label).bounding_box()["height"] >= 24, "too small to touch"


def test_without_javascript_all_claims_and_no_form(open_page, data):
    page = open_page("claims", java_script_enabled=False)
    assert page.locator(".claims-filter").is_hidden()
    assert page.locator(".claims-table tbody tr:visible").count() == len(data["claims"])
    assert count(page) == f"{len(data['claims'])} claims"
    page.goto(f"{page.url}#gdn-formula")
    assert page.locator("tr:target").get_attribute("id") == "gdn-formula"

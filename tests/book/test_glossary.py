"""The glossary: each term in three languages, with its chapter, in one sentence; and its page."""

import re
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

BOOK = Path(__file__).parents[2] / "book"
ENTRY = re.compile(
    r"\[(?P<ru>[^]]+)\]\{\.language-ru\} · \[(?P<zh>[^]]+)\]\{\.language-zh\}"
    r" · \[(chapter (?P<number>\d+)|when it breaks)\]\((?P<file>[^)]+)\)"
)


@pytest.fixture(scope="module")
def entries():
    """[(term, indented paragraphs)] of all glossary directives, in the order of the page."""
    found = []
    text = (BOOK / "glossary.md").read_text(encoding="utf-8")
    for body in re.findall(r"^:::\{glossary\}\n(.*?)^:::$", text, flags=re.S | re.M):
        for block in re.split(r"\n(?=\S)", body.rstrip()):
            term, *lines = block.split("\n")
            found.append((term, [line.strip() for line in lines if line.strip()]))
    return found


def test_terms_are_many_in_order_and_once(entries):
    terms = [term.casefold() for term, _ in entries]
    assert len(terms) >= 60
    assert terms == sorted(terms)
    assert len(set(terms)) == len(terms)


def test_each_term_has_two_translations_its_chapter_and_one_sentence(entries):
    for term, (words, definition, *notes) in entries:
        match = ENTRY.fullmatch(words)
        assert match, f"{term}: not 'Russian · Chinese · chapter': {words}"
        assert re.search("[а-яё]", match["ru"], flags=re.I), f"{term}: no Russian"
        assert re.search("[\u4e00-\u9fff]", match["zh"]), f"{term}: no Chinese"
        assert (BOOK / match["file"]).is_file(), f"{term}: no {match['file']}"
        number = match["number"]
        start = f"ch{int(number):02d}_" if number else "failures"
        assert match["file"].startswith(start), f"{term}: {words}"
        ends = re.findall(r"[.!?](?=\s|$)", definition)
        assert ends == ["."] and definition.endswith("."), f"{term}: one sentence: {definition}"
        assert len(notes) <= 1 and all(note.startswith("*Note.* ") for note in notes), term


def test_foreign_words_say_their_language(entries):
    """A screen reader and the choice of a font need to know it; also where a note cites a word."""
    span = re.compile(r"\[([^]]+)\]\{\.language-(ru|zh)\}")
    for term, paragraphs in entries:
        for text in paragraphs:
            bare = span.sub("", text)
            assert not re.search("[а-яё\u4e00-\u9fff]", bare, flags=re.I), f"{term}: {bare}"


def test_the_page_has_the_terms_their_anchors_and_languages(site, entries):
    html = (site / "book" / "glossary.html").read_text(encoding="utf-8")
    soup = BeautifulSoup(html, "html.parser")
    terms = soup.select("dl.glossary dt")
    assert [dt.find(string=True) for dt in terms] == [term for term, _ in entries]
    assert all(dt["id"].startswith("term-") for dt in terms)
    for dt in terms:
        first = dt.find_next_sibling("dd").find("p")
        assert [tag["lang"] for tag in first.select("[lang]")] == ["ru", "zh"], dt["id"]

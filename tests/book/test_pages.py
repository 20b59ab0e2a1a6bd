"""The built pages as a reader sees them: from disk, the network off, in a real browser."""

import re
from pathlib import Path

import nbformat
import pytest
from axe_playwright_python.sync_playwright import Axe

ROOT = Path(__file__).parents[2]
# sphinx-book-theme 1.2 says this on each page it opens; it then does what was asked.
THEME_NOISE = "Got invalid theme mode"
# What the theme's own header, sidebar and bibliography do, in its default state.
THEME_VIOLATIONS = {
    "aria-allowed-role",
    "label-content-name-mismatch",
    "region",
    "aria-deprecated-role",
    "aria-required-children",
}
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


def unexpected(errors):
    return [e for e in errors if THEME_NOISE not in e]


def formulas(path):
    text = "\n\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown")
    text = re.sub(r"`[^`\n]+`", "", re.sub(r"```.*?```", "", text, flags=re.S))
    blocks = re.findall(r"\$\$.+?\$\$", text, flags=re.S)
    inline = re.findall(r"\$[^$]+\$", re.sub(r"\$\$.+?\$\$", "", text, flags=re.S))
    return len(blocks) + len(inline)


def check_formulas(page, notebook):
    """jupyter-book #12, #1181: as many as the source has, none broken, none left as text."""
    shown = page.locator("article mjx-container").count()
    assert shown == formulas(notebook), f"{notebook.name}: {shown} of {formulas(notebook)} formulas"
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    text = page.locator("article p, article li, article td").all_inner_texts()
    assert not [t for t in text if "$" in t or "\\frac" in t]


def check_alternative_text(page):
    for alt in page.locator("article img").evaluate_all("images => images.map(i => i.alt)"):
        assert len(alt) > 25 and not re.search(r"\.(png|svg|jpg)|/", alt), f"alt {alt!r}"


def check_accessible(page, **options):
    """data-8/textbook #207: axe finds nothing beyond the theme's own list."""
    # Colours are looked at when none is on its way to another.
    page.wait_for_function("document.getAnimations().every(a => a.playState != 'running')")
    # Formulas are thousands of elements, and MathJax's own.
    context, options = {"exclude": ["mjx-container"]}, {"resultTypes": ["violations"]} | options
    violations = Axe().run(page, context=context, options=options).response["violations"]
    found = [v for v in violations if v["id"] not in THEME_VIOLATIONS]
    short = [(v["id"], [n["html"][:90] for n in v["nodes"][:3]]) for v in found]
    assert not short, short


def check_buttons(page, notebook):
    """Neuromatch #81, quantecon-book-theme #336: launch buttons that open another file, or none."""
    links = page.locator("header a, .article-header-buttons a").evaluate_all(
        "links => links.map(a => a.getAttribute('href') || '')"
    )
    path = notebook.relative_to(ROOT).as_posix()
    colab = [x for x in links if x.startswith("https://colab.research.google.com/github/")]
    assert len(set(colab)) == 1 and colab[0].endswith(f"/blob/main/{path}"), colab
    assert any(x.endswith(f"/edit/main/{path}") for x in links), "no edit button"
    assert any(x.endswith(f"_sources/{path}") for x in links), "no download button"


def check_solutions_open(page):
    first = page.locator("details").first
    first.locator("summary").click()
    assert first.locator("pre").is_visible()


def test_desktop(open_page, page_name):
    """One load, many looks: pages are large, and loading one is most of the time of a look."""
    page = open_page(page_name)
    page.wait_for_load_state("networkidle")
    # pytti-book, lecture-python-advanced #32
    assert not unexpected(page.errors), f"{page_name}: {page.errors}"
    assert not page.outside, f"{page_name} asks other hosts: {page.outside}"
    check_alternative_text(page)
    check_accessible(page)
    notebook = ROOT / "book" / f"{page_name}.ipynb"
    if notebook.exists():
        check_formulas(page, notebook)
        check_buttons(page, notebook)
        check_solutions_open(page)


def test_dark(open_page, page_name):
    """sphinx-book-theme #743: output on a light card, its text in the dark theme's light colour."""
    page = open_page(page_name, color_scheme="dark")
    grounds = page.locator(".cell_output .text_html").evaluate_all(
        "outputs => outputs.map(o => getComputedStyle(o).backgroundColor)"
    )
    assert set(grounds) <= {"rgba(0, 0, 0, 0)"}, f"{page_name}: {grounds}"
    check_accessible(page, runOnly=["color-contrast"])  # the dark theme differs in colours alone


def test_phone(open_page, page_name):
    """Nothing wider than the page, and long formulas scroll from their beginning."""
    page = open_page(page_name, **PHONE)
    wide = page.evaluate(
        """() => [...document.querySelectorAll('article *')].filter(e => {
             if (e.getBoundingClientRect().right <= innerWidth + 1) return false;
             for (let p = e; p; p = p.parentElement)
               if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return false;
             return true; }).map(e => e.outerHTML.slice(0, 80))"""
    )
    assert not wide, f"{page_name}: wider than 360 pixels: {wide[:3]}"
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    cut = page.evaluate(
        """() => [...document.querySelectorAll('article div.math')].filter(box => {
             const formula = box.querySelector('mjx-math').getBoundingClientRect();
             const edge = box.getBoundingClientRect().left;
             return formula.left < edge - 1 || formula.right - edge > box.scrollWidth + 1;
           }).map(box => box.textContent.slice(0, 60))"""
    )
    assert not cut, f"{page_name}: formulas cut off: {cut}: see book/static/style.css"


def state(player):
    return player.locator("output").inner_text(), player.locator("img").get_attribute("src")


@pytest.mark.parametrize("how", ["mouse", "touch", "keyboard"])
def test_player_moves(open_page, page_with_player, how):
    """jupyter-book #1991: an interactive figure that is dead on the static page."""
    page = open_page(page_with_player, **(PHONE if how == "touch" else {}))
    player = page.locator(".player[data-on]").first
    slider = player.locator("input[type=range]")
    slider.scroll_into_view_if_needed()
    before = state(player)
    box = slider.bounding_box()
    assert box["height"] >= 24, "too small to touch"
    end = {"x": box["width"] - 3, "y": box["height"] / 2}
    if how == "mouse":
        slider.click(position=end)
    elif how == "touch":
        slider.tap(position=end)
    else:
        slider.focus()
        page.keyboard.press("End")
    label, image = state(player)
    assert label != before[0] and image != before[1]
    assert slider.input_value() == slider.get_attribute("max")
    # a page shows several spaces as one
    assert slider.get_attribute("aria-valuetext").split() == label.split()
    slider.focus()
    page.keyboard.press("Home")
    assert slider.input_value() == "0" and state(player)[0] != label and state(player)[1] != image


def test_player_plays_and_pauses(open_page, page_with_player):
    page = open_page(page_with_player)
    player = page.locator(".player[data-on]").first
    button = player.locator("button")
    before = state(player)
    button.click()
    page.wait_for_function(
        "before => document.querySelector('.player output').textContent != before", arg=before[0]
    )
    button.click()
    stopped = state(player)
    page.wait_for_timeout(1200)
    assert state(player) == stopped and button.inner_text() == "Play"


def test_without_javascript_a_still_and_the_text_stand_there(open_page, page_with_player):
    page = open_page(page_with_player, java_script_enabled=False)
    player = page.locator(".player").first
    assert player.locator("img").is_visible() and not player.locator("button").is_visible()
    assert page.get_by_role("heading", name="Sources and claims").is_visible()
    assert page.locator("details pre").first.is_hidden()


def test_a_broken_figure_does_not_stop_the_page(open_page, page_with_player):
    """lecture-python-advanced.myst #32: a widget's script error left the rest unrendered."""
    page = open_page(page_with_player)
    page.add_init_script("JSON.parse = () => { throw new Error('broken on purpose') }")
    page.reload()
    page.evaluate("MathJax.startup.promise")
    assert any("broken on purpose" in e for e in page.errors)
    assert page.locator("article mjx-container").count() > 0
    assert page.locator(".player img").first.is_visible()


def test_search_finds_a_chapter(open_page, site):
    page = open_page("../search")
    page.goto((site / "search.html").as_uri() + "?q=roofline")
    page.wait_for_selector("#search-results li a")
    hrefs = [a.get_attribute("href") for a in page.locator("#search-results li a").all()]
    assert any("ch02_kv_cache" in h for h in hrefs), hrefs


def test_weight(site, page_name):
    size = (site / "book" / f"{page_name}.html").stat().st_size
    assert size <= 1_500_000, f"{page_name} weighs {size:,} bytes"

"""Watch a memory: the JavaScript against the library, and the page as a reader operates it."""

import re

import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup

from gpt2_to_k3 import notebook as nb
from gpt2_to_k3 import ops
from gpt2_to_k3.notebook import playground as module

RULES = ["linear attention", "decay", "delta rule", "gated delta rule", "KDA"]
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
# What themes do to outputs: a card must stand on it.
DARK = """body { background: #111; color: #eee } tr:nth-child(odd) td { background: #333 }
  td, th, button, input { background: #222; color: #eee } table { width: 2000px }"""
WATCHED = dict(
    keys=["k1", "k2", "near k1", "k1", "between k1 and k2"],
    values=[[1, 0, 2], [0, -1, 1], [2, 1, -1], [-1, 2, 0], [0.5, 0.5, 0.5]],
    beta=[1, 0.5, 1, 0.75, 1],
    decay=[1, [0.9, 0.5, 0.9, 1], 0.8, [0.25, 1, 1, 0], 0.95],
    alt="The memory after five tokens: k1 overwritten once",
)


def playground(rules=("KDA", *RULES[:-1]), **changes):
    return nb.MemoryPlayground(list(rules), **(WATCHED | changes))


def library(rule, q, k, v, beta, alpha, channels, S=None):
    """o and S at scale 1: q, k, channels [T, K], v [T, V], beta, alpha [T]."""
    q, k, v, beta, g, gs = (x[None, :, None] for x in (q, k, v, beta, alpha.log(), channels.log()))
    start = dict(scale=1.0, initial_state=None if S is None else S[None, None])
    if rule == "linear attention":
        start["initial_state"] = None if S is None else (S[None, None], torch.zeros_like(k[:, 0]))
        o, (S, _) = ops.recurrent_linear_attention(q, k, v, normalize=False, **start)
    elif rule == "decay":
        o, S = ops.recurrent_decay(q, k, v, g=g, **start)
    elif rule == "delta rule":
        o, S = ops.recurrent_delta_rule(q, k, v, beta=beta, **start)
    elif rule == "gated delta rule":
        o, S = ops.recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, **start)
    else:
        o, S = ops.recurrent_kda(q, k, v, g=gs, beta=beta, **start)
    return o[0, :, 0], S[0, 0]


def before(rule, k, v, beta, alpha, channels, S):
    """What the key reads before its write, and S then: the library's step with nothing to write."""
    inputs = (k, k, 0 * v, 0 * beta, alpha, channels)
    read, S = library(rule, *(x[None] for x in inputs), S)
    return read[0], S


def cases():
    """Named inputs of one run: k [T, K], v [T, V], beta, alpha [T], channels [T, K]."""
    T, K, V = 9, 5, 3
    for seed in range(6):
        random = torch.Generator().manual_seed(seed)
        k, v, beta, alpha, channels = (
            torch.rand(*shape, generator=random, dtype=torch.float64)
            for shape in [(T, K), (T, V), (T,), (T,), (T, K)]
        )
        k, v = torch.nn.functional.normalize(k - 0.5, dim=-1), 4 * v - 2
        yield f"random {seed}", [k, v, beta, alpha, channels]
    for name, at, value in [
        ("beta 0", 2, 0.0), ("beta 1", 2, 1.0), ("beta 2", 2, 2.0), ("zero keys", 0, 0.0),
        ("clearing", 3, 0.0), ("clearing by channel", 4, 0.0), ("keeping", 3, 1.0),
    ]:  # fmt: skip
        inputs = [k.clone(), v, beta.clone(), alpha.clone(), channels.clone()]
        inputs[at][::3] = value
        yield name, inputs
    yield "channels at 0 and 1", [k, v, beta, alpha, channels.round()]
    yield "repeated keys", [k[[0, 1, 0, 0, 2, 1, 0, 2, 2]], v, beta, alpha, channels]
    yield "one channel", [k[:, :1].sign(), v[:, :1], beta, alpha, channels[:, :1]]


@pytest.mark.parametrize("rule", RULES)
def test_every_step_equals_the_library(open_page, compare, rule):
    page = open_page(playground())
    for name, inputs in cases():
        k, v, beta, alpha, channels = inputs
        q = k.roll(1, 0)
        got = page.evaluate(
            """([rule, q, k, v, beta, alpha]) => {
              const { step, read } = document.querySelector(".memory").memory;
              let S = k[0].map(() => v[0].map(() => 0));
              return k.map((_, t) => {
                const at = step(rule, S, k[t], v[t], beta[t], alpha[t]);
                S = at.S;
                return { ...at, o: read(q[t], S) };
              });
            }""",
            [rule, *(x.tolist() for x in (q, k, v, beta, channels if rule == "KDA" else alpha))],
        )
        S = torch.zeros(k.shape[1], v.shape[1], dtype=k.dtype)
        for t, at in enumerate(got):
            at = {key: torch.tensor(x, dtype=k.dtype) for key, x in at.items()}
            o, new = library(rule, *(x[: t + 1] for x in (q, *inputs)))
            seen, kept = before(rule, *(x[t] for x in inputs), S)
            strength = beta[t] if "delta" in rule or rule == "KDA" else 1.0
            erased = strength * torch.outer(k[t], seen)
            want = {
                "kept": kept,
                "read": seen,
                "erased": 0 * erased if rule in ("linear attention", "decay") else erased,
                "written": strength * torch.outer(k[t], v[t]),
                "S": new,
                "o": o[-1],
            }
            compare(f"{rule}, {name}, token {t}", at, want)
            S = new


class Reader:
    """Operates one playground by mouse, touch or keyboard, and knows what must be seen."""

    def __init__(self, page, how="mouse", nth=0, rule="KDA", T=5):
        self.page, self.how, self.rule, self.now, self.query = page, how, rule, 0, "k1"
        self.root = page.locator(".memory").nth(nth)
        self.tokens = [dict(t) for t in playground().data["tokens"][:T]]

    def press(self, go):
        button = self.root.locator(f"[data-go='{go}']")
        if self.how == "keyboard":
            button.focus()
            self.page.keyboard.press("Enter")
        else:  # force: at an end a button is only said to be disabled, and keeps the focus
            button.tap(force=True) if self.how == "touch" else button.click(force=True)

    def pick(self, label, choice):
        box = self.root.get_by_role("combobox", name=label, exact=True)
        if self.how == "keyboard":
            box.focus()
            self.page.keyboard.press("Home")
            for _ in range(box.locator("option").all_inner_texts().index(choice)):
                self.page.keyboard.press("ArrowDown")
            assert box.input_value() == choice
        else:
            box.select_option(choice)

    def write(self, label, number):
        box = self.root.get_by_role("spinbutton", name=label, exact=True)
        if self.how == "keyboard":
            box.focus()
        else:
            box.tap() if self.how == "touch" else box.click()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.type(number)

    def slider(self, label):
        return self.root.get_by_role("slider", name=re.compile(f"^{label}"))

    def slide(self, label):
        """Moves a slider to somewhere near 0.3; returns where it now is."""
        slider = self.slider(label)
        old = slider.input_value()
        if self.how == "keyboard":
            slider.focus()
            for key in ["Home", *["ArrowRight"] * 4, "PageUp", "ArrowDown", "ArrowUp", "ArrowLeft"]:
                self.page.keyboard.press(key)
            assert slider.input_value() == "0.4"
        else:
            slider.scroll_into_view_if_needed()
            box = slider.bounding_box()
            at = {"x": 0.3 * box["width"], "y": box["height"] / 2}
            slider.tap(position=at) if self.how == "touch" else slider.click(position=at)
        new = slider.input_value()
        assert new != old and 0.1 < float(new) < 0.5
        shown = slider.get_attribute("aria-valuetext")
        assert float(shown) == float(new) and slider.locator("+ span").inner_text() == shown
        return float(new)

    def expect(self):
        """All that the panel shows equals what the library gives for these settings."""
        directions = {
            name: torch.tensor(x, dtype=torch.float64) for name, x in module.DIRECTIONS.items()
        }
        done = self.tokens[: self.now]
        soup = BeautifulSoup(self.root.inner_html(), "html.parser")
        tables = {t.caption.string.split(" ")[0]: t for t in soup.find_all("table")}
        # innerHTML: rows end up in a tbody
        shown = {
            name: [[numbers(td.string) for td in tr.find_all("td")] for tr in t.find_all("tr")[1:]]
            for name, t in tables.items()
        }
        S = torch.zeros(4, 3, dtype=torch.float64)
        if done:
            inputs = [
                torch.stack([directions[t["key"]] for t in done]),
                *(torch.tensor([t[x] for t in done], dtype=torch.float64)
                  for x in ("value", "beta", "alpha", "channels")),
            ]  # fmt: skip
            if self.now > 1:
                _, S = library(self.rule, inputs[0][:-1], *(x[:-1] for x in inputs))
            last = [x[-1] for x in inputs]
            seen, kept = before(self.rule, *last, S)
            k, v, beta = last[:3]
            delta = "delta" in self.rule or self.rule == "KDA"
            if delta:
                near(shown["erased"], beta * torch.outer(k, seen))
            assert ("erased" in shown) == delta
            near(shown["written"], (beta if delta else 1) * torch.outer(k, v))
            decay = self.rule not in ("linear attention", "delta rule")
            near(shown["after" if decay else "before"], kept)
            S = library(self.rule, inputs[0], *inputs)[1]
        near(shown["memory"], S)
        answer = directions[self.query] @ S
        near(numbers(soup.find(attrs={"data-show": "answer"}).string.split("=")[-1]), answer)
        truth = {t["key"]: torch.tensor(t["value"], dtype=torch.float64) for t in done}
        assert [th.string for th in tables["Each"].find_all("th", scope="row")] == list(truth)
        errors = {name: (v - directions[name] @ S).norm().item() for name, v in truth.items()}
        for line, (name, v) in zip(shown["Each"], truth.items(), strict=True):
            for got, want in zip(
                line, (v, directions[name] @ S, torch.tensor(errors[name])), strict=True
            ):
                near(got, want)
        summary = soup.find(attrs={"aria-live": "polite"}).string
        current = soup.find_all(attrs={"aria-current": "step"})
        if done:
            assert summary.startswith(
                f"Token {self.now} of {len(self.tokens)}, key {done[-1]['key']}, "
            )
            near(numbers(re.search(r"kS = (\(.*?\))", summary)[1]), seen)
            near(
                numbers(re.search("Largest error: (.*?),", summary)[1]),
                torch.tensor([max(errors.values())]),
            )
            near(numbers(re.search(f"Asked with {self.query}: (.*)[.]", summary)[1]), answer)
            assert [b["data-go"] for b in current] == [str(self.now)]
        else:
            assert "empty" in summary and not current
        for i, t in enumerate(self.tokens):
            text = soup.find("button", attrs={"data-go": str(i + 1)}).string
            assert text.startswith(f"{i + 1}: {t['key']} → (")
            near(numbers(text.split("→")[1]), torch.tensor(t["value"], dtype=torch.float64))


def numbers(text):
    return [float(x) for x in re.findall(r"-?[\d.]*\d", text.replace("−", "-"))]


def near(got, want):
    got = torch.tensor(got, dtype=torch.float64).reshape(want.shape)
    assert (got - want).abs().max() <= 0.005 + 1e-9, (got, want)


@pytest.mark.parametrize("how", ["mouse", "touch", "keyboard"])
def test_the_controls_change_what_is_seen(open_page, how):
    reader = Reader(open_page(playground(), **(PHONE if how == "touch" else {})), how)
    tokens = reader.tokens
    reader.expect()
    for go, now in [("forward", 1), ("forward", 2), ("5", 5), ("forward", 5), ("back", 4)]:
        reader.press(go)
        reader.now = now
        reader.expect()
    # token 4 is the one to change
    reader.write("v2", "-1.5")
    tokens[3]["value"] = [-1, -1.5, 0]
    reader.expect()
    tokens[3]["channels"] = [0.25, reader.slide("α of channel 2"), 1, 0]
    tokens[3]["beta"] = reader.slide("β")
    reader.expect()
    reader.pick("Query q", "near k1")
    reader.query = "near k1"
    reader.expect()
    # an earlier token: every later step follows
    reader.pick("Change token", "2")
    tokens[1]["beta"] = reader.slide("β")
    reader.pick("key", "near k1")
    tokens[1]["key"] = "near k1"
    tokens[1]["channels"] = [0.9, 0.5, 0.9, reader.slide("α of channel 4")]
    reader.expect()
    for rule in RULES[::-1]:
        reader.pick("Rule", rule)
        reader.rule = rule
        reader.expect()
        assert reader.slider("β").count() == (rule not in RULES[:2])
        decays = {"linear attention": 0, "delta rule": 0, "KDA": 4}.get(rule, 1)
        assert reader.slider("α").count() == decays
        if decays == 1:
            tokens[1]["alpha"] = reader.slide("α")
            reader.expect()
            tokens[1]["alpha"] = 0.0
            reader.slider("α").focus()
            reader.page.keyboard.press("Home")
            reader.expect()
    for now in (5, 4, 3, 2, 1, 0):
        reader.press(str(now) if now else "reset")
        reader.now = now
        reader.expect()
    reader.press("back")
    reader.expect()


def test_a_half_typed_number_changes_nothing(open_page):
    reader = Reader(open_page(playground()))
    reader.press("1")
    reader.now = 1
    box = reader.root.get_by_role("spinbutton", name="v1")
    box.fill("")
    reader.expect()
    box.fill("3")
    reader.tokens[0]["value"] = [3, 0, 2]
    reader.expect()


def test_it_plays_to_the_end_and_pauses(open_page):
    page = open_page(playground(), clock=True)
    reader = Reader(page)
    play = reader.root.locator("[data-go=play]")
    play.click()
    for now, name in [(1, "Pause"), (2, "Pause")]:
        page.clock.run_for(1500)
        reader.now = now
        reader.expect()
        assert play.inner_text() == name
    play.click()
    page.clock.run_for(9000)
    reader.expect()
    assert play.inner_text() == "Play"
    play.click()
    page.clock.run_for(9000)
    reader.now = 5
    reader.expect()
    assert play.inner_text() == "Play"
    play.click()
    reader.now = 0
    reader.expect()
    reader.root.get_by_role("combobox", name="Rule").select_option("delta rule")
    page.clock.run_for(9000)
    reader.rule = "delta rule"
    reader.expect()


def test_a_running_playground_that_is_removed_stops(open_page):
    page = open_page(playground(), clock=True)
    page.evaluate("window.panel = document.querySelector('.panel')")
    page.locator("[data-go=play]").click()
    page.locator(".memory").evaluate("root => root.remove()")
    page.clock.run_for(9000)
    assert page.evaluate("panel.querySelector('[data-go=play]').textContent") == "Play"
    assert page.evaluate("panel.querySelectorAll('[aria-current]').length") == 0


def test_playgrounds_do_not_disturb_each_other(open_page):
    short = playground(["delta rule"], **{k: x[:2] for k, x in WATCHED.items() if k != "alt"})
    page = open_page(playground(), short, playground(), clock=True)
    readers = [Reader(page), Reader(page, nth=1, rule="delta rule", T=2), Reader(page, nth=2)]
    assert readers[1].root.get_by_role("combobox", name="Rule").count() == 0
    assert "delta rule" in readers[1].root.locator(".panel").inner_text()
    readers[0].root.get_by_role("combobox", name="Rule").select_option("decay")
    readers[1].press("2")
    readers[2].press("play")
    page.clock.run_for(4500)
    readers[0].rule, readers[1].now, readers[2].now = "decay", 2, 3
    for reader in readers:
        reader.expect()


def test_only_given_rules_can_be_chosen(open_page):
    page = open_page(playground(["delta rule", "KDA"]))
    assert page.get_by_role("combobox", name="Rule").locator("option").all_inner_texts() == [
        "delta rule",
        "KDA",
    ]


def test_a_strength_above_1_can_be_reached(open_page):
    reader = Reader(
        open_page(playground(["delta rule"], beta=[2, 1, 1, 1, 1.5])), rule="delta rule"
    )
    assert reader.slider("β").get_attribute("max") == "2"
    for t, beta in zip(reader.tokens, [2, 1, 1, 1, 1.5], strict=True):
        t["beta"] = beta
    reader.press("5")
    reader.now = 5
    reader.expect()


@pytest.mark.parametrize("css", ["", DARK], ids=["light", "dark"])
def test_accessible(open_page, css):
    page = open_page(*(playground([rule]) for rule in RULES), playground(), css=css)
    for i, root in enumerate(page.locator(".memory").all()):
        root.locator(f"[data-go='{i}']" if i else "[data-go=reset]").click()
    found = Axe().run(page).response["violations"]
    assert not found, [(v["id"], v["nodes"][0]["html"][:90]) for v in found]


def test_a_theme_does_not_restyle_the_card(open_page):
    page = open_page(playground(), css=DARK, color_scheme="dark")
    style = "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
    assert page.locator(".panel").evaluate(style) == ["rgb(26, 26, 26)", "rgb(255, 255, 255)"]
    for cell in page.locator(".panel :is(td, th)").all():
        colour, ground = cell.evaluate(style)
        assert colour in ("rgb(26, 26, 26)", "rgb(85, 85, 85)")
        assert ground in ("rgba(0, 0, 0, 0)", "rgb(255, 255, 255)")
    assert page.locator("[data-show=memory] table").bounding_box()["width"] < 300


def test_the_sign_is_seen_without_and_with_colour(open_page):
    page = open_page(playground(["linear attention"]))
    page.locator("[data-go='2']").click()
    cells = page.locator(".part").last.locator("td")
    seen = {
        text: cells.nth(i).evaluate("e => e.style.backgroundColor")
        for i, text in enumerate(cells.all_inner_texts())
    }
    red, blue = {}, {}
    for text in ("−1", "1", "2"):
        red[text], _, blue[text] = map(int, re.findall(r"\d+", seen[text]))
    assert red["−1"] > blue["−1"] and red["1"] < blue["1"] and red["2"] < red["1"]
    assert seen["0"] == "rgb(255, 255, 255)"


@pytest.mark.parametrize("rule", RULES)
def test_fits_a_phone_and_a_finger(open_page, rule):
    page = open_page(playground([rule, "KDA"]), **PHONE)
    page.locator("[data-go='5']").tap()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for control in page.locator(".panel :is(button, select, input)").all():
        box = control.bounding_box()
        assert box["height"] >= 40 and box["x"] >= 0 and box["x"] + box["width"] <= 360, box


def test_keys_and_names_stay_inside(open_page):
    """Lab's and the site's shortcuts must not take a reader's keys, nor the page get new names."""
    listen = "window.heard = []; addEventListener('keydown', e => heard.push(e.key));"
    names = "Object.getOwnPropertyNames(window).sort()"
    page = open_page(playground(), script=listen)
    assert page.evaluate(names) == open_page(script=listen).evaluate(names)
    assert page.locator(".memory").get_attribute("data-lm-suppress-shortcuts") == "true"
    page.get_by_role("spinbutton", name="v1").focus()
    page.keyboard.press("3")
    page.get_by_role("slider", name=re.compile("^β")).focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("heard") == []
    page.keyboard.press("Tab")
    page.locator("h1").evaluate("e => { e.tabIndex = 0; e.focus() }")
    page.keyboard.press("x")
    assert page.evaluate("heard") == ["x"]


def test_focus_survives_a_step_and_a_change(open_page):
    page = open_page(playground())
    for role, label in [("combobox", "Rule"), ("combobox", "Change token"), ("spinbutton", "v1")]:
        page.get_by_role(role, name=label, exact=True).focus()
        page.keyboard.press("ArrowDown")
        focused = page.evaluate("document.activeElement.labels[0].textContent.trim()")
        assert focused.startswith(label)
    page.locator("[data-go=back]").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.dataset.go") == "back"


def test_without_javascript_the_still_stands_there(open_page):
    page = open_page(playground(), java_script_enabled=False)
    assert page.get_by_alt_text(WATCHED["alt"]).is_visible()
    assert page.locator(".memory").inner_text().strip() == ""


@pytest.mark.parametrize(
    "broken", ["JSON.parse", "Array.prototype.flatMap", "Element.prototype.append"]
)
def test_a_script_that_fails_leaves_the_still(open_page, broken):
    page = open_page(playground(), script=f"{broken} = () => {{ throw new Error('on purpose') }}")
    assert page.locator(".memory img").is_visible() and page.locator(".panel").count() == 0
    assert any("on purpose" in e for e in page.errors)
    page.errors.clear()


def test_with_javascript_the_still_makes_room(open_page):
    page = open_page(playground())
    assert page.locator(".panel").is_visible() and not page.locator(".memory img").is_visible()


@pytest.mark.parametrize("rule", RULES)
def test_the_still_is_the_memory_after_the_last_token(monkeypatch, rule):
    drawn, draw = [], module._draw
    monkeypatch.setattr(module, "_draw", lambda S, title: drawn.append(S) or draw(S, title))
    tokens = playground([rule, "delta rule"]).data["tokens"]
    k = torch.tensor([module.DIRECTIONS[t["key"]] for t in tokens], dtype=torch.float64)
    rest = (
        torch.tensor([t[x] for t in tokens], dtype=torch.float64)
        for x in ("value", "beta", "alpha", "channels")
    )
    assert torch.equal(drawn[0], library(rule, k, k, *rest)[1])


def test_the_output_is_small_stable_and_alone(small_stable_and_alone):
    page = small_stable_and_alone(playground, "a <memory>")
    other = BeautifulSoup(playground(alt="x")._repr_mimebundle_()["text/html"], "html.parser")
    assert other.div["id"] != page.div["id"]


def test_directions_have_length_1_and_beta_and_decay_are_1_if_left_out():
    for name, x in module.DIRECTIONS.items():
        assert abs(torch.tensor(x, dtype=torch.float64).norm() - 1) < 1e-15, name
    tokens = nb.MemoryPlayground(["KDA"], keys=["k1"], values=[[2]], alt="one token").data["tokens"]
    assert tokens == [{"key": "k1", "value": [2], "beta": 1, "alpha": 1, "channels": [1] * 4}]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rules": []}, "rules: expected some of"),
        ({"rules": ["delta rule", "softmax"]}, "rules: .*softmax"),
        ({"keys": ["k1"] * 4}, "values: expected a row for each of 4 keys"),
        ({"keys": []}, "keys: expected directions"),
        ({"keys": ["k1", "k2", "k3", "k4", "k5"]}, "keys: expected directions.*k5"),
        ({"keys": [[1, 0, 0, 0]] * 5}, "keys: expected directions"),
        ({"query": "k9"}, "query: expected directions.*k9"),
        ({"values": [[1, 2]] * 4 + [[1]]}, "values: expected numbers in rows of one length"),
        ({"values": [1] * 5}, "values: expected a row"),
        ({"values": [[]] * 5}, "values: expected a row"),
        ({"values": [[float("nan")]] * 5}, "values: expected finite"),
        ({"beta": [1] * 4}, "beta: expected 5 numbers"),
        ({"beta": [1, 1, 1, 1, 2.01]}, "beta: .*2.01"),
        ({"beta": [1, 1, 1, 1, -0.01]}, "beta: .*-0.01"),
        ({"decay": [1] * 6}, "decay: "),
        ({"decay": [1, 1, 1, 1, 1.01]}, "decay: .*1.01"),
        ({"decay": [1, 1, 1, 1, [1, 1, 1, -0.01]]}, "decay: .*-0.01"),
        ({"decay": [1, 1, 1, 1, [1, 1]]}, "decay: "),
        ({"alt": " "}, "alt: "),
    ],
)
def test_bad_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        playground(**({"rules": ["KDA"]} | changes))

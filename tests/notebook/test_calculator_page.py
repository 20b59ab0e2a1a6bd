"""The calculator's page as a reader operates it: every cell is what lab/costs.py gives."""

from dataclasses import replace

import pytest
from axe_playwright_python.sync_playwright import Axe
from bs4 import BeautifulSoup

from gpt2_to_k3 import notebook as nb
from gpt2_to_k3.lab import ModelShape, costs
from gpt2_to_k3.notebook.calculator import OWN

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
DARK = """body { background: #111; color: #eee } tr:nth-child(odd) td { background: #333 }
  td, th, button, input { background: #222; color: #eee } table { width: 2000px }"""
H200 = costs.Device.h200()


def or_sentence(call):
    try:
        return call()
    except ValueError as error:
        return str(error)


def seconds(s):
    return f"{1e3 * s:.3g} ms" if s < 1 else f"{float(f'{s:.3g}'):,.15g} s"


def short(x):
    return f"{float(f'{x:.3g}'):,.15g}"


class Reader:
    """Operates a calculator, and knows from the library what must be seen."""

    def __init__(self, page, how="mouse"):
        self.page, self.how, self.shape = page, how, nb.model_shapes()[0]
        self.now = dict(tokens=131_072, batch=1, device=H200, dollars_per_hour=3.0, gpus=1)

    def write(self, label, number, name="spinbutton"):
        box = self.page.get_by_role(name, name=label, exact=True)
        if self.how == "keyboard":
            box.focus()
        else:
            box.tap() if self.how == "touch" else box.click()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.type(str(number))

    def pick(self, name):
        box = self.page.get_by_role("combobox", name="Model")
        if self.how == "keyboard":
            box.focus()
            self.page.keyboard.press("Home")
            for _ in range(box.locator("option").all_inner_texts().index(name)):
                self.page.keyboard.press("ArrowDown")
        else:
            box.select_option(name)
        assert box.locator("option:checked").inner_text() == name

    def column(self, shape):
        f = costs.bill(shape, **self.now)
        batch = self.now["batch"]
        growing, state = shape.growing.layers, shape.state.layers
        reading = f["read_seconds"] >= f["compute_seconds"]
        return [
            nb.human(f["cache_bytes"], "B") if growing else "–",
            nb.human(f["layer_cache_bytes"], "B") if growing else "–",
            nb.human(f["state_bytes"], "B") if state else "–",
            nb.human(f["layer_state_bytes"], "B") if state else "–",
            nb.human(f["weight_bytes"], "B"),
            f"{f['largest_batch']:,}",
            nb.human(f["decode_read_bytes"], "B"),
            nb.human(f["weight_read_bytes"], "B"),
            nb.human(batch * f["cache_bytes"], "B"),
            nb.human(batch * f["state_bytes"], "B"),
            nb.human(f["decode_flops"], "FLOP"),
            "reading" if reading else "computing",
            seconds(f["decode_seconds"]),
            short(1 / f["decode_seconds"]),
            short(f["tokens_per_second"]),
            short(f["dollars_per_million_tokens"]),
            nb.human(f["prefill_flops"], "FLOP"),
            seconds(f["prefill_seconds"]),
        ]  # fmt: skip

    def seen(self):
        soup = BeautifulSoup(self.page.locator(".bill .panel").inner_html(), "html.parser")
        rows = [[td.get_text() for td in tr.find_all("td")] for tr in soup.find_all("tr")[1:]]
        summary = soup.find(attrs={"data-show": "summary"}).get_text()
        return [*zip(*[[c.replace("\xa0", " ") for c in r] for r in rows], strict=True)], (
            summary.replace("\xa0", " ")
        )

    def expect(self):
        columns, summary = self.seen()
        shape, all_growing = self.shape, self.shape.all_growing()
        tokens, batch = self.now["tokens"], self.now["batch"]
        assert list(columns[0]) == self.column(shape)
        f = costs.bill(shape, **self.now)
        time, money = seconds(f["decode_seconds"]), short(f["dollars_per_million_tokens"])
        assert summary.startswith(f"{shape.name}: {time} a token, {money} dollars a million")
        assert len(columns) == 1 + (shape.state.layers > 0)
        if len(columns) == 1:
            return
        more = costs.equal_memory_batch(shape, all_growing, tokens, batch)
        assert f" from {costs.break_even_tokens(shape, all_growing):,} tokens on" in summary
        other = or_sentence(lambda: costs.bill(all_growing, **self.now))
        if isinstance(other, str):
            assert other in summary and len([c for c in columns[1] if c == "–"]) >= 12
            return
        assert list(columns[1]) == self.column(all_growing)
        ratio = f["tokens_per_second"] / other["tokens_per_second"]
        assert f" {short(ratio)} times at the same batch" in summary
        if more:
            equal = costs.bill(shape, **self.now | dict(batch=more))
            ratio = equal["tokens_per_second"] / other["tokens_per_second"]
            assert f"({more:,} sequences to {batch:,}) {short(ratio)} times." in summary
        else:
            assert "not one sequence fits" in summary

    def expect_refusal(self, sentence):
        columns, summary = self.seen()
        assert summary == f"{sentence}." and "refused" in self.page.locator(
            "[data-show=summary]"
        ).get_attribute("class")
        return columns


@pytest.mark.parametrize("how", ["mouse", "touch", "keyboard"])
def test_the_controls_change_what_is_seen(open_page, calculator, how):
    reader = Reader(open_page(calculator(), **(PHONE if how == "touch" else {})), how)
    reader.expect()
    for label, key, number in [("Tokens", "tokens", 1000), ("Batch", "batch", 12),
                               ("GPUs", "gpus", 2), ("Tokens", "tokens", 1_048_576)]:  # fmt: skip
        reader.write(label, number)
        reader.now[key] = number
        if costs.largest_batch(reader.shape, reader.now["tokens"], 2 * H200.memory_bytes) >= 12:
            reader.expect()
    reader.write("Dollars an hour", 2.5)
    reader.now["dollars_per_hour"] = 2.5
    reader.write("Memory GB each", 192)
    reader.write("Bandwidth TB/s", 8)
    reader.write("Compute TFLOP/s", 20.5)
    reader.now["device"] = costs.Device("own", 8e12, 20.5e12, 192e9)
    reader.expect()
    reader.write("Growing layers", 13)
    reader.shape = reader.shape.with_growing(13)
    reader.write("Batch", 1)
    reader.now["batch"] = 1
    reader.expect()
    for shape in nb.model_shapes()[::-1]:
        reader.pick(shape.name)
        reader.shape, gpus = shape, 12 if shape.name == "Kimi K3" else 4
        reader.write("GPUs", gpus)
        reader.now["gpus"] = gpus
        reader.expect()
    reader.pick("own numbers")
    reader.shape = ModelShape.own(**OWN)
    reader.expect()
    reader.write("layers", 40)
    reader.write("kv_heads", 4)
    reader.shape = ModelShape.own(**OWN | dict(layers=40, kv_heads=4))
    reader.expect()
    reader.write("Growing layers", 10)
    reader.shape = reader.shape.with_growing(10)
    reader.expect()


def test_the_slider_is_logarithmic_and_follows_the_number(open_page, calculator):
    reader = Reader(open_page(calculator()), "keyboard")
    slider = reader.page.get_by_role("slider", name="Context")
    tokens = reader.page.get_by_role("spinbutton", name="Tokens", exact=True)
    assert slider.get_attribute("aria-valuetext") == "131,072 tokens"
    slider.focus()
    for key, length in [("Home", 1024), ("ArrowRight", 1448), ("ArrowUp", 2048),
                        ("PageUp", 11585), ("End", 2**20), ("ArrowLeft", 741_455)]:  # fmt: skip
        reader.page.keyboard.press(key)
        assert tokens.input_value() == str(length)
        assert slider.get_attribute("aria-valuetext") == f"{length:,} tokens"
        reader.now["tokens"] = length
        reader.expect()
    reader.write("Tokens", 4096)
    assert slider.input_value() == "12"


def test_a_half_typed_number_changes_nothing_and_a_wrong_one_is_refused(open_page, calculator):
    reader = Reader(open_page(calculator()))
    for label, bad, name in [
        ("Batch", "0", "batch"), ("Tokens", "-5", "tokens"), ("GPUs", "1.5", "gpus"),
        ("Memory GB each", "-1", "memory_bytes"), ("Growing layers", "28", "growing layers"),
        ("Bandwidth TB/s", "0", "read_bytes_per_second"),
    ]:  # fmt: skip
        box = reader.page.get_by_role("spinbutton", name=label, exact=True)
        old = box.input_value()
        box.fill("")
        reader.expect()
        box.fill(bad)
        got = str(int(-1e9)) if name == "memory_bytes" else bad
        summary = reader.seen()[1]
        assert summary.startswith(f"{name}: expected ") and summary.endswith(f"got {got}.")
        assert reader.expect_refusal(summary[:-1]) == []
        box.fill(old)
        if name not in ("memory_bytes", "read_bytes_per_second"):  # shown rounded
            reader.expect()
        else:
            reader.page.reload()


def test_a_batch_that_does_not_fit_is_refused_and_its_sizes_stay(open_page, calculator):
    reader = Reader(open_page(calculator(tokens=2**20)))
    reader.now |= dict(tokens=2**20, batch=6)
    reader.write("Batch", 6)
    reader.expect()  # all MLA does not fit, which the summary says
    reader.write("Batch", 7)
    sentence = or_sentence(lambda: costs.bill(reader.shape, **reader.now | dict(batch=7)))
    columns = reader.expect_refusal(sentence)
    assert list(columns[0]) == reader.column(reader.shape)[:6]


def test_calculators_do_not_disturb_each_other(open_page, calculator):
    xl = nb.model_shapes()[-1]
    odd = replace(xl, name="<b>&", growing=replace(xl.growing, kind="<i>"))
    page = open_page(calculator(), calculator([odd], batch=3), calculator())
    assert page.get_by_role("option", name="<b>&").count() == 1
    assert page.locator(".bill").nth(1).locator("th[scope=col]").all_inner_texts() == ["48\xa0<i>"]
    page.locator(".bill").nth(0).get_by_role("spinbutton", name="Batch").fill("9")
    captions = page.locator(".bill caption").all_inner_texts()
    assert [c.split(",")[0] for c in captions] == ["Batch 9", "Batch 3", "Batch 1"]


@pytest.mark.parametrize("css", ["", DARK], ids=["light", "dark"])
def test_accessible(open_page, calculator, css):
    page = open_page(calculator(), calculator(batch=2), calculator(tokens=4096), css=css)
    page.get_by_role("combobox").nth(1).select_option("own numbers")
    page.get_by_role("spinbutton", name="Batch").nth(2).fill("0")
    found = Axe().run(page).response["violations"]
    assert not found, [(v["id"], v["nodes"][0]["html"][:90]) for v in found]


def test_a_theme_does_not_restyle_the_card(open_page, calculator):
    page = open_page(calculator(), css=DARK, color_scheme="dark")
    style = "e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]"
    assert page.locator(".panel").evaluate(style) == ["rgb(26, 26, 26)", "rgb(255, 255, 255)"]
    for cell in page.locator(".panel :is(td, th)").all():
        colour, ground = cell.evaluate(style)
        assert colour in ("rgb(26, 26, 26)", "rgb(85, 85, 85)") and ground == "rgba(0, 0, 0, 0)"
    assert page.locator(".panel table").bounding_box()["width"] < 500
    assert not page.get_by_role("group", name="Own numbers").is_visible()


@pytest.mark.parametrize("model", ["Kimi Linear", "Kimi K3", "own numbers"])
def test_fits_a_phone_and_a_finger(open_page, calculator, model):
    page = open_page(calculator(gpus=12), **PHONE)
    page.get_by_role("combobox").select_option(model)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    table = page.locator("[data-show=table]")
    assert table.evaluate("e => e.scrollWidth <= e.clientWidth")
    for control in page.locator(".panel :is(button, select, input):visible").all():
        box = control.bounding_box()
        assert box["height"] >= 40 and box["x"] >= 0 and box["x"] + box["width"] <= 360, box


def test_keys_and_names_stay_inside(open_page, calculator):
    listen = "window.heard = []; addEventListener('keydown', e => heard.push(e.key));"
    names = "Object.getOwnPropertyNames(window).sort()"
    page = open_page(calculator(), script=listen)
    assert page.evaluate(names) == open_page(script=listen).evaluate(names)
    for role, label in [("spinbutton", "Batch"), ("slider", "Context"), ("combobox", "Model")]:
        page.get_by_role(role, name=label).focus()
        page.keyboard.press("ArrowUp")
        focused = page.evaluate("document.activeElement.labels[0].textContent.trim()")
        assert focused.startswith(label)
    assert page.evaluate("heard") == []

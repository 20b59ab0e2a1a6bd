"""The bill's JavaScript against lab/costs.py, and what holds the page."""

import json
import math
import random
import re
from dataclasses import asdict, replace

import pytest
from bs4 import BeautifulSoup

from gpt2_to_k3 import notebook as nb
from gpt2_to_k3.lab import ModelShape, costs
from gpt2_to_k3.lab.shapes import Experts, GrowingLayers, StateLayers
from gpt2_to_k3.notebook.calculator import OWN

H200 = costs.Device.h200()


CALL = """([name, ...rest]) => {
  try { return document.querySelector(".bill").bill[name](...rest); }
  catch (error) { return { error: error.message }; }
}"""


def ask(page, name, *arguments):
    """What the page's function returns, or the sentence with which it refuses."""
    got = page.evaluate(CALL, [name, *arguments])
    return got["error"] if isinstance(got, dict) and "error" in got else got


def or_sentence(call):
    try:
        return call()
    except ValueError as error:
        return str(error)


def same(got, want):
    """Equal numbers to 1e-12, in figures and inside sentences, and equal words."""
    if isinstance(want, dict):
        assert got.keys() == want.keys()
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, str):
        number = r"\d[\d,]*"
        assert re.sub(number, "#", got) == re.sub(number, "#", want)
        for g, w in zip(re.findall(number, got), re.findall(number, want), strict=True):
            same(float(g.replace(",", "")), float(w.replace(",", "")))
    else:
        assert got == want or got == pytest.approx(want, rel=1e-12, abs=0), (got, want)


def random_case(seed):
    """A shape, tokens, batch, device, price and GPUs; each tenth one at the ends of the ranges."""
    rng = random.Random(seed)

    def whole(most, least=1):
        if seed % 10 == 0:
            return rng.choice([least, most])
        return min(most, max(least, round(10 ** rng.uniform(0, math.log10(most)))))

    part = lambda: dict(  # noqa: E731
        kind="x", weights=whole(10**9), decode_flops=whole(10**7), prefill_flops=whole(10**7)
    )
    layers, number = whole(100, 0), whole(4096)
    shape = ModelShape(
        "random",
        GrowingLayers(layers=layers, cache_numbers=whole(10**5), expand_flops=0, **part()),
        StateLayers(layers=whole(100, int(layers == 0)), state_numbers=whole(10**7), **part()),
        weights=whole(10**12, 0), head_weights=whole(10**10, 0), lookup_weights=whole(10**10, 0),
        experts=Experts(whole(100, 0), number, rng.randint(1, number), whole(10**8)),
        bytes_per_weight=rng.choice([0.5, 1, 2, 4]),
        bytes_per_expert_weight=rng.choice([0.53125, 2]),
        bytes_per_cache_number=rng.choice([0.5, 1.03125, 2]),
        bytes_per_state_number=rng.choice([2, 4]),
    )  # fmt: skip
    device = costs.Device(
        "d", 10 ** rng.uniform(9, 14), 10 ** rng.uniform(11, 16), whole(10**14, 10**9)
    )
    price = rng.choice([0, 10 ** rng.uniform(-3, 3)])
    return shape, whole(2**24), whole(1000), device, price, whole(1000)


def test_page_and_library_give_the_same_figures(open_page, calculator):
    page, fit = open_page(calculator()), 0
    for seed in range(100):
        shape, tokens, batch, device, price, gpus = random_case(seed)
        numbers = (tokens, batch, asdict(device), price, gpus)
        got = ask(page, "bill", asdict(shape), *numbers)
        want = or_sentence(lambda: costs.bill(*case)) if (case := random_case(seed)) else None
        if isinstance(want, str):
            assert want.startswith("batch: expected at most ")
            memory = device.times(gpus).memory_bytes
            want = {
                "layer_cache_bytes": costs.layer_cache_bytes(shape, tokens),
                "layer_state_bytes": costs.layer_state_bytes(shape),
                "cache_bytes": costs.cache_bytes(shape, tokens),
                "state_bytes": costs.state_bytes(shape),
                "weight_bytes": costs.weight_bytes(shape),
                "largest_batch": costs.largest_batch(shape, tokens, memory),
                "refused": want,
            }
        else:
            fit += 1
        same(got, want)
        largest = costs.largest_batch(shape, tokens, device.times(gpus).memory_bytes)
        if 1 <= largest <= 10**15:  # the last that fits
            numbers = (tokens, largest, asdict(device), price, gpus)
            want = costs.bill(shape, tokens, largest, device, price, gpus)
            same(ask(page, "bill", asdict(shape), *numbers), want)
        mix = random.Random(seed).randint(0, shape.layers)
        same(ask(page, "withGrowing", asdict(shape), mix), asdict(shape.with_growing(mix)))
        mixed = shape.with_growing(mix)
        pair = [asdict(s) for s in (mixed, shape)]
        more = costs.equal_memory_batch(mixed, shape, tokens, batch)
        same(ask(page, "equalMemoryBatch", *pair, tokens, batch), more)
        same(ask(page, "breakEvenTokens", *pair), costs.break_even_tokens(mixed, shape))
    assert 30 <= fit <= 90, fit


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(kv_heads=32),
        dict(layers=1, width=1, heads=1, kv_heads=1, head_dim=1, ffn_width=1, vocabulary=1),
        dict(layers=10**5, width=10**5),
        dict(heads=33, kv_heads=11, head_dim=1000),
    ],
)
def test_own_numbers_make_the_same_shape(open_page, calculator, changes):
    numbers = OWN | changes
    same(ask(open_page(calculator()), "own", numbers), asdict(ModelShape.own(**numbers)))


@pytest.mark.parametrize(
    "changes",
    [
        dict(layers=0),
        dict(layers=-1),
        dict(heads=0),
        dict(heads=33),
        dict(kv_heads=-8),
        dict(head_dim=1.5),
        dict(ffn_width=math.nan),
        dict(vocabulary=math.inf),
        dict(width=10**16),
        dict(width=10**14),
        dict(heads=10**10, kv_heads=1, width=1, head_dim=10**5),
        dict(ffn_width=10**14),
        dict(vocabulary=10**14),
    ],
)
def test_impossible_own_numbers_get_the_same_sentence(open_page, calculator, changes):
    with pytest.raises(ValueError) as error:
        ModelShape.own(**OWN | changes)
    same(ask(open_page(calculator()), "own", OWN | changes), str(error.value))


def test_impossible_numbers_get_the_same_sentence(open_page, calculator):
    page, shape = open_page(calculator()), nb.model_shapes()[0]
    good = dict(tokens=1000, batch=2, gpus=1, dollars_per_hour=3)
    good |= {k: v for k, v in asdict(H200).items() if k != "name"}
    bad = [(k, x) for k in good for x in (0, -1, -2.5, math.nan, math.inf, -math.inf)]
    bad += [(k, x) for k in ("tokens", "batch", "gpus") for x in (0.5, 10**15 + 1, 10**20)]
    refused = 0
    for name, x in bad:
        case = good | {name: x}
        device = [case[k] for k in ("read_bytes_per_second", "flops_per_second", "memory_bytes")]

        def library(case=case, device=device):
            one = costs.Device("d", *device)
            rest = case["tokens"], case["batch"], one, case["dollars_per_hour"], case["gpus"]
            return costs.bill(shape, *rest)

        got = ask(page, "bill", asdict(shape), case["tokens"], case["batch"], case,
                  case["dollars_per_hour"], case["gpus"])  # fmt: skip
        want = or_sentence(library)
        if isinstance(got, dict) and "refused" in got:
            got = got["refused"]
        same(got, want)
        if isinstance(want, str):
            assert want.startswith(f"{name}: expected ") or name == "memory_bytes"
            refused += 1
    assert refused == len(bad) - 1, "all but a price of 0"
    for n in (-1, 28, 1.5, math.nan):
        want = or_sentence(lambda n=n: shape.with_growing(n))
        same(ask(page, "withGrowing", asdict(shape), n), want)


def test_without_javascript_the_still_stands_there(open_page, calculator):
    page = open_page(calculator(), java_script_enabled=False)
    assert page.get_by_alt_text("Bytes read").is_visible()
    assert page.locator(".bill").inner_text().strip() == ""


def test_a_script_that_fails_leaves_the_still(open_page, calculator):
    broken = "Number.prototype.toLocaleString = () => { throw new Error('on purpose') }"
    page = open_page(calculator(), script=broken)
    assert page.locator(".bill img").is_visible() and page.locator(".panel").count() == 0
    assert any("on purpose" in e for e in page.errors)
    page.errors.clear()


def test_with_javascript_the_still_makes_room(open_page, calculator):
    page = open_page(calculator())
    assert page.locator(".panel").is_visible() and not page.locator(".bill img").is_visible()


def test_the_output_is_small_stable_and_alone(calculator, small_stable_and_alone):
    page = small_stable_and_alone(calculator, "a <bill>")
    data = json.loads(page.find("script", type="application/json").string)
    assert [s["name"] for s in data["shapes"]] == [s.name for s in nb.model_shapes()]
    other = BeautifulSoup(calculator(batch=2)._repr_mimebundle_()["text/html"], "html.parser")
    assert other.div["id"] != page.div["id"]


def test_the_still_is_the_bill_of_the_first_shape(calculator, monkeypatch):
    import matplotlib.axes

    texts, bars = [], []
    axes = matplotlib.axes.Axes
    note, barh = axes.annotate, axes.barh
    monkeypatch.setattr(
        axes, "annotate", lambda s, t, *a, **k: texts.append(t) or note(s, t, *a, **k)
    )
    monkeypatch.setattr(axes, "barh", lambda s, y, w, **k: bars.append(w) or barh(s, y, w, **k))
    calculator(tokens=2**20, batch=6)
    shape = nb.model_shapes()[0]
    f = costs.bill(shape, 2**20, 6, H200, 3.0)
    assert sum(bars[:3]) == f["decode_read_bytes"] and bars[0] == f["weight_read_bytes"]
    assert f"{1e3 * f['decode_seconds']:.3g} ms a token" in texts[0]
    assert f"{f['dollars_per_million_tokens']:.3g} dollars a million" in texts[0]
    assert texts[1] == "does not fit" and len(texts) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(shapes=[]), "shapes: expected at least one"),
        (dict(alt=" "), "alt: "),
        (dict(batch=0), "batch: expected a whole number from 1"),
        (dict(tokens=-1), "tokens: expected a whole number from 1"),
        (dict(batch=999), "batch: expected at most"),
        (dict(gpus=0), "gpus: "),
        (dict(dollars_per_hour=-1), "dollars_per_hour: "),
        (dict(device=replace(H200, memory_bytes=10**9)), "batch: expected at most 0"),
    ],
)
def test_bad_arguments_are_named(calculator, changes, message):
    with pytest.raises(ValueError, match=message):
        calculator(**changes)

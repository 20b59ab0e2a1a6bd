"""What chapters show: figures, players, tables, sources, checks and live sliders."""

import base64
import io
import json
import re
import sys
import warnings

import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from bs4 import BeautifulSoup
from nbclient import NotebookClient
from PIL import Image

from gpt2_to_k3 import notebook as nb
from gpt2_to_k3.layers import KVCache
from gpt2_to_k3.models.gpt2 import Block
from gpt2_to_k3.ops import softmax_attention


def frame(i):
    fig, ax = plt.subplots(figsize=(2, 1))
    ax.plot([0, i])
    return fig


@pytest.fixture
def player():
    return nb.Player(frame, ["<one>", "two", "three"], 'a line that "rises"', name="step", start=1)


def test_a_still_carries_its_text_everywhere():
    bundle = nb.Still(frame(1), "a <rising> line")._repr_mimebundle_()
    image = BeautifulSoup(bundle["text/html"], "html.parser").img
    assert image["alt"] == "a <rising> line" and "a <rising> line" in bundle["text/plain"]
    pixels = Image.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
    assert pixels.mode == "P" and "transparency" not in pixels.info, "opaque, for the dark theme"
    assert not plt.get_fignums(), "a figure left open would be shown a second time"


@pytest.mark.parametrize(
    "make", [lambda: nb.Still(frame(1), " "), lambda: nb.Player(frame, ["x"], "")]
)
def test_no_figure_without_alternative_text(make):
    with pytest.raises(ValueError, match="alt"):
        make()
    plt.close("all")


def test_a_player_holds_every_frame_and_shows_the_first_without_javascript(player):
    bundle = player._repr_mimebundle_()
    soup = BeautifulSoup(bundle["text/html"], "html.parser")
    data = json.loads(soup.find("script", type="application/json").string)
    assert data["labels"] == ["<one>", "two", "three"] and len(set(data["frames"])) == 3
    assert soup.img["src"].endswith(data["frames"][1]) and soup.img["alt"] == 'a line that "rises"'
    assert soup.find(class_="player-controls").has_attr("hidden")
    assert soup.input["max"] == "2" and soup.input["value"] == "1"
    assert "</script" not in bundle["text/html"].split("application/json")[1].split("</script>")[0]
    assert not re.search(r"https?://", bundle["text/html"])


def test_the_same_player_has_the_same_id(player):
    again = nb.Player(frame, player.labels, player.alt, name="step", start=1)
    assert again._repr_mimebundle_() == player._repr_mimebundle_()


def test_a_start_outside_the_frames_is_refused():
    with pytest.raises(ValueError, match="start.*0..0.*3"):
        nb.Player(frame, ["x"], "one frame", start=3)


def test_source_is_the_librarys_own_with_a_link_to_its_page(monkeypatch):
    monkeypatch.setenv("GPT2_TO_K3_SITE", "SITE")
    shown = nb.show_source(softmax_attention).data
    assert "def softmax_attention(q, k, v, *, scale=None" in shown and '"""' not in shown
    assert 'href="SITE/api.html#gpt2_to_k3.ops.softmax_attention"' in shown
    assert "#gpt2_to_k3.layers.KVCache.append" in nb.show_source(KVCache.append).data
    assert "#gpt2_to_k3.models.gpt2.Block" in nb.show_source(Block).data
    assert nb.show_source(KVCache.append).data.startswith("```python\ndef append"), (
        "no indentation left"
    )


def test_outside_a_build_the_link_is_the_published_site(monkeypatch):
    monkeypatch.delenv("GPT2_TO_K3_SITE", raising=False)
    assert re.search(r'href="https://\S+/book/api.html#', nb.show_source(softmax_attention).data)


def test_only_the_librarys_source_is_shown():
    with pytest.raises(ValueError, match="thing"):
        nb.show_source(json.dumps)


def test_check_says_what_was_expected_and_what_came():
    def square(x):
        return x + x

    verdict = nb.check(square, [((2,), 4), ((3,), 9), ((4,), 16)])
    assert not verdict
    assert (
        "square(3)" in str(verdict)
        and "expected 9" in str(verdict)
        and "got      6" in str(verdict)
    )


def test_check_accepts_a_right_answer_of_any_kind():
    assert nb.check(
        lambda x: x, [((2,), 2), ((torch.ones(2),), torch.ones(2)), (((1, 2.0),), (1, 2.0))]
    )


def test_check_takes_any_kind_of_number():
    for got, expected in (
        (17, 17.0),
        (17.0, 17),
        (torch.tensor(0.5, dtype=torch.float64), 0.5),
        ((2.0, 1), (2, 1.0)),
    ):
        assert nb.check(lambda x, got=got: got, [((0,), expected)])
    for got, expected in (
        (17.5, 17),
        (2**40 + 1.0, 2**40),
        (torch.tensor([0.5]), 0.5),
        (True, 1),
        ("1", 1),
    ):
        assert not nb.check(lambda x, got=got: got, [((0,), expected)])


def test_require_raises_the_message_and_keeps_quiet_otherwise(capsys):
    def noisy(x):
        warnings.warn("of the student's code", stacklevel=1)
        print("on stderr", file=sys.stderr)
        return x

    nb.require(noisy, iter([((1,), 1)]))
    said = capsys.readouterr()
    assert "right (1 cases)" in said.out and not said.err
    with pytest.raises(AssertionError, match=r"noisy\(1\)\n  expected 2\n  got      1"):
        nb.require(noisy, [((1,), 2)])


def test_check_tells_an_unwritten_function_from_a_broken_one():
    def stub(x):
        raise NotImplementedError

    def broken(x):
        return x.nothing

    assert "not written yet" in str(nb.check(stub, [((1,), 1)]))
    assert "broken(1) raised AttributeError" in str(nb.check(broken, [((1,), 1)]))


@pytest.mark.parametrize("got", [torch.ones(3), torch.ones(2, 1), torch.ones(2).int(), None, "no"])
def test_check_refuses_wrong_shapes_dtypes_and_types(got):
    assert not nb.check(lambda: got, [((), torch.ones(2))])


def test_check_keeps_the_cases_as_they_are():
    def greedy(x):
        return x.zero_()

    case = torch.ones(2)
    nb.check(greedy, [((case,), torch.zeros(2))])
    assert torch.equal(case, torch.ones(2))


def test_a_table_is_readable_as_text_and_by_a_screen_reader():
    table = nb.Table(["a", "b"], [("x<y", 1), ("long name", 22)], "two rows")
    assert repr(table).splitlines() == ["two rows", "a          b", "x<y        1", "long name  22"]
    soup = BeautifulSoup(table._repr_html_(), "html.parser")
    assert soup.caption.string == "two rows" and soup.find("th", scope="row").string == "x<y"
    with pytest.raises(ValueError, match="rows: expected 2 cells, got 1"):
        nb.Table(["a", "b"], [("x",)], "short")


@pytest.mark.parametrize(
    "number, shown",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (38_654_705_664, "38.7 GB"),
        (1.5, "1.5 B"),
    ],
)
def test_numbers_for_people(number, shown):
    assert nb.human(number, "B") == shown


def test_rows_under_one_name_share_its_cell():
    table = nb.Table(["a", "b"], [("x", 1), ("x", 2), ("y", 3), ("x", 4)], "names")
    rows = BeautifulSoup(table._repr_html_(), "html.parser").tbody.find_all("tr")
    assert [len(r.find_all("th")) for r in rows] == [1, 0, 1, 1]
    assert [th.get("rowspan") for r in rows for th in r.find_all("th")] == ["2", None, None]
    assert [r.td.string for r in rows] == ["1", "2", "3", "4"]


def test_the_ladder_stops_where_told_and_names_bad_stages():
    assert len(nb.ladder("no cache").rows) == 3 and len(nb.ladder("kv cache").rows) == 6
    assert nb.ladder("kv cache").rows[-1][2] == "38.7 GB"
    fixed = nb.ladder().rows[9:13]  # one row each: their costs are those of any length
    assert [row[1] for row in fixed] == ["any"] * 4
    with pytest.raises(ValueError, match="upto.*no cache"):
        nb.ladder("infinite cache")


def test_a_live_figure_is_replaced_not_appended():
    """ipywidgets #3766: each move of a slider adds a plot."""
    code = """
from gpt2_to_k3 import notebook as nb
panel = nb.live(lambda n: nb.Table(["n"], [(n,)], "t"), n=(1, 9))
display(panel)
panel.children[0].value = 7
panel.children[0].value = 8
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    client = NotebookClient(book, timeout=60)
    client.execute()
    outputs = [w["outputs"] for w in client.widget_state.values() if "outputs" in w]
    assert len(outputs) == 1 and len(outputs[0]) == 1
    assert "8" in outputs[0][0]["data"]["text/plain"]

"""Tables that read the same on the page, in Colab and in a terminal, and the ladder."""

import html
import itertools

from ..lab.costs import CONTEXTS
from ..lab.ladder import LADDER
from ..models import GPT2Config

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def human(number, unit=""):
    """`number` with three significant digits and a decimal prefix: human(38_654_705_664, "B") is '38.7 GB'."""
    power = 0
    while abs(number) >= 999.5 and power < len(PREFIXES) - 1:
        number, power = number / 1000, power + 1
    digits = f"{number:.3g}" if number != int(number) or power else f"{number:.0f}"
    return f"{digits} {PREFIXES[power]}{unit}".strip()


class Table:
    """Rows under headers; the first column names its row.

    Args:
        headers: column names.
        rows: sequences of cells, as long as `headers`; cells are shown with str(). Rows that follow
            each other under one name share its cell.
        caption: what the table lists (shown above it, and read out first).
    """

    def __init__(self, headers, rows, caption):
        self.headers, self.caption = [str(h) for h in headers], caption
        self.rows = [[str(cell) for cell in row] for row in rows]
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(f"rows: expected {len(self.headers)} cells, got {len(row)}: {row}")

    def __repr__(self):
        lines = [self.headers, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.headers))]
        text = [
            "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        return "\n".join([self.caption, *text])

    def _repr_html_(self):
        head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in self.headers)
        body = ""
        for first, group in itertools.groupby(self.rows, key=lambda row: row[0]):
            group = list(group)
            head_cell = (
                f'<th scope="rowgroup" rowspan="{len(group)}">'
                if len(group) > 1
                else '<th scope="row">'
            )
            for i, row in enumerate(group):
                cells = "".join(
                    f'<td style="white-space:nowrap">{html.escape(c)}</td>' for c in row[1:]
                )
                body += f"<tr>{head_cell + html.escape(first) + '</th>' if i == 0 else ''}{cells}</tr>\n"
        # Wide tables scroll by themselves instead of pushing the page; tabindex lets the keyboard do it.
        return (
            f'<div style="overflow-x:auto" tabindex="0" role="region" aria-label="{html.escape(self.caption)}">'
            f'<table class="table"><caption style="caption-side:top">{html.escape(self.caption)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )


def ladder(upto=None, config=None):
    """The ladder so far: what each stage keeps, reads and computes to decode one token, at 4k, 128k and 1M tokens.

    States are in 32 bits and written back as well as read; small projections for gates are not counted.

    Args:
        upto: key in lab.ladder.LADDER of the last stage to show (default: all).
        config: shape of the stack, default GPT-2 small's (beyond its 1,024 positions: the same shape, priced
            as if its position table were longer).
    """
    if upto is not None and upto not in LADDER:
        raise ValueError(f"upto: expected one of {list(LADDER)}, got {upto!r}")
    config = config or GPT2Config.gpt2()
    rows = []
    for key, rung in LADDER.items():
        stage = f"{rung.name}: {rung.stores}; {rung.can}"
        at = {
            f"{n:,}": [f(config, n) for f in (rung.state_bytes, rung.read_bytes, rung.flops)]
            for n in CONTEXTS
        }
        if len({tuple(cost) for cost in at.values()}) == 1:
            at = {"any": next(iter(at.values()))}
        for tokens, (kept, read, flops) in at.items():
            rows.append([stage, tokens, human(kept, "B"), human(read, "B"), human(flops, "FLOP")])
        if key == upto:
            break
    return Table(
        [
            "stage: what it stores; what it can and cannot",
            "tokens",
            "kept",
            "weights and cache or state read",
            "computed",
        ],
        rows,
        "The ladder: one more token, GPT-2 small's shape, 16 bits (states 32), batch 1; activations and scores not counted",
    )

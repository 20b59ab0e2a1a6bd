"""One style for every figure, and two ways to show one: a still and a frame player."""

import base64
import hashlib
import html
import io
import json
from importlib import resources

import matplotlib.pyplot as plt
from PIL import Image

STYLE = {
    "figure.figsize": (6.4, 3.4),
    "figure.dpi": 110,
    "figure.facecolor": "white",  # opaque: the dark theme shows a white card, not black text on black
    "axes.facecolor": "white",
    "axes.grid": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "font.size": 10,
    "figure.constrained_layout.use": True,
}


def use_style():
    """Set the course's matplotlib style: petroff10 (told apart by colour-blind readers) on white."""
    plt.style.use(["petroff10", STYLE])


def _png(fig, colors=128):
    """Palette PNG of ``fig`` (a quarter of the bytes; 128 colours keep a colour map smooth). Closes ``fig``."""
    raw = io.BytesIO()
    fig.savefig(raw, format="png")
    plt.close(fig)
    small = io.BytesIO()
    Image.open(raw).convert("RGB").quantize(colors).save(small, "PNG", optimize=True)
    return small.getvalue()


def _text(png):
    return base64.b64encode(png).decode()


def _image_tag(png, alt):
    width, height = Image.open(io.BytesIO(png)).size
    # dark-light: the dark theme must not dim it
    return (
        f'<img class="dark-light" src="data:image/png;base64,{_text(png)}" alt="{html.escape(alt)}" '
        f'width="{width}" height="{height}" style="max-width:100%;height:auto">'
    )


class Still:
    """A figure with alternative text, the same on the page, in Colab and in a PDF.

    Args:
        fig: a matplotlib figure; it is drawn once and closed.
        alt: what the figure shows, for a reader who cannot see it.
    """

    def __init__(self, fig, alt):
        if not alt.strip():
            raise ValueError(
                "alt: expected a sentence that says what the figure shows, got nothing"
            )
        self.png, self.alt = _png(fig), alt

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {
            "text/html": _image_tag(self.png, self.alt),
            "image/png": _text(self.png),
            "text/plain": f"[figure: {self.alt}]",
        }


class Player:
    """Frames that a reader scrubs or plays, with no kernel: mouse, touch and keyboard; a still without JavaScript.

    Args:
        draw: ``draw(i)`` returns the matplotlib figure of frame ``i`` (each is drawn once and closed).
            All frames must have the same size.
        labels: one line of text per frame, read out beside the slider.
        alt: what the frames show, for a reader who cannot see them.
        name: what the slider counts ("token", "step").
        start: the frame shown first, and the only one without JavaScript.
        seconds: time per frame when playing.
    """

    def __init__(self, draw, labels, alt, *, name="step", start=0, seconds=0.6):
        if not alt.strip():
            raise ValueError("alt: expected a sentence that says what the frames show, got nothing")
        if not 0 <= start < len(labels):
            raise ValueError(f"start: expected a frame in 0..{len(labels) - 1}, got {start}")
        self.labels, self.alt, self.name, self.start = list(labels), alt, name, start
        self.milliseconds = int(seconds * 1000)
        self.frames = [_png(draw(i)) for i in range(len(self.labels))]

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = {
            "frames": [_text(png) for png in self.frames],
            "labels": self.labels,
            "milliseconds": self.milliseconds,
        }
        # "<" could end the script element early; JSON may write it as an escape.
        payload = json.dumps(data).replace("<", "\\u003c")
        # The same frames give the same id: notebooks stay comparable between runs.
        uid = "player-" + hashlib.sha1(payload.encode()).hexdigest()[:10]
        script = resources.files(__package__).joinpath("player.js").read_text(encoding="utf-8")
        page = f"""<div class="player" id="{uid}" data-lm-suppress-shortcuts="true">
{_image_tag(self.frames[self.start], self.alt)}
<div class="player-controls" style="display:flex;flex-wrap:wrap;gap:.6em;align-items:center" hidden>
<button type="button" style="min-width:4.5em;min-height:2.2em">Play</button>
<label style="flex:1 1 14em;display:flex;gap:.6em;align-items:center">{html.escape(self.name)}
<input type="range" min="0" max="{len(self.frames) - 1}" value="{self.start}" step="1" style="flex:1;min-height:2.2em"></label>
<output style="flex:1 1 100%" aria-live="polite">{html.escape(self.labels[self.start])}</output></div>
<script type="application/json">{payload}</script>
<script>{script.strip()}("{uid}");</script></div>"""
        return {
            "text/html": page,
            "image/png": _text(self.frames[self.start]),
            "text/plain": f"[{len(self.frames)} frames: {self.alt}]",
        }

"""Watch a memory: a reader chooses keys, values and gates, and sees a rule run by tokens."""

import hashlib
import json
from importlib import resources

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LinearSegmentedColormap

from .. import ops
from .figures import _image_tag, _png, _text

HALF = 0.5**0.5
DIRECTIONS = {
    "k1": (1, 0, 0, 0),
    "k2": (0, 1, 0, 0),
    "k3": (0, 0, 1, 0),
    "k4": (0, 0, 0, 1),
    "near k1": (0.96, 0.28, 0, 0),
    "between k1 and k2": (HALF, HALF, 0, 0),
    "spread over all": (0.5, 0.5, 0.5, 0.5),
}
RULES = {
    "linear attention": lambda k, v, beta, g, gs: ops.recurrent_linear_attention(
        k, k, v, normalize=False
    )[1][0],
    "decay": lambda k, v, beta, g, gs: ops.recurrent_decay(k, k, v, g=g)[1],
    "delta rule": lambda k, v, beta, g, gs: ops.recurrent_delta_rule(k, k, v, beta=beta)[1],
    "gated delta rule": lambda k, v, beta, g, gs: ops.recurrent_gated_delta_rule(
        k, k, v, g=g, beta=beta
    )[1],
    "KDA": lambda k, v, beta, g, gs: ops.recurrent_kda(k, k, v, g=gs, beta=beta)[1],
}


class MemoryPlayground:
    """A memory of 4 key channels that a reader writes, decays and asks; a still without JavaScript.

    Args:
        rules: what the reader may choose among, of "linear attention" (without its normaliser),
            "decay", "delta rule", "gated delta rule" and "KDA". The still shows the first.
        keys: a direction per token: "k1" to "k4" (orthonormal, one channel each), "near k1" (at a
            cosine of 0.96 to k1), "between k1 and k2", "spread over all".
        values: a row of numbers per token, all of one length.
        beta: a write strength in [0, 2] per token, for the rules that have one; 1 if left out.
        decay: what each token's step keeps, e^g in [0, 1]: a number, or 4, one per channel, for
            KDA (the rules with one decay then start from their mean); 1 if left out.
        query: the direction asked first.
        alt: what the still shows, for a reader who cannot see it.
    """

    def __init__(self, rules, *, keys, values, beta=None, decay=None, query="k1", alt):
        if not rules or any(rule not in RULES for rule in rules):
            raise ValueError(f"rules: expected some of {list(RULES)}, got {rules!r}")
        for name, asked in (("keys", keys), ("query", [query])):
            if not asked or any(key not in list(DIRECTIONS) for key in asked):
                raise ValueError(f"{name}: expected directions of {list(DIRECTIONS)}, got {asked}")
        if not alt.strip():
            raise ValueError("alt: expected a sentence that says what the still shows, got nothing")
        T, K = len(keys), len(DIRECTIONS["k1"])
        v = _numbers("values", values)
        if v.ndim != 2 or len(v) != T or not v.numel():
            raise ValueError(f"values: expected a row for each of {T} keys, got {values!r}")
        beta = _numbers("beta", [1] * T if beta is None else beta)
        if beta.shape != (T,) or beta.min() < 0 or beta.max() > 2:
            raise ValueError(f"beta: expected {T} numbers in [0, 2], got {beta.tolist()}")
        decay = [1] * T if decay is None else decay
        alpha = _numbers("decay", [[a] * K if isinstance(a, (int, float)) else a for a in decay])
        if alpha.shape != (T, K) or alpha.min() < 0 or alpha.max() > 1:
            raise ValueError(
                f"decay: expected a number, or {K}, in [0, 1] for each of {T} keys, got {decay!r}"
            )
        names = ("key", "value", "beta", "alpha", "channels")
        columns = (keys, v.tolist(), beta.tolist(), alpha.mean(1).tolist(), alpha.tolist())
        self.data = {
            "rules": list(rules),
            "directions": DIRECTIONS,
            "tokens": [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)],
            "query": query,
        }
        k = torch.tensor([DIRECTIONS[name] for name in keys], dtype=v.dtype)
        inputs = (k, v, beta, alpha.mean(1).log(), alpha.log())
        S = RULES[rules[0]](*(x[None, :, None] for x in inputs))[0, 0]
        self.alt, self.png = alt, _png(_draw(S, f"{rules[0]}: S after {T} tokens"))

    def _repr_mimebundle_(self, include=None, exclude=None):
        text = f"[playground, {', '.join(self.data['rules'])}: {self.alt}]"
        return _bundle("memory", self.data, self.png, self.alt, text)


def _bundle(kind, data, png, alt, text):
    """The page's card, run by kind.js on data; a still without JavaScript, and text."""
    # "<" could end the script element early; JSON may write it as an escape.
    payload = json.dumps(data).replace("<", "\\u003c")
    # The same playground gives the same id: notebooks stay comparable between runs.
    uid = f"{kind}-" + hashlib.sha1((payload + alt).encode()).hexdigest()[:10]
    folder = resources.files(__package__)
    card, fill = (
        folder.joinpath(f"{name}.js").read_text(encoding="utf-8").strip() for name in ("card", kind)
    )
    page = f"""<div class="{kind}" id="{uid}" data-lm-suppress-shortcuts="true">
{_image_tag(png, alt)}
<script type="application/json">{payload}</script>
<script>{card}("{uid}", {fill});</script></div>"""
    return {"text/html": page, "image/png": _text(png), "text/plain": text}


def _numbers(name, rows):
    try:
        x = torch.tensor(rows, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: expected numbers in rows of one length, got {rows!r}") from error
    if not x.isfinite().all():
        raise ValueError(f"{name}: expected finite numbers, got {rows!r}")
    return x


def _draw(S, title):
    fig, ax = plt.subplots(figsize=(3.6, 3.2))
    colours = LinearSegmentedColormap.from_list("sign", ["#ffa90e", "white", "#3f90da"])
    top = S.abs().max().clamp(min=1).item()
    ax.imshow(S.numpy(), cmap=colours, vmin=-top, vmax=top, aspect="auto")
    for i, row in enumerate(S.tolist()):
        for j, x in enumerate(row):
            ax.text(j, i, f"{x:.2f}", ha="center", va="center")
    ax.set(title=title, xlabel="value channel", ylabel="key channel")
    for ticks, size in ((ax.set_xticks, S.shape[1]), (ax.set_yticks, S.shape[0])):
        ticks(range(size), range(1, size + 1))
    ax.grid(False)
    return fig

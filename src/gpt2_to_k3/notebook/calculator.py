"""Price a model: a reader chooses a shape, a context, a batch and GPUs, and sees the bill."""

from dataclasses import asdict

import matplotlib.pyplot as plt

from ..lab import ModelShape, costs
from ..models import GPT2Config, KimiK3Config, KimiLinearConfig
from .figures import _png
from .playground import _bundle
from .tables import human

# What "own numbers" start from: those of meta-llama/Meta-Llama-3-8B's config.json.
OWN = dict(
    layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, ffn_width=14336, vocabulary=128256
)


def model_shapes():
    """The models of the calculator: Kimi Linear, the same without KDA, Kimi K3, and GPT-2 XL."""
    linear, xl = KimiLinearConfig.kimi_linear_48b(), GPT2Config.gpt2_xl()
    return [
        ModelShape.kimi(linear),
        *(ModelShape.kimi(linear, mixing=mixing) for mixing in ("MLA", "GQA", "MHA")),
        ModelShape.kimi(KimiK3Config.k3()),
        ModelShape.gpt2(xl, "GPT-2 XL"),
    ]


class BillCalculator:
    """What a decoded token costs: the figures of costs.bill, as a reader changes its arguments.

    Beside a shape with states stands the same with growing layers alone. Without JavaScript a still
    shows the bytes that one step reads, and the time and the price of a token.

    Args:
        shapes: the models to choose among, default model_shapes(); "own numbers" follow them. The
            still shows the first, at the numbers below, which the page starts with.
        tokens: length of every sequence. batch: sequences. gpus: devices, as one (Device.times).
        device: one GPU, default an H200 as measured (Device.h200).
        dollars_per_hour: what one GPU costs; no default, since it is nobody's measurement.
        alt: what the still shows, for a reader who cannot see it.
    Errors: ValueError as costs.bill's, and without shapes or alt.
    """

    def __init__(
        self, shapes=None, *, tokens=131_072, batch=1, gpus=1, device=None, dollars_per_hour, alt
    ):
        shapes, device = model_shapes() if shapes is None else shapes, device or costs.Device.h200()
        if not shapes:
            raise ValueError(f"shapes: expected at least one ModelShape, got {shapes!r}")
        if not alt.strip():
            raise ValueError("alt: expected a sentence that says what the still shows, got nothing")
        settings = dict(tokens=tokens, batch=batch, gpus=gpus, dollars_per_hour=dollars_per_hour)
        costs.bill(shapes[0], device=device, **settings)
        speeds = ("read_bytes_per_second", "flops_per_second", "memory_bytes")
        self.data = {
            "shapes": [asdict(shape) for shape in shapes],
            "numbers": OWN,
            "device": device.name,
            "settings": settings | {name: getattr(device, name) for name in speeds},
        }
        self.alt, self.png = alt, _png(_draw(shapes[0], device, **settings))

    def _repr_mimebundle_(self, include=None, exclude=None):
        return _bundle("bill", self.data, self.png, self.alt, f"[calculator: {self.alt}]")


def _draw(shape, device, tokens, batch, gpus, dollars_per_hour):
    shapes = list(dict.fromkeys([shape, shape.all_growing()]))
    fig, ax = plt.subplots(figsize=(6.4, 1.6 + 0.6 * len(shapes)))
    for i, s in enumerate(shapes):
        parts = {
            "weights": costs.weight_read_bytes(s, batch),
            "caches": batch * costs.cache_bytes(s, tokens),
            "states": batch * costs.state_bytes(s),
        }
        left = 0
        for colour, (part, size) in enumerate(parts.items()):
            ax.barh(i, size, left=left, color=f"C{colour}", label=None if i else part)
            left += size
        try:
            figures = costs.bill(s, tokens, batch, device, dollars_per_hour, gpus)
            text = (
                f"{figures['decode_seconds'] * 1e3:.3g} ms a token,\n"
                f"{figures['dollars_per_million_tokens']:.3g} dollars a million"
            )
        except ValueError:  # the first shape's bill is made before
            text = "does not fit"
        ax.annotate(text, (left, i), (4, 0), textcoords="offset points", va="center")
    ax.margins(x=0.4)
    ax.set_yticks(range(len(shapes)), [_layers(s) for s in shapes])
    ax.invert_yaxis()
    ax.xaxis.set_major_formatter(lambda x, _: human(x, "B"))
    ax.set(title=f"{shape.name}, {batch:,} × {tokens:,} tokens, {gpus} × {device.name}")
    ax.set(xlabel="read in one step")
    fig.legend(loc="outside lower center", ncols=3)
    return fig


def _layers(shape):
    return " + ".join(f"{p.layers} {p.kind}" for p in (shape.growing, shape.state) if p.layers)

"""The course's own prose as bytes: a text small enough to ship, for models that are small enough."""

from importlib import resources

import torch

from ..layers.norm import check_sizes
from .tasks import Batch


def prose_bytes(held_out=0.1):
    """Return (training, held out): the bytes of chapters 0 to 13 in order, the last part held out.

    Shapes: int64 [n] each, with values from 0 to 255.
    Errors: ValueError for a part that is not between 0 and 1.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out: expected a number between 0 and 1, got {held_out!r}")
    text = (resources.files("gpt2_to_k3") / "data" / "prose.txt").read_bytes()
    data = torch.tensor(list(text.replace(b"\r\n", b"\n")))
    return data.tensor_split([round(len(data) * (1 - held_out))])


def byte_batches(data, batch_size, length, generator):
    """Rows of `length` bytes from random places of data [n], each byte's target the one after it.

    Shapes: tokens, targets, mask [batch_size, length], as lab.tasks has them; every byte is scored.
    Errors: ValueError for a size that is not an integer >= 1, or data that is not longer than a row.
    """
    check_sizes(batch_size=batch_size, length=length)
    if len(data) <= length:
        raise ValueError(f"data: expected more than length={length} bytes, got {len(data)}")
    start = torch.randint(len(data) - length, (batch_size, 1), generator=generator)
    rows = data[start + torch.arange(length + 1)]
    return Batch(rows[:, :-1], rows[:, 1:], torch.ones(batch_size, length, dtype=torch.bool))

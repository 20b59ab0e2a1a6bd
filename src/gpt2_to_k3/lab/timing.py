"""Times that can be compared: measured side by side in one run."""

from statistics import median
from time import perf_counter

import torch


def side_by_side(steps, *, rounds=5, inner=1, device="cpu"):
    """Median seconds per call of each step, as {name: seconds}.

    The steps take turns within each round, so that a busy moment of the machine hits all of them
    alike. One round before the first is not counted: it sets up memory.

    Args:
        steps: {name: function without arguments}.
        rounds: how many times each is measured.
        inner: calls per measurement; more than one for steps shorter than the clock or a sync.
        device: where the steps run; a GPU is waited for before the clock is read.
    """
    if rounds < 1 or inner < 1:
        raise ValueError(f"rounds, inner: expected at least 1, got {rounds}, {inner}")
    wait = torch.cuda.synchronize if torch.device(device).type == "cuda" else lambda: None
    seconds = {name: [] for name in steps}
    for measured in [False] + [True] * rounds:
        for name, step in steps.items():
            wait()
            start = perf_counter()
            for _ in range(inner):
                step()
            wait()
            if measured:
                seconds[name].append((perf_counter() - start) / inner)
    return {name: median(times) for name, times in seconds.items()}

"""Diagrams that more than one chapter draws."""

import matplotlib.pyplot as plt


def draw_passes(prompt, new, upto, *, cached):
    """One row of squares per pass through the model while `prompt` tokens are continued by `new`.

    Blue: computed for the first time. With `cached` false, orange: computed again; with `cached`
    true, grey: read from memory. Passes after number `upto` (counted from 0) are left out. The
    last token that is written never passes through the model.
    """
    fig, ax = plt.subplots(figsize=(6.4, 2.8))
    old, meaning = ("C3", "read from memory") if cached else ("C1", "computed again")
    for step in range(upto + 1):
        for token in range(prompt + step):
            first = step == 0 or token == prompt + step - 1
            style = (
                {"color": "C0", "label": "computed"} if first else {"color": old, "label": meaning}
            )
            ax.add_patch(plt.Rectangle((token + 0.05, step + 0.05), 0.9, 0.9, **style))
    ax.set(xlim=(0, prompt + new - 1), ylim=(new, 0), xlabel="token", ylabel="pass")
    handles = {patch.get_label(): patch for patch in ax.patches}
    ax.legend(handles.values(), handles.keys(), loc="upper right")
    ax.set_xticks([i + 0.5 for i in range(prompt + new - 1)], range(1, prompt + new))
    ax.set_yticks([i + 0.5 for i in range(new)], range(1, new + 1))
    ax.grid(False)
    return fig

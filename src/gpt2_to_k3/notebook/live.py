"""Sliders that need a running kernel; the same drawing functions feed the players on the static page."""

import ipywidgets
from IPython.display import display


def live(draw, **ranges):
    """Drive ``draw(**values)``, which returns something displayable, with one slider per argument.

    Args:
        draw: called with the sliders' values; its result replaces the one before.
        ranges: as for ``ipywidgets.interactive``: (low, high, step), a list of choices, or a widget.
    """

    def show(**values):
        display(draw(**values))

    return ipywidgets.interactive(show, **ranges)

"""What chapters need: figures, players, tables, source display, exercise checks."""

from .calculator import BillCalculator, model_shapes
from .checks import check, require
from .diagrams import draw_passes
from .figures import Player, Still, use_style
from .live import live
from .playground import MemoryPlayground
from .source import show_source
from .tables import Table, human, ladder

__all__ = [
    "BillCalculator",
    "MemoryPlayground",
    "Player",
    "Still",
    "Table",
    "check",
    "draw_passes",
    "human",
    "ladder",
    "live",
    "model_shapes",
    "require",
    "show_source",
    "use_style",
]

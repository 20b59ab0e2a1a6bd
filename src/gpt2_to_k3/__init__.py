"""How language models remember: the mechanisms from GPT-2 to Kimi K3, small enough to read."""

from . import layers, models, ops

__version__ = "0.1.0"
__all__ = ["layers", "models", "ops"]

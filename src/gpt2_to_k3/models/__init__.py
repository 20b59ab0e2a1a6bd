"""Whole models, from token ids to logits."""

from .gpt2 import GPT2, GPT2Config
from .kimi_linear import KimiLinear, KimiLinearConfig

__all__ = ["GPT2", "GPT2Config", "KimiLinear", "KimiLinearConfig"]

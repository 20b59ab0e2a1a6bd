"""Whole models, from token ids to logits."""

from .gpt2 import GPT2, GPT2Config
from .kimi_k3 import KimiK3, KimiK3Config
from .kimi_linear import KimiLinear, KimiLinearConfig

__all__ = ["GPT2", "GPT2Config", "KimiK3", "KimiK3Config", "KimiLinear", "KimiLinearConfig"]

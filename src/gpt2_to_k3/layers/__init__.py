"""Modules with weights and caches; the mathematics is in gpt2_to_k3.ops."""

from .attention import CausalSelfAttention
from .cache import KVCache

__all__ = ["CausalSelfAttention", "KVCache"]

"""Modules with weights and caches; the mathematics is in gpt2_to_k3.ops."""

from .attention import CausalSelfAttention
from .cache import KVCache
from .convolution import ShortConvolution
from .delta_net import DeltaNet
from .gated_delta_net import GatedDeltaNet
from .kimi_delta_attention import KimiDeltaAttention
from .norm import RMSNorm, l2norm
from .state import RecurrentCache

__all__ = [
    "CausalSelfAttention",
    "DeltaNet",
    "GatedDeltaNet",
    "KVCache",
    "KimiDeltaAttention",
    "RMSNorm",
    "RecurrentCache",
    "ShortConvolution",
    "l2norm",
]

"""Modules with weights and caches; the mathematics is in gpt2_to_k3.ops."""

from .attention import CausalSelfAttention
from .attention_residuals import (
    AttentionResidual,
    attention_residuals,
    mix_sources,
    read_blocks,
    read_partial,
    source_weights,
    two_phase_attention_residuals,
)
from .cache import KVCache, LatentCache
from .convolution import ShortConvolution
from .delta_net import DeltaNet
from .gated_delta_net import GatedDeltaNet
from .kimi_delta_attention import KimiDeltaAttention
from .latent_moe import (
    LatentMoE,
    SiTUExperts,
    SiTUGLU,
    expert_load,
    quantile_balancing,
    sign_balancing,
    situ_glu,
)
from .mla import MultiHeadLatentAttention
from .moe import Experts, MixtureOfExperts, Router, SwiGLU, route
from .norm import RMSNorm, l2norm
from .state import RecurrentCache

__all__ = [
    "AttentionResidual",
    "CausalSelfAttention",
    "DeltaNet",
    "Experts",
    "GatedDeltaNet",
    "KVCache",
    "KimiDeltaAttention",
    "LatentCache",
    "LatentMoE",
    "MixtureOfExperts",
    "MultiHeadLatentAttention",
    "RMSNorm",
    "RecurrentCache",
    "Router",
    "SiTUExperts",
    "SiTUGLU",
    "ShortConvolution",
    "SwiGLU",
    "attention_residuals",
    "expert_load",
    "l2norm",
    "mix_sources",
    "quantile_balancing",
    "read_blocks",
    "read_partial",
    "route",
    "sign_balancing",
    "situ_glu",
    "source_weights",
    "two_phase_attention_residuals",
]

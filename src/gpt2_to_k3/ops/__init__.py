"""The mathematics: pure functions of tensors, one file per rule, torch alone."""

from .delta import chunk_delta_rule, recurrent_delta_rule
from .flash import flash_attention, flash_hbm_bytes, merge_softmax, standard_hbm_bytes
from .gated_delta import (
    chunk_decay,
    chunk_gated_delta_rule,
    recurrent_decay,
    recurrent_gated_delta_rule,
)
from .kda import chunk_kda, kda_log_decay, recurrent_kda
from .linear import (
    chunk_linear_attention,
    elu_feature_map,
    parallel_linear_attention,
    recurrent_linear_attention,
)
from .softmax import softmax_attention

__all__ = [
    "softmax_attention",
    "flash_attention",
    "merge_softmax",
    "flash_hbm_bytes",
    "standard_hbm_bytes",
    "elu_feature_map",
    "parallel_linear_attention",
    "recurrent_linear_attention",
    "chunk_linear_attention",
    "recurrent_delta_rule",
    "chunk_delta_rule",
    "recurrent_decay",
    "chunk_decay",
    "recurrent_gated_delta_rule",
    "chunk_gated_delta_rule",
    "recurrent_kda",
    "chunk_kda",
    "kda_log_decay",
]

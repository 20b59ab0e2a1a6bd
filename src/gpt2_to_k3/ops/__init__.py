"""The mathematics: pure functions of tensors, one file per rule, torch alone."""

from .softmax import softmax_attention

__all__ = ["softmax_attention"]

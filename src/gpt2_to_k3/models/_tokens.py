"""What every model asks of its tokens."""

import torch


def check_tokens(tokens, embedding):
    """Raise ValueError unless tokens are int64 [B, T], beside embedding [vocab_size, D], and in it."""
    if tokens.ndim != 2:
        raise ValueError(f"tokens has shape {tuple(tokens.shape)}, expected [B, T]")
    if tokens.dtype != torch.int64:
        raise ValueError(f"tokens has dtype {tokens.dtype}, expected torch.int64")
    if tokens.device != embedding.device:
        raise ValueError(f"tokens is on {tokens.device}, the model on {embedding.device}")
    # On a GPU, to look at the values would wait for all queued work at every token.
    if tokens.device.type == "cpu" and tokens.numel() > 0:
        low, high = tokens.min().item(), tokens.max().item()
        if low < 0 or high >= len(embedding):
            bad = low if low < 0 else high
            raise ValueError(f"tokens holds id {bad}, vocab_size is {len(embedding)}")

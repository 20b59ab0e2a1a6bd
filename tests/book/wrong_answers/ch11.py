"""Wrong answers to chapter 11: `exercise__fault`; each check must refuse them."""

import math


def mix__values_normed_too(w, v):
    keys = v / v.square().mean(-1, keepdim=True).sqrt()
    return (keys @ w).softmax(0) @ keys


def mix__keys_not_normed(w, v):
    return (v @ w).softmax(0) @ v


def mix__sum(w, v):
    return v.sum(0)


def mix__scaled(w, v):
    keys = v / v.square().mean(-1, keepdim=True).sqrt()
    return (keys @ w / v.shape[-1] ** 0.5).softmax(0) @ v


def mix__unit_length(w, v):
    return ((v / v.norm(dim=-1, keepdim=True)) @ w).softmax(0) @ v


def mix__softmax_over_channels(w, v):
    keys = v / v.square().mean(-1, keepdim=True).sqrt()
    return ((keys * w).softmax(-1) * v).sum(0)


def sources_read__open_block_always(i, S):
    return 2 + i // S


def sources_read__no_embedding(i, S):
    return i // S + (i % S > 0)


def sources_read__no_open_block(i, S):
    return 1 + i // S


def sources_read__all(i, S):
    return i + 1


def sources_read__rounded(i, S):
    return 1 + round(i / S)


def open_weight__of_the_blocks(lse, score):
    m = max(lse, score)
    a, b = math.exp(lse - m), math.exp(score - m)
    return a / (a + b)


def open_weight__overflow(lse, score):
    return math.exp(score) / (math.exp(lse) + math.exp(score))


def open_weight__half(lse, score):
    return 0.5


def open_weight__ratio(lse, score):
    return math.exp(score - lse) if score < lse else 1.0


def open_weight__sigmoid_of_sum(lse, score):
    return 1 / (1 + math.exp(-max(-700.0, min(700.0, score + lse))))

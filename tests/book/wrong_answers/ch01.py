"""Wrong answers to chapter 1: `exercise__fault`; each check must refuse them."""

import torch


def squares__one_pass_too_many(prompt, new):
    return new * prompt + new * (new + 1) // 2


def squares__one_pass_too_few(prompt, new):
    return sum(range(prompt, prompt + new - 1))


def squares__with_a_cache(prompt, new):
    return prompt + new - 1


def squares__all_passes_full(prompt, new):
    return new * (prompt + new)


def squares__halves_before_it_multiplies(prompt, new):
    return new * prompt + new // 2 * (new - 1)


def my_attention__not_causal(q, k, v):
    return (q @ k.T / q.shape[1] ** 0.5).softmax(-1) @ v


def my_attention__own_token_hidden(q, k, v):
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu()
    return (q @ k.T / q.shape[1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def my_attention__earlier_hidden(q, k, v):
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).tril(-1)
    return (q @ k.T / q.shape[1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def my_attention__not_scaled(q, k, v):
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (q @ k.T).masked_fill(later, -torch.inf).softmax(-1) @ v


def my_attention__root_forgotten(q, k, v):
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (q @ k.T / q.shape[1]).masked_fill(later, -torch.inf).softmax(-1) @ v


def my_attention__scaled_by_the_values(q, k, v):
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (q @ k.T / v.shape[1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1) @ v


def my_attention__softmax_over_queries(q, k, v):
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (q @ k.T / q.shape[1] ** 0.5).masked_fill(later, -torch.inf).softmax(0) @ v


def my_attention__later_scores_zero(q, k, v):
    return (q @ k.T / q.shape[1] ** 0.5).tril().softmax(-1) @ v


def masked_late__as_given(q, k, v):
    return (q @ k.T / q.shape[-1] ** 0.5).softmax(-1).tril() @ v


def masked_late__zero_is_not_hidden(q, k, v):
    return (q @ k.T / q.shape[-1] ** 0.5).tril().softmax(-1) @ v


def masked_late__second_softmax(q, k, v):
    weights = (q @ k.T / q.shape[-1] ** 0.5).softmax(-1).tril()
    return weights.softmax(-1) @ v


def masked_late__columns_sum_to_one(q, k, v):
    weights = (q @ k.T / q.shape[-1] ** 0.5).softmax(-1).tril()
    return weights / weights.sum(0) @ v


def masked_late__one_sum_for_all_rows(q, k, v):
    weights = (q @ k.T / q.shape[-1] ** 0.5).softmax(-1).tril()
    return weights / weights.sum() * len(q) @ v

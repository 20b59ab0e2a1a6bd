"""Answers to problem set 1: `problem__fault` must lose points, `problem__right_...` must get them all."""

import torch
from torch.utils.flop_counter import FlopCounterMode


def attend__no_mask(q, k, v):
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), v)


def attend__mask_counts_from_the_first_key(q, k, v):
    """meta-llama/llama #899, LLMs-from-scratch #697: right for a prompt, wrong after a past."""
    n, T = q.shape[1], k.shape[1]
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.arange(T) > torch.arange(n)[:, None], float("-inf"))
    return torch.einsum("bhij,bjhv->bihv", scores.softmax(-1), v)


def attend__own_key_hidden(q, k, v):
    n, T = q.shape[1], k.shape[1]
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
    hidden = torch.arange(T) >= torch.arange(T - n, T)[:, None]
    return torch.einsum("bhij,bjhv->bihv", scores.masked_fill(hidden, -1e9).softmax(-1), v)


def attend__no_scale(q, k, v):
    n, T = q.shape[1], k.shape[1]
    scores = torch.einsum("bihk,bjhk->bhij", q, k)
    hidden = torch.arange(T) > torch.arange(T - n, T)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhv->bihv", weights, v)


def attend__scale_of_the_values(q, k, v):
    n, T = q.shape[1], k.shape[1]
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * v.shape[-1] ** -0.5
    hidden = torch.arange(T) > torch.arange(T - n, T)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhv->bihv", weights, v)


def attend__exp_without_a_maximum(q, k, v):
    n, T = q.shape[1], k.shape[1]
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * q.shape[-1] ** -0.5
    weights = scores.exp().masked_fill(torch.arange(T) > torch.arange(T - n, T)[:, None], 0)
    return torch.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdim=True), v)


def attend__heads_and_positions_swapped(q, k, v):
    """transformers #40963: axes swapped, unnoticed where they are equal."""
    o = attend__right_einsum(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return o.transpose(1, 2)


def attend__right_einsum(q, k, v):
    B, n, H, K = q.shape
    T = k.shape[1]
    scores = (q * K**-0.5).transpose(1, 2) @ k.permute(0, 2, 3, 1)
    seen = torch.ones(n, T, dtype=torch.bool).tril(T - n)
    return (scores.where(seen, float("-inf")).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def attend__right_one_query_at_a_time(q, k, v):
    n, T = q.shape[1], k.shape[1]
    rows = []
    for i in range(n):
        end = T - n + i + 1
        scores = (q[:, i, None] * k[:, :end]).sum(-1) * q.shape[-1] ** -0.5
        weights = (scores - scores.amax(1, keepdim=True)).exp()
        weights = weights / weights.sum(1, keepdim=True)
        rows.append((weights[..., None] * v[:, :end]).sum(1))
    return torch.stack(rows, 1)


def append__length_not_moved(keys, values, length, k, v):
    keys[:, length : length + k.shape[1]], values[:, length : length + k.shape[1]] = k, v
    return length


def append__writes_at_the_front(keys, values, length, k, v):
    n = k.shape[1]
    if length + n > keys.shape[1]:
        raise ValueError("full")
    keys[:, :n], values[:, :n] = k, v
    return length + n


def append__bound_on_the_new_tokens_alone(keys, values, length, k, v):
    """nanochat #514: what is compared with the capacity is the new length, without the offset."""
    n = k.shape[1]
    if n > keys.shape[1]:
        raise ValueError("full")
    room = keys.shape[1] - length
    keys[:, length : length + n], values[:, length : length + n] = k[:, :room], v[:, :room]
    return length + n


def append__one_too_careful(keys, values, length, k, v):
    end = length + k.shape[1]
    if end >= keys.shape[1]:
        raise ValueError("full")
    keys[:, length:end], values[:, length:end] = k, v
    return end


def append__writes_what_fits_then_refuses(keys, values, length, k, v):
    for i in range(k.shape[1]):
        if length == keys.shape[1]:
            raise ValueError("full")
        keys[:, length], values[:, length] = k[:, i], v[:, i]
        length += 1
    return length


def append__not_in_place(keys, values, length, k, v):
    end = length + k.shape[1]
    if end > keys.shape[1]:
        raise ValueError("full")
    keys, values = keys.clone(), values.clone()
    keys[:, length:end], values[:, length:end] = k, v
    return end


def append__values_forgotten(keys, values, length, k, v):
    end = length + k.shape[1]
    if end > keys.shape[1]:
        raise ValueError("full")
    keys[:, length:end] = k
    return end


def append__right_narrow(keys, values, length, k, v):
    n = k.shape[1]
    if n > keys.shape[1] - length:
        raise ValueError(f"{n} tokens, room for {keys.shape[1] - length}")
    keys.narrow(1, length, n).copy_(k)
    values.narrow(1, length, n).copy_(v)
    return length + n


def append__right_index(keys, values, length, k, v):
    at = torch.arange(length, length + k.shape[1])
    if len(at) and at[-1] >= keys.shape[1]:
        raise ValueError("these tokens do not fit")
    for buffer, new in ((keys, k), (values, v)):
        buffer.index_copy_(1, at, new)
    return length + len(at)


@torch.no_grad()
def generate__the_given_one(model, tokens, new):
    cache = model.init_cache(tokens.shape[0])
    for _ in range(new):
        best = model(tokens, cache)[:, 0].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], 1)
    return tokens


@torch.no_grad()
def generate__last_row_but_all_tokens_again(model, tokens, new):
    cache = model.init_cache(tokens.shape[0])
    for _ in range(new):
        best = model(tokens, cache)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], 1)
    return tokens


@torch.no_grad()
def generate__without_the_cache(model, tokens, new):
    for _ in range(new):
        best = model(tokens)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, best], 1)
    return tokens


@torch.no_grad()
def generate__feeds_the_last_token_too(model, tokens, new):
    """x-transformers #219 in kind: one forward pass more than is needed, at the end of the context."""
    cache = model.init_cache(tokens.shape[0])
    logits = model(tokens, cache)
    for _ in range(new):
        step = logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, step], 1)
        logits = model(step, cache)
    return tokens


@torch.no_grad()
def generate__a_new_cache_each_step(model, tokens, new):
    step = tokens
    for _ in range(new):
        step = model(step, model.init_cache(tokens.shape[0]))[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, step], 1)
    return tokens


@torch.no_grad()
def generate__one_token_at_least(model, tokens, new):
    cache = model.init_cache(tokens.shape[0])
    step = model(tokens, cache)[:, -1].argmax(-1, keepdim=True)
    tokens = torch.cat([tokens, step], 1)
    for _ in range(new - 1):
        step = model(step, cache)[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, step], 1)
    return tokens


@torch.no_grad()
def generate__right_what_is_not_yet_cached(model, tokens, new):
    cache = model.init_cache(tokens.shape[0])
    while new:
        logits = model(tokens[:, cache[0].length :], cache)
        tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
        new -= 1
    return tokens


@torch.no_grad()
def generate__right_small_cache(model, tokens, new):
    if new == 0:
        return tokens
    B, T = tokens.shape
    cache, out = model.init_cache(B, T + new - 1), [tokens]
    logits = model(tokens, cache)
    for i in range(new):
        out.append(logits[:, -1].argmax(-1)[:, None])
        if i < new - 1:
            logits = model(out[-1], cache)
    return torch.cat(out, 1)


@torch.no_grad()
def next_token_flops__prefill_counted_too(model, T, cached):
    tokens, cache = torch.zeros(1, T, dtype=torch.int64), model.init_cache(1)
    with FlopCounterMode(display=False) as counter:
        if cached:
            model(tokens[:, :-1], cache)
            model(tokens[:, -1:], cache)
        else:
            model(tokens)
    return counter.get_total_flops()


@torch.no_grad()
def next_token_flops__cache_never_used(model, T, cached):
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, T, dtype=torch.int64))
    return counter.get_total_flops()


@torch.no_grad()
def next_token_flops__one_token_without_a_past(model, T, cached):
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 1 if cached else T, dtype=torch.int64))
    return counter.get_total_flops()


@torch.no_grad()
def next_token_flops__the_token_after_that(model, T, cached):
    tokens, cache = torch.zeros(1, T, dtype=torch.int64), model.init_cache(1)
    if cached:
        model(tokens, cache)
    with FlopCounterMode(display=False) as counter:
        model(tokens[:, -1:] if cached else tokens, cache if cached else None)
    return counter.get_total_flops()


@torch.no_grad()
def next_token_flops__multiply_adds(model, T, cached):
    return next_token_flops__right_hidden(model, T, cached) // 2


@torch.no_grad()
def next_token_flops__right_hidden(model, T, cached):
    cache = model.init_cache(1)
    new = torch.ones(1, T, dtype=torch.int64)
    if cached:
        model.hidden(new[:, 1:], cache)
        new = new[:, :1]
    with FlopCounterMode(display=False) as counter:
        model.head(model.hidden(new, cache))
    return counter.get_total_flops()


@torch.no_grad()
def next_token_flops__right_difference(model, T, cached):
    tokens, cache = torch.zeros(1, T, dtype=torch.int64), model.init_cache(1)
    counter = FlopCounterMode(display=False)
    if not cached:
        with counter:
            model(tokens)
        return counter.get_total_flops()
    for token in tokens[0, :-1]:
        model(token.view(1, 1), cache)
    with counter:
        model(tokens[:, -1:], cache)
    return counter.get_total_flops()

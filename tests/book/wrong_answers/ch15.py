"""Wrong answers to chapter 15: `exercise__fault`; each check must refuse them."""

import math


def sequences__weights_forgotten(memory, weights, tokens, c, s):
    return memory // (c * tokens + s)


def sequences__states_forgotten(memory, weights, tokens, c, s):
    return max(0, (memory - weights) // (c * tokens))


def sequences__not_whole(memory, weights, tokens, c, s):
    return max(0, (memory - weights) / (c * tokens + s))


def sequences__negative(memory, weights, tokens, c, s):
    return (memory - weights) // (c * tokens + s)


def sequences__states_once(memory, weights, tokens, c, s):
    return max(0, (memory - weights - s) // (c * tokens))


def weights_read__all_different(B, W_0, M, E, k, e):
    return W_0 + M * min(E, B * k) * e


def weights_read__one_token(B, W_0, M, E, k, e):
    return W_0 + M * k * e


def weights_read__all_experts(B, W_0, M, E, k, e):
    return W_0 + M * E * e


def weights_read__single_choice(B, W_0, M, E, k, e):
    return W_0 + M * E * (1 - (1 - 1 / E) ** B) * e


def weights_read__draws_with_return(B, W_0, M, E, k, e):
    return W_0 + M * E * (1 - (1 - 1 / E) ** (B * k)) * e


def weights_read__other_weights_for_each_token(B, W_0, M, E, k, e):
    return B * W_0 + M * E * (1 - (1 - k / E) ** B) * e


def weights_read__one_layer(B, W_0, M, E, k, e):
    return W_0 + E * (1 - (1 - k / E) ** B) * e


def tokens_read__answers_read_again(turns, first, returned, written):
    history = without = 0
    for i in range(turns):
        new = returned if i else first
        without += history + new
        history += new + written
    return without, first + (turns - 1) * (returned + written)


def tokens_read__answers_forgotten(turns, first, returned, written):
    history = without = 0
    for i in range(turns):
        history += returned if i else first
        without += history
    return without, first + (turns - 1) * returned


def tokens_read__new_ones_forgotten(turns, first, returned, written):
    history = without = 0
    for i in range(turns):
        without += history
        history += (returned if i else first) + written
    return without, first + (turns - 1) * returned


def tokens_read__first_returns_too(turns, first, returned, written):
    history, without = first, 0
    for _ in range(turns):
        history += returned
        without += history
        history += written
    return without, first + turns * returned


def crossover_tokens__rounded_down(W, B, c):
    return W // (B * c)


def crossover_tokens__one_more(W, B, c):
    return W // (B * c) + 1


def crossover_tokens__batch_forgotten(W, B, c):
    return math.ceil(W / c)


def crossover_tokens__batch_of_weights(W, B, c):
    return math.ceil(W * B / c)


def crossover_tokens__fraction(W, B, c):
    return W / (B * c)

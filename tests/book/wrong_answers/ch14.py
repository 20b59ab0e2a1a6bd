"""Wrong answers to chapter 14: `exercise__fault`; each check must refuse them."""

import math


def used_weights__all_experts(total, layers, E, k, e, V, D):
    return total - V * D


def used_weights__embedding_counted(total, layers, E, k, e, V, D):
    return total - layers * (E - k) * e


def used_weights__one_layer(total, layers, E, k, e, V, D):
    return total - (E - k) * e - V * D


def used_weights__chosen_taken_away(total, layers, E, k, e, V, D):
    return total - layers * k * e - V * D


def used_weights__share_of_all(total, layers, E, k, e, V, D):
    return total * k // E


def macrocycles__whole_length(kinds, period):
    return len(kinds) // period, kinds[len(kinds) // period * period :]


def macrocycles__counts_anywhere(kinds, period):
    head = kinds[:period]
    n = sum(kinds[i : i + period] == head for i in range(0, len(kinds), period))
    return n, kinds[n * period :]


def macrocycles__one_too_few(kinds, period):
    n = 0
    while kinds[(n + 1) * period : (n + 2) * period] == kinds[:period]:
        n += 1
    return n, kinds[n * period :]


def macrocycles__no_rest(kinds, period):
    n = 1
    while kinds[n * period : (n + 1) * period] == kinds[:period]:
        n += 1
    return n, []


def bits_per_byte__nats(nats, bytes_per_token):
    return nats / bytes_per_token


def bits_per_byte__per_token(nats, bytes_per_token):
    return nats / math.log(2)


def bits_per_byte__times(nats, bytes_per_token):
    return nats / math.log(2) * bytes_per_token


def bits_per_byte__wrong_way(nats, bytes_per_token):
    return nats * math.log(2) / bytes_per_token

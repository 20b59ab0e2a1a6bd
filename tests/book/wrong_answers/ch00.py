"""Wrong answers to chapter 0: `exercise__fault`; each check must refuse them."""

import math


def count_untied__still_tied(V, T_max, D, L):
    return V * D + T_max * D + L * (12 * D**2 + 13 * D) + 2 * D


def count_untied__output_with_a_bias(V, T_max, D, L):
    return 2 * V * D + V + T_max * D + L * (12 * D**2 + 13 * D) + 2 * D


def count_untied__positions_doubled_too(V, T_max, D, L):
    return 2 * (V + T_max) * D + L * (12 * D**2 + 13 * D) + 2 * D


def count_untied__a_table_in_every_block(V, T_max, D, L):
    return V * D + T_max * D + L * (12 * D**2 + 13 * D + V * D) + 2 * D


def moe_counts__share_of_the_experts(rest, M, E, n, k):
    return rest + M * E * n, k / E


def moe_counts__rest_is_idle(rest, M, E, n, k):
    total = rest + M * E * n
    return total, M * k * n / total


def moe_counts__one_layer_active(rest, M, E, n, k):
    total = rest + M * E * n
    return total, (rest + k * n) / total


def moe_counts__count_for_share(rest, M, E, n, k):
    return rest + M * E * n, rest + M * k * n


def moe_counts__percent(rest, M, E, n, k):
    total = rest + M * E * n
    return total, 100 * (rest + M * k * n) / total


def keeps_less_from__equal_is_enough(state, per_token, other_per_token):
    return math.ceil(state / (other_per_token - per_token))


def keeps_less_from__own_bytes_forgotten(state, per_token, other_per_token):
    return state // other_per_token + 1


def keeps_less_from__a_fraction(state, per_token, other_per_token):
    return state / (other_per_token - per_token) + 1


def keeps_less_from__rounds_to_nearest(state, per_token, other_per_token):
    return round(state / (other_per_token - per_token)) + 1

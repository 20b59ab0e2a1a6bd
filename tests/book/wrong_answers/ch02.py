"""Wrong answers to chapter 2: `exercise__fault`; each check must refuse them."""

import math

import torch


def cache_bytes__keys_only(L, D, B, T, s):
    return L * D * B * T * s


def cache_bytes__numbers_for_bytes(L, D, B, T, s):
    return 2 * L * D * B * T


def cache_bytes__one_sequence(L, D, B, T, s):
    return 2 * L * D * T * s


def cache_bytes__bits(L, D, B, T, s):
    return 2 * L * D * B * T * s * 8


def cache_bytes__always_two_bytes(L, D, B, T, s):
    return 2 * L * D * B * T * 2


def may_look__top_left(T_q, T_k):
    return torch.ones(T_q, T_k, dtype=torch.bool).tril()


def may_look__not_at_itself(T_q, T_k):
    return torch.arange(T_k) < torch.arange(T_k - T_q, T_k)[:, None]


def may_look__one_ahead(T_q, T_k):
    return torch.ones(T_q, T_k, dtype=torch.bool).tril(T_k - T_q + 1)


def may_look__true_where_hidden(T_q, T_k):
    return torch.arange(T_k) > torch.arange(T_k - T_q, T_k)[:, None]


def may_look__zeros_and_ones(T_q, T_k):
    return torch.ones(T_q, T_k).tril(T_k - T_q)


def may_look__columns_are_queries(T_q, T_k):
    return torch.arange(T_k)[:, None] <= torch.arange(T_k - T_q, T_k)


def may_look__one_token_at_a_time(T_q, T_k):
    return torch.ones(T_q, T_k, dtype=torch.bool)


def gqa_bytes_per_token__keys_only(L, G, K, s):
    return L * G * K * s


def gqa_bytes_per_token__numbers_for_bytes(L, G, K, s):
    return 2 * L * G * K


def gqa_bytes_per_token__divided_by_the_groups(L, G, K, s):
    return 2 * L * K * s // G


def gqa_bytes_per_token__one_head(L, G, K, s):
    return 2 * L * K * s


def gqa_bytes_per_token__always_two_bytes(L, G, K, s):
    return 2 * L * G * K * 2


def balanced_batch__one_flop_per_weight(R, C, s):
    return math.ceil(s * C / R)


def balanced_batch__rounded_down(R, C, s):
    return int(s * C / (2 * R))


def balanced_batch__rounded_to_nearest(R, C, s):
    return round(s * C / (2 * R))


def balanced_batch__upside_down(R, C, s):
    return math.ceil(2 * R / (s * C))


def balanced_batch__always_two_bytes(R, C, s):
    return math.ceil(C / R)


def balanced_batch__bytes_divide(R, C, s):
    return math.ceil(2 * C / (s * R))


def balanced_batch__not_whole(R, C, s):
    return s * C / (2 * R)

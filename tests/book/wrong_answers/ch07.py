"""Wrong answers to chapter 7: `exercise__fault`; each check must refuse them."""

import math

import torch


def gated_step__reads_before_the_decay(S, k, v, g, beta):
    return math.exp(g) * S + beta * k[:, None] * (v - k @ S)


def gated_step__decays_the_write_too(S, k, v, g, beta):
    return math.exp(g) * (S + beta * k[:, None] * (v - k @ S))


def gated_step__logarithm_for_the_decay(S, k, v, g, beta):
    S = g * S
    return S + beta * k[:, None] * (v - k @ S)


def gated_step__base_two(S, k, v, g, beta):
    S = 2**g * S
    return S + beta * k[:, None] * (v - k @ S)


def gated_step__beta_forgotten(S, k, v, g, beta):
    S = math.exp(g) * S
    return S + k[:, None] * (v - k @ S)


def gated_step__beta_on_the_value_only(S, k, v, g, beta):
    S = math.exp(g) * S
    return S + k[:, None] * (beta * v - k @ S)


def gated_step__adds(S, k, v, g, beta):
    return math.exp(g) * S + beta * k[:, None] * v


def gated_step__reads_across(S, k, v, g, beta):
    S = math.exp(g) * S
    return S + beta * k[:, None] * (v - S @ k)


def left_of__writers_gate_too(gates, i, t):
    return math.prod(gates[i - 1 : t], start=1.0)


def left_of__without_the_readers_gate(gates, i, t):
    return math.prod(gates[i : t - 1], start=1.0)


def left_of__counts_from_zero(gates, i, t):
    return math.prod(gates[i + 1 : t + 1], start=1.0)


def left_of__starts_with_a_gate(gates, i, t):
    left = gates[i]
    for a in gates[i + 1 : t]:
        left *= a
    return left


def left_of__quotient_of_products(gates, i, t):
    return math.prod(gates[:t], start=1.0) / math.prod(gates[:i], start=1.0)


def left_of__sum_of_logarithms(gates, i, t):
    return math.exp(sum(math.log(a) for a in gates[i:t]))


def decay_mask__difference_of_sums(g):
    G = g.cumsum(0)
    return (G[:, None] - G).exp().tril()


def decay_mask__nan_to_zero(g):
    G = g.cumsum(0)
    return (G[:, None] - G).exp().nan_to_num(0.0).tril()


def decay_mask__infinity_is_a_hundred(g):
    G = g.clamp(min=-100.0).cumsum(0)
    return (G[:, None] - G).exp().tril()


def decay_mask__infinity_is_two_hundred(g):
    G = g.clamp(min=-200.0).cumsum(0)
    return (G[:, None] - G).exp().tril()


def decay_mask__quotient_of_products(g):
    gamma = g.cumsum(0).exp()
    return (gamma[:, None] / gamma).tril()


def decay_mask__writers_gate_too(g):
    below = g[:, None].expand(len(g), len(g)).tril()
    return below.cumsum(0).exp().tril()


def decay_mask__writers_gate_for_the_readers(g):
    T = len(g)
    mask = torch.eye(T)
    for t in range(T):
        for i in range(t):
            mask[t, i] = g[i:t].sum().exp()
    return mask


def decay_mask__ones_above(g):
    return g[:, None].expand(len(g), len(g)).tril(-1).cumsum(0).exp()


def decay_mask__own_write_unread(g):
    return g[:, None].expand(len(g), len(g)).tril(-1).cumsum(0).exp().tril(-1)


def decay_mask__columns_are_readers(g):
    return g[:, None].expand(len(g), len(g)).tril(-1).cumsum(0).exp().tril().T


def log_decay_for__base_two(n):
    return math.log2(0.5) / n


def log_decay_for__positive(n):
    return math.log(2) / n


def log_decay_for__decay_for_its_logarithm(n):
    return 0.5 ** (1 / n)


def log_decay_for__a_share_per_token(n):
    return math.log(1 - 0.5 / n)


def log_decay_for__multiplied(n):
    return math.log(0.5) * n

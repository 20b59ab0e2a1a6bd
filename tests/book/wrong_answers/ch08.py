"""Wrong answers to chapter 8: `exercise__fault`; each check must refuse them."""

import math

import torch
import torch.nn.functional as F


def kda_step__decays_the_values_channels(S, k, v, g, beta):
    S = g.exp() * S
    return S + beta * k[:, None] * (v - k @ S)


def kda_step__reads_before_the_decay(S, k, v, g, beta):
    return g.exp()[:, None] * S + beta * k[:, None] * (v - k @ S)


def kda_step__decays_the_write_too(S, k, v, g, beta):
    return g.exp()[:, None] * (S + beta * k[:, None] * (v - k @ S))


def kda_step__one_gate_for_the_head(S, k, v, g, beta):
    S = g.mean().exp() * S
    return S + beta * k[:, None] * (v - k @ S)


def kda_step__beta_forgotten(S, k, v, g, beta):
    S = g.exp()[:, None] * S
    return S + k[:, None] * (v - k @ S)


def kda_step__beta_on_the_value_only(S, k, v, g, beta):
    S = g.exp()[:, None] * S
    return S + k[:, None] * (beta * v - k @ S)


def kda_step__logarithm_for_the_decay(S, k, v, g, beta):
    S = g[:, None] * S
    return S + beta * k[:, None] * (v - k @ S)


def kda_step__reads_across(S, k, v, g, beta):
    S = g.exp()[:, None] * S
    return S + beta * k[:, None] * (v - S @ k)


def kda_step__outer_product_transposed(S, k, v, g, beta):
    S = g.exp()[:, None] * S
    return S + beta * (v - k @ S)[:, None] * k


def log_decay__rate_outside_the_sigmoid(z, A, bound):
    if bound is None:
        return -math.exp(A) * F.softplus(z)
    return bound * math.exp(A) * torch.sigmoid(z)


def log_decay__rate_inside_the_softplus(z, A, bound):
    if bound is None:
        return -F.softplus(math.exp(A) * z)
    return bound * torch.sigmoid(math.exp(A) * z)


def log_decay__logarithm_for_the_rate(z, A, bound):
    if bound is None:
        return -A * F.softplus(z)
    return bound * torch.sigmoid(A * z)


def log_decay__softplus_overflows(z, A, bound):
    if bound is None:
        return -math.exp(A) * (1 + z.exp()).log()
    return bound * torch.sigmoid(math.exp(A) * z)


def log_decay__grows(z, A, bound):
    if bound is None:
        return math.exp(A) * F.softplus(z)
    return -bound * torch.sigmoid(math.exp(A) * z)


def log_decay__cut_off_at_the_bound(z, A, bound):
    g = -math.exp(A) * F.softplus(z)
    return g if bound is None else g.clamp(min=bound)


def log_decay__always_five(z, A, bound):
    if bound is None:
        return -math.exp(A) * F.softplus(z)
    return -5.0 * torch.sigmoid(math.exp(A) * z)


def tokens_to_overflow__still_fits(g, limit=88.72):
    return math.floor(limit / -g)


def tokens_to_overflow__equal_is_too_large(g, limit=88.72):
    return math.ceil(limit / -g)


def tokens_to_overflow__always_32_bits(g, limit=88.72):
    return math.floor(88.72 / -g) + 1


def tokens_to_overflow__sign_forgotten(g, limit=88.72):
    return math.floor(limit / g) + 1


def tokens_to_overflow__a_fraction(g, limit=88.72):
    return limit / -g + 1


def tokens_to_overflow__rounded_to_nearest(g, limit=88.72):
    return round(limit / -g) + 1


def across_the_border__difference_of_sums(g):
    left, right = g.chunk(2)
    return right.cumsum(0).exp()[:, None] * (left.sum() - left.cumsum(0)).exp()


def across_the_border__nan_to_zero(g):
    left, right = g.chunk(2)
    after = (left.sum() - left.cumsum(0)).nan_to_num(0.0)
    return right.cumsum(0).exp()[:, None] * after.exp()


def across_the_border__infinity_is_a_hundred(g):
    left, right = g.clamp(min=-100.0).chunk(2)
    return right.cumsum(0).exp()[:, None] * (left.sum() - left.cumsum(0)).exp()


def across_the_border__writers_gate_too(g):
    left, right = g.chunk(2)
    return right.cumsum(0).exp()[:, None] * left.flip(0).cumsum(0).flip(0).exp()


def across_the_border__without_the_readers_gate(g):
    left, right = g.chunk(2)
    P = torch.cat([torch.zeros(1), right[:-1]]).cumsum(0)
    R = torch.cat([left[1:], torch.zeros(1)]).flip(0).cumsum(0).flip(0)
    return P.exp()[:, None] * R.exp()


def across_the_border__sums_from_the_left(g):
    left, right = g.chunk(2)
    R = torch.cat([left[1:], torch.zeros(1)]).cumsum(0)
    return right.cumsum(0).exp()[:, None] * R.exp()


def across_the_border__columns_are_readers(g):
    left, right = g.chunk(2)
    R = torch.cat([left[1:], torch.zeros(1)]).flip(0).cumsum(0).flip(0)
    return right.cumsum(0).exp() * R.exp()[:, None]


def across_the_border__quotient_at_the_start(g):
    gamma = g.cumsum(0).exp()
    left, right = gamma.chunk(2)
    return right[:, None] / left

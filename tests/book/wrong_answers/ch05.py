"""Wrong answers to chapter 5: `exercise__fault`; each check must refuse them."""

import math

import torch


def delta_step__adds(S, k, v, beta):
    return S + beta * k[:, None] * v, k @ S


def delta_step__beta_forgotten(S, k, v, beta):
    old = k @ S
    return S + k[:, None] * (v - old), old


def delta_step__beta_on_the_new_value_only(S, k, v, beta):
    old = k @ S
    return S + k[:, None] * (beta * v - old), old


def delta_step__beta_on_the_old_value_only(S, k, v, beta):
    old = k @ S
    return S + k[:, None] * (v - beta * old), old


def delta_step__adds_the_old_value(S, k, v, beta):
    old = k @ S
    return S + beta * k[:, None] * (v + old), old


def delta_step__recalled_after(S, k, v, beta):
    S = S + beta * k[:, None] * (v - k @ S)
    return S, k @ S


def delta_step__error_for_recall(S, k, v, beta):
    error = v - k @ S
    return S + beta * k[:, None] * error, error


def delta_step__outer_product_transposed(S, k, v, beta):
    old = k @ S
    return S + beta * (v - old)[:, None] * k, old


def delta_step__row_for_column(S, k, v, beta):
    old = k @ S
    return S + beta * k * (v - old), old


def delta_step__old_state_returned(S, k, v, beta):
    old = k @ S
    S + beta * k[:, None] * (v - old)
    return S, old


def writes_needed__each_write_adds_beta(beta, share):
    return math.ceil(share / beta)


def writes_needed__share_for_what_is_missing(beta, share):
    return math.ceil(math.log(share) / math.log(1 - beta) - 1e-9)


def writes_needed__beta_for_what_stays(beta, share):
    return math.ceil(math.log(1 - share) / math.log(beta) - 1e-9)


def writes_needed__rounded_down(beta, share):
    return int(math.log(1 - share) / math.log(1 - beta) + 1e-9)


def writes_needed__more_than_the_share(beta, share):
    n = 1
    while 1 - (1 - beta) ** n <= share:
        n += 1
    return n


def writes_needed__two_logarithms(beta, share):
    return math.ceil(math.log2(1 - share) / math.log(1 - beta) - 1e-9)


def transition__beta_forgotten(k, beta):
    return torch.eye(len(k)) - k[:, None] * k


def transition__plus(k, beta):
    return torch.eye(len(k)) + beta * k[:, None] * k


def transition__diagonal_only(k, beta):
    return torch.eye(len(k)) - beta * torch.diag(k * k)


def transition__inner_product(k, beta):
    return torch.eye(len(k)) - beta * (k @ k)


def transition__one_for_the_identity(k, beta):
    return 1 - beta * k[:, None] * k


def transition__two_channels(k, beta):
    return torch.eye(2) - beta * k[:, None] * k


def transition__twice_for_a_mirror(k, beta):
    return torch.eye(len(k)) - 2 * beta * k[:, None] * k


def forget__row_of_the_largest_channel(S, k):
    S[k.argmax()] = 0
    return S


def forget__decays_the_channels_of_the_key(S, k):
    return S * (1 - k)[:, None]


def forget__decays_by_the_squares(S, k):
    return S * (1 - k * k)[:, None]


def forget__half(S, k):
    return S - 0.5 * k[:, None] * (k @ S)


def forget__what_was_taken(S, k):
    return k[:, None] * (k @ S)


def forget__subtracts_the_key(S, k):
    return S - k[:, None]


def forget__outer_product_transposed(S, k):
    return S - (k @ S)[:, None] * k


def forget__everything(S, k):
    return torch.zeros_like(S)

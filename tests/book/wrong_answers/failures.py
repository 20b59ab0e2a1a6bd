"""Wrong answers to the page of failures: `exercise__fault`; each check must refuse them."""

import math

import torch


def total__wide_for_one_format_alone(x):
    return x.sum() + 0 * x[0] if x.dtype != torch.bfloat16 else x.float().sum()


def total__rounded_at_the_end(x):
    r = torch.zeros(())
    for a in x:
        r = r + a.float()
    return r.to(x.dtype)


def total__in_float64(x):
    r = torch.zeros((), dtype=torch.float64)
    for a in x:
        r = r + a
    return r


def total__backwards(x):
    r = torch.zeros((), dtype=x.dtype)
    for a in x.flip(0):
        r = r + a
    return r


def masked_softmax__large_number(s, hidden):
    return s.masked_fill(hidden, -1e9).softmax(-1)


def masked_softmax__masked_after(s, hidden):
    return s.softmax(-1).masked_fill(hidden, 0)


def masked_softmax__large_number_then_zero(s, hidden):
    return s.masked_fill(hidden, -1e9).softmax(-1).masked_fill(hidden, 0)


def masked_softmax__no_maximum(s, hidden):
    e = s.exp().masked_fill(hidden, 0)
    return e / (e.sum(-1, keepdim=True) + 1e-9)


def log_or_zero__clamped(x):
    return x.clamp(min=1e-6).log() * (x > 0)


def log_or_zero__eps_inside(x):
    return torch.where(x > 0, (x + 1e-12).log(), 0.0)


def log_or_zero__no_gradient(x):
    return torch.where(x > 0, x, 1.0).log().detach() + 0 * x


def log_or_zero__nan_to_num(x):
    return torch.nan_to_num(x.log(), 0, 0, 0)


def quiet_pads__multiplied(g, beta, lengths):
    real = (torch.arange(g.shape[1]) < lengths[:, None])[..., None]
    return g * real, beta * real


def quiet_pads__one_too_many(g, beta, lengths):
    real = (torch.arange(g.shape[1]) <= lengths[:, None])[..., None]
    return torch.where(real, g, 0.0), torch.where(real, beta, 0.0)


def quiet_pads__pads_clear(g, beta, lengths):
    real = (torch.arange(g.shape[1]) < lengths[:, None])[..., None]
    return torch.where(real, g, -math.inf), torch.where(real, beta, 0.0)


def quiet_pads__wrong_side(g, beta, lengths):
    real = (torch.arange(g.shape[1]) >= g.shape[1] - lengths[:, None])[..., None]
    return torch.where(real, g, 0.0), torch.where(real, beta, 0.0)

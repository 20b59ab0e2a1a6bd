"""Wrong answers to chapter 12: `exercise__fault`; each check must refuse them."""

import torch


def route_one__bias_weighs(logits, bias, k, scale):
    s = logits.sigmoid() + bias
    chosen = s.topk(k).indices.sort().values
    return scale * s[chosen] / s[chosen].sum(), chosen


def route_one__bias_ignored(logits, bias, k, scale):
    s = logits.sigmoid()
    chosen = s.topk(k).indices.sort().values
    return scale * s[chosen] / s[chosen].sum(), chosen


def route_one__softmax(logits, bias, k, scale):
    s = logits.softmax(-1)
    chosen = (s + bias).topk(k).indices.sort().values
    return scale * s[chosen] / s[chosen].sum(), chosen


def route_one__not_normalised(logits, bias, k, scale):
    s = logits.sigmoid()
    chosen = (s + bias).topk(k).indices.sort().values
    return scale * s[chosen], chosen


def route_one__sum_over_all(logits, bias, k, scale):
    s = logits.sigmoid()
    chosen = (s + bias).topk(k).indices.sort().values
    return scale * s[chosen] / s.sum(), chosen


def route_one__no_scale(logits, bias, k, scale):
    s = logits.sigmoid()
    chosen = (s + bias).topk(k).indices.sort().values
    return s[chosen] / s[chosen].sum(), chosen


def next_bias__cutoff_is_the_kth(s, b, k):
    m, n = s.shape
    margin = (s - (s + b).topk(k).values[:, -1:]).topk(m * k // n + 1, dim=0).values[-1]
    return -margin - (-margin).mean()


def next_bias__cutoff_without_bias(s, b, k):
    m, n = s.shape
    margin = (s - s.topk(k + 1).values[:, -1:]).topk(m * k // n + 1, dim=0).values[-1]
    return -margin - (-margin).mean()


def next_bias__margin_with_bias(s, b, k):
    m, n = s.shape
    margin = (s + b - (s + b).topk(k + 1).values[:, -1:]).topk(m * k // n + 1, dim=0).values[-1]
    return -margin - (-margin).mean()


def next_bias__qth(s, b, k):
    m, n = s.shape
    margin = (s - (s + b).topk(k + 1).values[:, -1:]).topk(m * k // n, dim=0).values[-1]
    return -margin - (-margin).mean()


def next_bias__sign_not_turned(s, b, k):
    m, n = s.shape
    margin = (s - (s + b).topk(k + 1).values[:, -1:]).topk(m * k // n + 1, dim=0).values[-1]
    return margin - margin.mean()


def next_bias__mean_left_in(s, b, k):
    m, n = s.shape
    return -(s - (s + b).topk(k + 1).values[:, -1:]).topk(m * k // n + 1, dim=0).values[-1]


def next_bias__sign_rule(s, b, k):
    load = torch.bincount((s + b).topk(k).indices.flatten(), minlength=len(b)).float()
    return b + 1e-3 * (load.mean() - load).sign()


def experts_read__all_different(n, k, batch):
    return float(min(n, k * batch))


def experts_read__one_choice(n, k, batch):
    return n * (1 - (1 - 1 / n) ** batch)


def experts_read__share(n, k, batch):
    return 1 - (1 - k / n) ** batch


def experts_read__not_read(n, k, batch):
    return n * (1 - k / n) ** batch

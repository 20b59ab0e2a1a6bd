"""Wrong answers to chapter 3: `exercise__fault`; each check must refuse them."""

import math


def merge__plain_mean(o_a, sum_a, o_b, sum_b):
    return (o_a + o_b) / 2, sum_a + sum_b


def merge__weights_swapped(o_a, sum_a, o_b, sum_b):
    total = sum_a + sum_b
    return (sum_b * o_a + sum_a * o_b) / total, total


def merge__not_divided(o_a, sum_a, o_b, sum_b):
    return sum_a * o_a + sum_b * o_b, sum_a + sum_b


def merge__sums_taken_for_logarithms(o_a, sum_a, o_b, sum_b):
    a, b = math.exp(sum_a), math.exp(sum_b)
    return (a * o_a + b * o_b) / (a + b), sum_a + sum_b


def merge__divides_by_one_sum(o_a, sum_a, o_b, sum_b):
    ratio = sum_a / sum_b
    return (ratio * o_a + o_b) / (ratio + 1), sum_a + sum_b


def merge__mean_alone(o_a, sum_a, o_b, sum_b):
    return (sum_a * o_a + sum_b * o_b) / (sum_a + sum_b)


def stream_logsumexp__plain(scores):
    total = sum(math.exp(s) for s in scores)
    return math.log(total) if total else -math.inf


def stream_logsumexp__old_sum_not_rescaled(scores):
    m, total = -math.inf, 0.0
    for s in scores:
        if s > m:
            m, total = s, total + 1.0
        elif s > -math.inf:
            total += math.exp(s - m)
    return m + math.log(total) if total else m


def stream_logsumexp__old_sum_dropped(scores):
    m, total = -math.inf, 0.0
    for s in scores:
        if s > m:
            m, total = s, 1.0
        elif s > -math.inf:
            total += math.exp(s - m)
    return m + math.log(total) if total else m


def stream_logsumexp__largest_starts_at_zero(scores):
    m, total = 0.0, 0.0
    for s in scores:
        largest = max(m, s)
        total = total * math.exp(m - largest) + math.exp(s - largest)
        m = largest
    return m + math.log(total) if total else -math.inf


def stream_logsumexp__minus_infinity_unhandled(scores):
    m, total = -math.inf, 0.0
    for s in scores:
        largest = max(m, s)
        total = total * math.exp(m - largest) + math.exp(s - largest)
        m = largest
    return m + math.log(total) if total else m


def stream_logsumexp__no_list_is_empty(scores):
    m, total = scores[0], 1.0
    for s in scores[1:]:
        if s > m:
            m, total = s, total * math.exp(m - s) + 1.0
        elif s > -math.inf:
            total += math.exp(s - m)
    return m + math.log(total)


def stream_logsumexp__a_list_holds_something_finite(scores):
    finite = [s for s in scores if s > -math.inf]
    if not scores:
        return -math.inf
    m = max(finite)
    return m + math.log(sum(math.exp(s - m) for s in finite))


def stream_logsumexp__base_two(scores):
    m, total = -math.inf, 0.0
    for s in scores:
        if s > m:
            m, total = s, total * math.exp(m - s) + 1.0
        elif s > -math.inf:
            total += math.exp(s - m)
    return m + math.log2(total) if total else m


def tiles_read__no_mask(T, block):
    return (T // block) ** 2


def tiles_read__no_diagonal(T, block):
    n = T // block
    return n * (n - 1) // 2


def tiles_read__half_of_the_square(T, block):
    return (T // block) ** 2 // 2


def tiles_read__scores_over_scores_of_a_tile(T, block):
    return T * (T + 1) // 2 // block**2


def tiles_read__keys_and_values(T, block):
    n = T // block
    return n * (n + 1)


def rows_needed__half_the_flops(R, C, s):
    return math.ceil(s * C / R)


def rows_needed__keys_only(R, C, s):
    return math.ceil(s * C / (4 * R))


def rows_needed__rounded_down(R, C, s):
    return int(s * C / (2 * R))


def rows_needed__rounded_to_nearest(R, C, s):
    return round(s * C / (2 * R))


def rows_needed__always_two_bytes(R, C, s):
    return math.ceil(C / R)


def rows_needed__more_than_as_long(R, C, s):
    return int(s * C / (2 * R)) + 1

"""Wrong answers to chapter 13: `exercise__fault`; each check must refuse them."""

import math


def float_values__no_subnormals(e, m):
    bias, steps = 2 ** (e - 1) - 1, 2**m
    return [2.0 ** (E - bias) * (1 + M / steps) for E in range(2**e) for M in range(steps)]


def float_values__subnormal_step_halved(e, m):
    bias, steps = 2 ** (e - 1) - 1, 2**m
    return [2.0 ** (E - bias) * ((E > 0) + M / steps) for E in range(2**e) for M in range(steps)]


def float_values__top_exponent_kept_for_infinity(e, m):
    bias, steps = 2 ** (e - 1) - 1, 2**m
    return [
        2.0 ** (max(E, 1) - bias) * ((E > 0) + M / steps)
        for E in range(2**e - 1)
        for M in range(steps)
    ]


def float_values__bias_of_one(e, m):
    steps = 2**m
    return [
        2.0 ** (max(E, 1) - 1) * ((E > 0) + M / steps) for E in range(2**e) for M in range(steps)
    ]


def float_values__integers(e, m):
    return [float(i) for i in range(2 ** (e + m))]


def stored_bytes__no_scale(n, element, scale, block):
    return n * element / 8


def stored_bytes__one_scale(n, element, scale, block):
    return (n * element + scale) / 8


def stored_bytes__bits(n, element, scale, block):
    return n * element + n / block * scale


def stored_bytes__blocks_of_32(n, element, scale, block):
    return (n * element + n / 32 * scale) / 8


def stored_bytes__scale_of_eight(n, element, scale, block):
    return (n * element + n / block * 8) / 8


def block_scale__logarithm(top):
    return 2.0 ** (math.floor(math.log2(top)) - 2)


def block_scale__rounded(top):
    return 2.0 ** (round(math.log2(top)) - 2)


def block_scale__largest_to_six(top):
    return top / 6


def block_scale__ceil(top):
    return 2.0 ** (math.ceil(math.log2(top)) - 2)


def block_scale__frexp_as_it_is(top):
    return 2.0 ** (math.frexp(top)[1] - 2)


def block_scale__not_shifted(top):
    return 2.0 ** (math.frexp(top)[1] - 1)

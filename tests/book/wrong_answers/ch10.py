"""Wrong answers to chapter 10: `exercise__fault`; each check must refuse them."""


def hybrid_bytes__states_grow(T, n_A, row, s, n_S, H, K):
    return (n_A * row * s + n_S * H * K * K * 4) * T


def hybrid_bytes__states_in_16_bits(T, n_A, row, s, n_S, H, K):
    return n_A * row * s * T + n_S * H * K * K * s


def hybrid_bytes__keys_and_values(T, n_A, row, s, n_S, H, K):
    return 2 * n_A * row * s * T + n_S * H * K * K * 4


def hybrid_bytes__one_head(T, n_A, row, s, n_S, H, K):
    return n_A * row * s * T + n_S * K * K * 4


def hybrid_bytes__all_layers_both(T, n_A, row, s, n_S, H, K):
    return (n_A + n_S) * (row * s * T + H * K * K * 4)


def mla_layers__no_last(n, period):
    return list(range(period, n + 1, period))


def mla_layers__last_twice(n, period):
    return [*range(period, n + 1, period), n]


def mla_layers__from_zero(n, period):
    layers = list(range(period - 1, n, period))
    return layers if n % period == 0 else [*layers, n - 1]


def mla_layers__first_of_each(n, period):
    return list(range(1, n + 1, period))


def saved__limit(T, n_A, n_S, w):
    return n_S / (n_A + n_S)


def saved__kept(T, n_A, n_S, w):
    return (n_A * T + n_S * w) / ((n_A + n_S) * T)


def saved__one_state(T, n_A, n_S, w):
    return 1 - (n_A * T + w) / ((n_A + n_S) * T)


def saved__not_below_zero(T, n_A, n_S, w):
    return max(0.0, 1 - (n_A * T + n_S * w) / ((n_A + n_S) * T))


def saved__against_the_hybrid(T, n_A, n_S, w):
    return (n_A + n_S) * T / (n_A * T + n_S * w) - 1

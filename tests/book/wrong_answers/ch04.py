"""Wrong answers to chapter 4: `exercise__fault`; each check must refuse them."""

import math


def read__no_quotient(phi_q, S, z):
    return phi_q @ S


def read__quotient_without_the_query(phi_q, S, z):
    return phi_q @ S / z.sum()


def read__every_row_by_its_own_sum(phi_q, S, z):
    return phi_q @ (S / z[:, None])


def read__query_sums_to_one(phi_q, S, z):
    return phi_q / phi_q.sum() @ S


def read__state_transposed(phi_q, S, z):
    return S @ phi_q / (phi_q @ z)


def read__a_vector_below_the_line(phi_q, S, z):
    return phi_q @ S / (phi_q * z)


def one_chunk__no_mask(q, k, v, S):
    return q @ k.T @ v + q @ S, S + k.T @ v


def one_chunk__no_diagonal(q, k, v, S):
    return (q @ k.T).tril(-1) @ v + q @ S, S + k.T @ v


def one_chunk__reads_the_state_after(q, k, v, S):
    S = S + k.T @ v
    return (q @ k.T).tril() @ v + q @ S, S


def one_chunk__old_state_unread(q, k, v, S):
    return (q @ k.T).tril() @ v, S + k.T @ v


def one_chunk__old_state_replaced(q, k, v, S):
    return (q @ k.T).tril() @ v + q @ S, k.T @ v


def one_chunk__old_state_returned(q, k, v, S):
    return (q @ k.T).tril() @ v + q @ S, S


def one_chunk__outer_product_transposed(q, k, v, S):
    return (q @ k.T).tril() @ v + q @ S, S + v.T @ k


def one_chunk__state_transposed(q, k, v, S):
    return (q @ k.T).tril() @ v + q @ S.T, S + k.T @ v


def one_chunk__queries_and_keys_swapped(q, k, v, S):
    return (k @ q.T).tril() @ v + q @ S, S + k.T @ v


def break_even__equal_is_enough(K, V, cache_bytes, state_bytes):
    return math.ceil(K * V * state_bytes / ((K + V) * cache_bytes))


def break_even__keys_only(K, V, cache_bytes, state_bytes):
    return K * V * state_bytes // (K * cache_bytes) + 1


def break_even__numbers_for_bytes(K, V, cache_bytes, state_bytes):
    return K * V // (K + V) + 1


def break_even__bytes_swapped(K, V, cache_bytes, state_bytes):
    return K * V * cache_bytes // ((K + V) * state_bytes) + 1


def break_even__half_the_keys(K, V, cache_bytes, state_bytes):
    return K * state_bytes // (2 * cache_bytes) + 1


def break_even__rounds_to_nearest(K, V, cache_bytes, state_bytes):
    return round(K * V * state_bytes / ((K + V) * cache_bytes)) + 1


def channels_needed__disturbs_itself(n, error):
    return math.ceil(n / error - 1e-9)


def channels_needed__rounded_down(n, error):
    return max(1, int((n - 1) / error))


def channels_needed__rounded_to_nearest(n, error):
    return max(1, round((n - 1) / error))


def channels_needed__none_for_one_pair(n, error):
    return math.ceil((n - 1) / error - 1e-9)


def channels_needed__error_squared_again(n, error):
    return max(1, math.ceil((n - 1) / error**2 - 1e-9))


def channels_needed__as_many_as_pairs(n, error):
    return max(1, n - 1)

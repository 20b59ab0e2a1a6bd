"""Wrong answers to chapter 6: `exercise__fault`; each check must refuse them."""

import torch


def solve(A, B):
    return torch.linalg.solve_triangular(torch.eye(len(A)) + A, B, upper=False, unitriangular=True)


def corrections__each_for_itself(k, v, beta, S):
    return beta[:, None] * (v - k @ S)


def corrections__values_of_earlier_tokens(k, v, beta, S):
    return beta[:, None] * (v - k @ S - (k @ k.T).tril(-1) @ v)


def corrections__state_unread(k, v, beta, S):
    A = beta[:, None] * (k @ k.T).tril(-1)
    return solve(A, beta[:, None] * v)


def corrections__state_read_across(k, v, beta, S):
    A = beta[:, None] * (k @ k.T).tril(-1)
    return solve(A, beta[:, None] * (v - k @ S.T))


def corrections__beta_on_the_value_only(k, v, beta, S):
    return solve((k @ k.T).tril(-1), beta[:, None] * v - k @ S)


def corrections__no_beta_in_the_sum(k, v, beta, S):
    return solve((k @ k.T).tril(-1), beta[:, None] * (v - k @ S))


def corrections__beta_of_the_earlier_token(k, v, beta, S):
    return solve(beta * (k @ k.T).tril(-1), beta[:, None] * (v - k @ S))


def corrections__sum_added(k, v, beta, S):
    A = beta[:, None] * (k @ k.T).tril(-1)
    return solve(-A, beta[:, None] * (v - k @ S))


def corrections__diagonal_kept(k, v, beta, S):
    A = beta[:, None] * (k @ k.T).tril()
    return torch.linalg.solve(torch.eye(len(k)) + A, beta[:, None] * (v - k @ S))


def chunk_transition__no_solve(k, beta):
    return torch.eye(k.shape[1]) - k.T @ (beta[:, None] * k)


def chunk_transition__reversed_order(k, beta):
    W = solve(beta[:, None] * (k @ k.T).tril(-1), beta[:, None] * k)
    return torch.eye(k.shape[1]) - W.T @ k


def chunk_transition__no_beta_before_the_key(k, beta):
    W = solve(beta[:, None] * (k @ k.T).tril(-1), k)
    return torch.eye(k.shape[1]) - k.T @ W


def chunk_transition__no_beta_in_the_matrix(k, beta):
    W = solve((k @ k.T).tril(-1), beta[:, None] * k)
    return torch.eye(k.shape[1]) - k.T @ W


def chunk_transition__beta_of_the_earlier_token(k, beta):
    W = solve(beta * (k @ k.T).tril(-1), beta[:, None] * k)
    return torch.eye(k.shape[1]) - k.T @ W


def chunk_transition__wrong_sign(k, beta):
    W = solve(-beta[:, None] * (k @ k.T).tril(-1), beta[:, None] * k)
    return torch.eye(k.shape[1]) - k.T @ W


def chunk_transition__identity_of_the_tokens(k, beta):
    W = solve(beta[:, None] * (k @ k.T).tril(-1), beta[:, None] * k)
    return torch.eye(len(k)) - k.T @ W


def chunk_transition__what_is_taken(k, beta):
    return k.T @ solve(beta[:, None] * (k @ k.T).tril(-1), beta[:, None] * k)


def per_token__of_adding(d, C):
    return 2 * d * d + 2 * C * d


def per_token__flops(d, C):
    return 2 * (3 * d * d + 5 * C * d)


def per_token__whole_chunk(d, C):
    return C * (3 * d * d + 5 * C * d)


def per_token__factors_swapped(d, C):
    return 5 * d * d + 3 * C * d


def per_token__chunk_forgotten(d, C):
    return 3 * d * d + 5 * d


def per_token__with_the_inverse(d, C):
    return 3 * d * d + 5 * C * d + C * C


def chunk_form(q, k, v, beta, C, one_chunk):
    """The loop that is right; `one_chunk` has the fault."""
    S, o = torch.zeros(k.shape[1], v.shape[1]), []
    for Q, K, V, b in zip(*(x.split(C) for x in (q, k, v, beta[:, None])), strict=True):
        A = b * (K @ K.T).tril(-1)
        out, S = one_chunk(S, Q, K, solve(A, b * K), solve(A, b * V))
        o.append(out)
    return torch.cat(o)


def mended__as_given(q, k, v, beta, C):
    def one_chunk(S, Q, K, W, U):
        U = U - W @ S
        return Q @ S + (Q @ K.T).tril() @ U, K.T @ U

    return chunk_form(q, k, v, beta, C, one_chunk)


def mended__not_corrected(q, k, v, beta, C):
    def one_chunk(S, Q, K, W, U):
        return Q @ S + (Q @ K.T).tril() @ U, S + K.T @ U

    return chunk_form(q, k, v, beta, C, one_chunk)


def mended__own_write_unread(q, k, v, beta, C):
    def one_chunk(S, Q, K, W, U):
        U = U - W @ S
        return Q @ S + (Q @ K.T).tril(-1) @ U, S + K.T @ U

    return chunk_form(q, k, v, beta, C, one_chunk)


def mended__reads_the_state_after(q, k, v, beta, C):
    def one_chunk(S, Q, K, W, U):
        U = U - W @ S
        S = S + K.T @ U
        return Q @ S + (Q @ K.T).tril() @ U, S

    return chunk_form(q, k, v, beta, C, one_chunk)


def mended__reads_with_the_key(q, k, v, beta, C):
    def one_chunk(S, Q, K, W, U):
        U = U - W @ S
        return K @ S + (K @ K.T).tril() @ U, S + K.T @ U

    return chunk_form(q, k, v, beta, C, one_chunk)


def mended__last_chunk_must_be_full(q, k, v, beta, C):
    def one_chunk(S, Q, K, W, U):
        U = U - W @ S
        return Q @ S + (Q @ K.T).tril() @ U, S + K.T @ U

    whole = len(q) // C * C
    return chunk_form(*(x[:whole] for x in (q, k, v, beta)), C, one_chunk)

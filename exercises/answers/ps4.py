"""Answers to problem set 4: `problem__fault` must lose points, `problem__right_...` must get them all."""

import torch
import torch.nn.functional as F


def solve(A, right):
    return torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)


def chunk_of(q, k, v, beta, S):
    """A right chunk, for the faults that lie around it; leading axes are a batch."""
    U = solve((beta * (k @ k.mT)).tril(-1), beta * (v - k @ S))
    return q @ S + (q @ k.mT).tril() @ U, S + k.mT @ U


def one_chunk__own_write_not_read(q, k, v, beta, S):
    b = beta[:, None]
    U = solve((b * (k @ k.T)).tril(-1), b * (v - k @ S))
    return q @ S + (q @ k.T).tril(-1) @ U, S + k.T @ U


def one_chunk__diagonal_in_the_system(q, k, v, beta, S):
    b = beta[:, None]
    A = torch.eye(len(k), dtype=k.dtype) + (b * (k @ k.T)).tril()
    U = torch.linalg.solve_triangular(A, b * (v - k @ S), upper=False)
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__no_mask_on_the_reads(q, k, v, beta, S):
    b = beta[:, None]
    U = solve((b * (k @ k.T)).tril(-1), b * (v - k @ S))
    S = S + k.T @ U
    return q @ S, S


def one_chunk__no_beta_in_the_system(q, k, v, beta, S):
    U = solve((k @ k.T).tril(-1), beta[:, None] * (v - k @ S))
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__beta_of_the_columns(q, k, v, beta, S):
    """beta_i where beta_r belongs: unseen while all are equal."""
    U = solve((beta * (k @ k.T)).tril(-1), beta[:, None] * (v - k @ S))
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__beta_after_the_solve(q, k, v, beta, S):
    """diag(beta) (I + A)^-1 instead of (I + A)^-1 diag(beta)."""
    U = beta[:, None] * solve((beta[:, None] * (k @ k.T)).tril(-1), v - k @ S)
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__no_beta_in_W(q, k, v, beta, S):
    """Unseen while the state before is zero."""
    b = beta[:, None]
    A = (b * (k @ k.T)).tril(-1)
    U = solve(A, b * v) - solve(A, k) @ S
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__upper_triangle(q, k, v, beta, S):
    """The mask of the transposed matrix: later tokens correct earlier ones."""
    b = beta[:, None]
    A = (b * (k @ k.T)).triu(1)
    U = torch.linalg.solve_triangular(A, b * (v - k @ S), upper=True, unitriangular=True)
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__state_replaced(q, k, v, beta, S):
    b = beta[:, None]
    U = solve((b * (k @ k.T)).tril(-1), b * (v - k @ S))
    return q @ S + (q @ k.T).tril() @ U, k.T @ U


def one_chunk__state_gets_uncorrected_values(q, k, v, beta, S):
    """Kimi Linear's listing 8b in kind: what is added to the state is not what was corrected."""
    b = beta[:, None]
    A = (b * (k @ k.T)).tril(-1)
    U0 = solve(A, b * v)
    U = U0 - solve(A, b * k) @ S
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U0


def one_chunk__two_terms_of_the_inverse(q, k, v, beta, S):
    """I - A + A^2 is the inverse up to three tokens."""
    b = beta[:, None]
    A = (b * (k @ k.T)).tril(-1)
    right = b * (v - k @ S)
    U = right - A @ right + A @ (A @ right)
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__inverse_by_doubling(q, k, v, beta, S):
    """Right for random keys; for one key many times its terms cancel."""
    b = beta[:, None]
    A, eye = (b * (k @ k.T)).tril(-1), torch.eye(len(k), dtype=k.dtype)
    X, power = eye - A, A @ A
    for _ in range(len(A).bit_length()):
        X, power = X @ (eye + power), power @ power
    U = X @ (b * (v - k @ S))
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__scaled(q, k, v, beta, S):
    return chunk_of(q * k.shape[-1] ** -0.5, k, v, beta[:, None], S)


def one_chunk__keys_made_unit(q, k, v, beta, S):
    return chunk_of(q, F.normalize(k, dim=-1), v, beta[:, None], S)


def one_chunk__state_in_place(q, k, v, beta, S):
    b = beta[:, None]
    U = solve((b * (k @ k.T)).tril(-1), b * (v - k @ S))
    o = q @ S + (q @ k.T).tril() @ U
    S += k.T @ U
    return o, S


def one_chunk__a_loop_over_tokens(q, k, v, beta, S):
    o = []
    for q_t, k_t, v_t, b in zip(q, k, v, beta, strict=True):
        S = S + k_t[:, None] * (b * (v_t - k_t @ S))
        o.append(q_t @ S)
    return torch.stack(o), S


def one_chunk__a_loop_over_rows_of_the_system(q, k, v, beta, S):
    U = beta[:, None] * (v - k @ S)
    A = (beta[:, None] * (k @ k.T)).tril(-1)
    for r in range(1, len(k)):
        U[r] -= A[r, :r] @ U[:r]
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def one_chunk__right_inverse_and_W(q, k, v, beta, S):
    eye = torch.eye(len(k), dtype=k.dtype)
    A = torch.diag(beta) @ (k @ k.T).tril(-1)
    X = torch.linalg.inv(eye + A) * beta
    U = X @ v - X @ k @ S
    return q @ S + torch.einsum("rk,ik->ri", q, k).tril() @ U, S + k.mT @ U


def one_chunk__right_halving(q, k, v, beta, S):
    """A chunk is two half chunks; the state goes from one to the other as S <- M S + N."""

    def inverse(A):
        n = len(A)
        if n == 1:
            return torch.ones_like(A)
        h = n // 2
        a, d = inverse(A[:h, :h]), inverse(A[h:, h:])
        top = torch.cat([a, A.new_zeros(h, n - h)], 1)
        return torch.cat([top, torch.cat([-d @ A[h:, :h] @ a, d], 1)])

    # padded to a power of two, so that all halves are done by few calls on stacks of blocks
    n = len(k)
    C = 1 << (n - 1).bit_length()
    k_, b = F.pad(k, (0, 0, 0, C - n)), F.pad(beta, (0, C - n))[:, None]
    A = (b * (k_ @ k_.T)).tril(-1)
    X, size = A.new_ones(C, 1, 1), 1
    while size < C:
        blocks = A.view(C // size, size, C // size, size).diagonal(-1, 0, 2).movedim(-1, 0)[::2]
        a, d = X[::2], X[1::2]
        top = torch.cat([a, torch.zeros_like(a)], 2)
        X = torch.cat([top, torch.cat([-d @ blocks @ a, d], 2)], 1)
        size *= 2
    if n <= 4:
        torch.testing.assert_close(X[0], inverse(A))
    U = (X[0] @ (b * F.pad(v - k @ S, (0, 0, 0, C - n))))[:n]
    return q @ S + (q @ k.T).tril() @ U, S + k.T @ U


def wide(q, k, v, beta, initial_state):
    """[B, H, T, ...] to compute with, and the state."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    B, _, H, K = q.shape
    S = initial_state
    S = torch.zeros(B, H, K, v.shape[-1], dtype=dtype) if S is None else S
    q, k, v, b = (x.to(dtype).movedim(1, 2) for x in (q, k, v, beta[..., None]))
    return q * K**-0.5, k, v, b, S


def all_chunks(rows, S, chunk_size):
    o = []
    for part in zip(*(x.split(chunk_size, 2) for x in rows), strict=True):
        new, S = chunk_of(*part, S)
        o.append(new)
    return torch.cat(o, 2), S


def chunked__last_token_repeated(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    n = -q.shape[1] % chunk_size
    rows = [torch.cat([x, x[:, :, -1:].expand(-1, -1, n, -1)], 2) for x in rows]
    o, S = all_chunks(rows, S, chunk_size)
    return o[:, :, : q.shape[1]].transpose(1, 2).to(v.dtype), S


def chunked__filled_with_ones(q, k, v, beta, initial_state, chunk_size):
    """A write strength of 1 and keys that are not zero."""
    *rows, S = wide(q, k, v, beta, initial_state)
    rows = [F.pad(x, (0, 0, 0, -q.shape[1] % chunk_size), value=1.0) for x in rows]
    o, S = all_chunks(rows, S, chunk_size)
    return o[:, :, : q.shape[1]].transpose(1, 2).to(v.dtype), S


def chunked__rest_left_out(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    T = q.shape[1]
    full = max(T // chunk_size * chunk_size, min(T, chunk_size))
    o, S = all_chunks([x[:, :, :full] for x in rows], S, chunk_size)
    o = F.pad(o, (0, 0, 0, T - full))
    return o.transpose(1, 2).to(v.dtype), S


def chunked__padding_returned(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    rows = [F.pad(x, (0, 0, 0, -q.shape[1] % chunk_size)) for x in rows]
    o, S = all_chunks(rows, S, chunk_size)
    return o.transpose(1, 2).to(v.dtype), S


def chunked__padding_cut_at_the_front(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    rows = [F.pad(x, (0, 0, 0, -q.shape[1] % chunk_size)) for x in rows]
    o, S = all_chunks(rows, S, chunk_size)
    return o[:, :, -q.shape[1] :].transpose(1, 2).to(v.dtype), S


def chunked__always_64(q, k, v, beta, initial_state, chunk_size):
    """fla #876: a chunk size that is silently another; no result shows it."""
    *rows, S = wide(q, k, v, beta, initial_state)
    o, S = all_chunks(rows, S, 64)
    return o.transpose(1, 2).to(v.dtype), S


def chunked__one_chunk_of_all(q, k, v, beta, initial_state, chunk_size):
    o, S = chunk_of(*wide(q, k, v, beta, initial_state))
    return o.transpose(1, 2).to(v.dtype), S


def chunked__cut_at_16_joined_at_chunk_size(q, k, v, beta, initial_state, chunk_size):
    """fla #876 in kind: one part of the code has a chunk size of its own."""
    *rows, S = wide(q, k, v, beta, initial_state)
    o = []
    for part in zip(*(x.split(chunk_size, 2) for x in rows), strict=True):
        first = [x[:, :, :16] for x in part]
        new, _ = chunk_of(*part, S)
        _, S = chunk_of(*first, S)
        o.append(new)
    return torch.cat(o, 2).transpose(1, 2).to(v.dtype), S


def chunked__token_by_token(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    o, S = all_chunks(rows, S, 1)
    return o.transpose(1, 2).to(v.dtype), S


def chunked__a_loop_over_heads(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    o, states = [], []
    for i in range(q.shape[2]):
        new, last = all_chunks([x[:, i : i + 1] for x in rows], S[:, i : i + 1], chunk_size)
        o.append(new)
        states.append(last)
    return torch.cat(o, 1).transpose(1, 2).to(v.dtype), torch.cat(states, 1)


def chunked__state_before_the_last_chunk(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    o = []
    for part in zip(*(x.split(chunk_size, 2) for x in rows), strict=True):
        before = S
        new, S = chunk_of(*part, S)
        o.append(new)
    return torch.cat(o, 2).transpose(1, 2).to(v.dtype), before


def chunked__reads_the_state_after_the_chunk(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    o = []
    for part in zip(*(x.split(chunk_size, 2) for x in rows), strict=True):
        new, after = chunk_of(*part, S)
        o.append(new + part[0] @ (after - S))
        S = after
    return torch.cat(o, 2).transpose(1, 2).to(v.dtype), S


def chunked__all_chunks_from_the_first_state(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    parts = [
        chunk_of(*part, S) for part in zip(*(x.split(chunk_size, 2) for x in rows), strict=True)
    ]
    o = torch.cat([o for o, _ in parts], 2)
    return o.transpose(1, 2).to(v.dtype), S + sum(after - S for _, after in parts)


def chunked__initial_state_ignored(q, k, v, beta, initial_state, chunk_size):
    """TileOps #1557 in kind: a state is given, and not used."""
    *rows, S = wide(q, k, v, beta, None)
    o, S = all_chunks(rows, S, chunk_size)
    return o.transpose(1, 2).to(v.dtype), S


def chunked__initial_state_in_place(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    o = []
    for part in zip(*(x.split(chunk_size, 2) for x in rows), strict=True):
        new, after = chunk_of(*part, S)
        S += after - S
        o.append(new)
    return torch.cat(o, 2).transpose(1, 2).to(v.dtype), S


def chunked__axes_of_tokens_and_heads_mixed(q, k, v, beta, initial_state, chunk_size):
    """transformers #40963 in kind: a reshape where a transpose belongs."""
    (B, T, H, _), rows = q.shape, wide(q, k, v, beta, initial_state)
    *rows, S = rows
    rows = [x.transpose(1, 2).reshape(B, H, T, -1) for x in rows]
    o, S = all_chunks(rows, S, chunk_size)
    return o.transpose(1, 2).to(v.dtype), S


def chunked__not_scaled(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q * q.shape[-1] ** 0.5, k, v, beta, initial_state)
    o, S = all_chunks(rows, S, chunk_size)
    return o.transpose(1, 2).to(v.dtype), S


def chunked__scale_of_the_values(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q * (q.shape[-1] / v.shape[-1]) ** 0.5, k, v, beta, initial_state)
    o, S = all_chunks(rows, S, chunk_size)
    return o.transpose(1, 2).to(v.dtype), S


def chunked__state_in_16_bits(q, k, v, beta, initial_state, chunk_size):
    """vllm #13466 and others: a state that is rounded between chunks drifts."""
    *rows, S = wide(q, k, v, beta, initial_state)
    kept, o = S.dtype, []
    for part in zip(*(x.split(chunk_size, 2) for x in rows), strict=True):
        new, S = chunk_of(*part, S)
        S = S.to(q.dtype).to(kept)
        o.append(new)
    return torch.cat(o, 2).transpose(1, 2).to(v.dtype), S


def chunked__output_in_32_bits(q, k, v, beta, initial_state, chunk_size):
    o, S = all_chunks(
        wide(q, k, v, beta, initial_state)[:4], wide(q, k, v, beta, initial_state)[4], chunk_size
    )
    return o.transpose(1, 2), S


def chunked__64_bits_narrowed(q, k, v, beta, initial_state, chunk_size):
    rows = (x.float() for x in (q, k, v, beta))
    *rows, S = wide(*rows, None if initial_state is None else initial_state.float())
    o, S = all_chunks(rows, S, chunk_size)
    state = torch.float64 if q.dtype == torch.float64 else torch.float32
    return o.transpose(1, 2).to(v.dtype), S.to(state)


def chunked__right_padded_and_carried_by_M_and_N(q, k, v, beta, initial_state, chunk_size):
    *rows, S = wide(q, k, v, beta, initial_state)
    T = q.shape[1]
    C = min(chunk_size, T)
    Q, K, V, b = (F.pad(x, (0, 0, 0, -T % C)).unflatten(2, (-1, C)) for x in rows)
    eye = torch.eye(C, dtype=Q.dtype)
    X = torch.linalg.inv(eye + (b * (K @ K.mT)).tril(-1)) * b.mT
    W, U = X @ K, X @ V
    M, N = torch.eye(K.shape[-1], dtype=K.dtype) - K.mT @ W, K.mT @ U
    starts = []
    for m, n in zip(M.unbind(2), N.unbind(2), strict=True):
        starts.append(S)
        S = m @ S + n
    starts = torch.stack(starts, 2)
    o = Q @ starts + (Q @ K.mT).tril() @ (U - W @ starts)
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2).to(v.dtype), S


def chunked__right_empty_tokens_first(q, k, v, beta, initial_state, chunk_size):
    """Padding in front is as good: a key of zero writes nothing at any strength."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    B, T, H, K = q.shape
    S = torch.zeros(B, H, K, v.shape[-1], dtype=dtype)
    if initial_state is not None:
        S = S + initial_state
    n = -T % chunk_size
    q, k, v_ = (F.pad(x.to(dtype), (0, 0, 0, 0, n, 0)) for x in (q, k, v))
    beta = F.pad(beta.to(dtype), (0, 0, n, 0), value=1.0)
    o = []
    for i in range(0, n + T, chunk_size):
        part = slice(i, i + chunk_size)
        Q, Kc, V, b = q[:, part] * K**-0.5, k[:, part], v_[:, part], beta[:, part]
        A = torch.einsum("brhk,bihk,brh->bhri", Kc, Kc, b).tril(-1)
        right = (b[..., None] * (V - torch.einsum("brhk,bhkv->brhv", Kc, S))).transpose(1, 2)
        U = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
        scores = torch.einsum("brhk,bihk->bhri", Q, Kc).tril()
        o.append(torch.einsum("brhk,bhkv->brhv", Q, S) + (scores @ U).transpose(1, 2))
        S = S + torch.einsum("brhk,bhrv->bhkv", Kc, U)
    return torch.cat(o, 1)[:, n:].to(v.dtype), S


def head_in_chunks(q, k, v, beta, S, chunk_size, *, fill, strength_in_W, in_place):
    """The given function, with each of its faults or without."""
    T, missing = len(q), -len(q) % chunk_size
    if missing:
        q, k, v, beta = (torch.cat([x, fill(x, missing)]) for x in (q, k, v, beta))
    o = []
    for Q, K, V, b in zip(*(x.split(chunk_size) for x in (q, k, v, beta[:, None])), strict=True):
        A = b * (K @ K.T).tril(-1)
        X = torch.linalg.inv(torch.eye(chunk_size, dtype=q.dtype) + A)
        W, U = strength_in_W(X, K, b), X @ (b * V)
        U -= W @ S
        o.append(Q @ S + (Q @ K.T).tril() @ U)
        if in_place:
            S += K.T @ U
        else:
            S = S + K.T @ U
    return torch.cat(o)[:T], S


def last_again(x, n):
    return x[-1:].expand(n, *x.shape[1:])


def zeros(x, n):
    return x.new_zeros(n, *x.shape[1:])


def without_beta(X, K, b):
    return X @ K


def with_beta(X, K, b):
    return X @ (b * K)


def mended_chunks__the_given_one(q, k, v, beta, S, chunk_size):
    return head_in_chunks(
        q, k, v, beta, S, chunk_size, fill=last_again, strength_in_W=without_beta, in_place=True
    )


def mended_chunks__still_no_beta_in_W(q, k, v, beta, S, chunk_size):
    return head_in_chunks(
        q, k, v, beta, S, chunk_size, fill=zeros, strength_in_W=without_beta, in_place=False
    )


def mended_chunks__still_filled_with_the_last_token(q, k, v, beta, S, chunk_size):
    return head_in_chunks(
        q, k, v, beta, S, chunk_size, fill=last_again, strength_in_W=with_beta, in_place=False
    )


def mended_chunks__still_in_place(q, k, v, beta, S, chunk_size):
    return head_in_chunks(
        q, k, v, beta, S, chunk_size, fill=zeros, strength_in_W=with_beta, in_place=True
    )


def mended_chunks__beta_on_the_rows_of_W(q, k, v, beta, S, chunk_size):
    return head_in_chunks(
        q, k, v, beta, S, chunk_size, fill=zeros, in_place=False,
        strength_in_W=lambda X, K, b: b * (X @ K),
    )  # fmt: skip


def mended_chunks__beta_twice_in_the_values(q, k, v, beta, S, chunk_size):
    """X made to hold beta, as in (6.2), and the values still multiplied by it."""
    return head_in_chunks(
        q, k, v * beta[:, None], beta, S, chunk_size, fill=zeros, in_place=False,
        strength_in_W=with_beta,
    )  # fmt: skip


def mended_chunks__filled_with_ones(q, k, v, beta, S, chunk_size):
    return head_in_chunks(
        q, k, v, beta, S, chunk_size, fill=lambda x, n: x.new_ones(n, *x.shape[1:]),
        strength_in_W=with_beta, in_place=False,
    )  # fmt: skip


def mended_chunks__rest_left_out(q, k, v, beta, S, chunk_size):
    full = len(q) // chunk_size * chunk_size
    o, after = head_in_chunks(
        q[:full], k[:full], v[:full], beta[:full], S, chunk_size,
        fill=zeros, strength_in_W=with_beta, in_place=False,
    )  # fmt: skip
    return torch.cat([o, q[full:] @ after]), after


def mended_chunks__a_loop_over_tokens(q, k, v, beta, S, chunk_size):
    o = []
    for q_t, k_t, v_t, b in zip(q, k, v, beta, strict=True):
        S = S + k_t[:, None] * (b * (v_t - k_t @ S))
        o.append(q_t @ S)
    return torch.stack(o), S


def mended_chunks__right_shorter_last_chunk(q, k, v, beta, S, chunk_size):
    o = []
    for Q, K, V, b in zip(*(x.split(chunk_size) for x in (q, k, v, beta)), strict=True):
        eye = torch.eye(len(Q), dtype=Q.dtype)
        X = torch.linalg.inv(eye + b[:, None] * (K @ K.T).tril(-1)) * b
        U = X @ V - (X @ K) @ S
        o.append(Q @ S + (Q @ K.T).tril() @ U)
        S = S + K.T @ U
    return torch.cat(o), S


def mended_chunks__right_only_beta_filled_with_zeros(q, k, v, beta, S, chunk_size):
    S, T, missing = S.clone(), len(q), -len(q) % chunk_size
    q, k, v = (torch.cat([x, last_again(x, missing)]) for x in (q, k, v))
    beta = F.pad(beta, (0, missing))
    o = []
    for i in range(0, T, chunk_size):
        Q, K, V, b = (x[i : i + chunk_size] for x in (q, k, v, beta[:, None]))
        new, after = chunk_of(Q, K, V, b, S)
        o.append(new)
        S.copy_(after)
    return torch.cat(o)[:T], S


def chunk_flops__multiply_adds(T, K, V, C):
    return chunk_flops__right_sum_over_chunks(T, K, V, C) // 2


def chunk_flops__full_rectangles(T, K, V, C):
    return 2 * (3 * T * K * V + T * C * (3 * K + 2 * V))


def chunk_flops__rest_as_a_full_chunk(T, K, V, C):
    return chunk_flops__right_sum_over_chunks(-(-T // C) * C, K, V, C)


def chunk_flops__rest_left_out(T, K, V, C):
    return chunk_flops__right_sum_over_chunks(T // C * C, K, V, C)


def chunk_flops__own_score_left_out(T, K, V, C):
    return chunk_flops__right_sum_over_chunks(T, K, V, C) - 2 * T * (K + V)


def chunk_flops__diagonal_in_the_system(T, K, V, C):
    return chunk_flops__right_sum_over_chunks(T, K, V, C) + 2 * T * (2 * K + V)


def chunk_flops__keys_and_values_swapped(T, K, V, C):
    return chunk_flops__right_sum_over_chunks(T, V, K, C)


def chunk_flops__no_W(T, K, V, C):
    lost = sum(2 * (t % C) * K for t in range(T))
    return chunk_flops__right_sum_over_chunks(T, K, V, C) - lost


def chunk_flops__halves_rounded(T, K, V, C):
    """n^2 / 2 for both triangles."""
    flops = 0
    for i in range(0, T, C):
        n = min(C, T - i)
        flops += 2 * (n * n // 2 * (3 * K + 2 * V) + 3 * n * K * V)
    return flops


def chunk_flops__right_sum_over_chunks(T, K, V, C):
    flops = 0
    for i in range(0, T, C):
        n = min(C, T - i)
        keys, substitution = n * (n - 1) * K, n * (n - 1) * (K + V)
        reads = n * (n + 1) * (K + V)
        flops += keys + substitution + reads + 6 * n * K * V
    return flops


def chunk_flops__right_sum_over_tokens(T, K, V, C):
    return sum(2 * ((t % C) * (3 * K + 2 * V) + K + V + 3 * K * V) for t in range(T))

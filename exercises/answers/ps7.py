"""Answers to problem set 7: `problem__fault` must lose points, `problem__right_...` must get them all."""

import math

from gpt2_to_k3.lab import costs


def end_of(first, returned, written, turns):
    return first + (turns - 1) * returned + turns * written


def cache_of(shape, tokens):
    growing = shape.growing
    return tokens * growing.layers * growing.cache_numbers * shape.bytes_per_cache_number


def states_of(shape):
    return shape.state.layers * shape.state.state_numbers * shape.bytes_per_state_number


def experts_of(shape, number):
    e = shape.experts
    return e.layers * number * e.weights * shape.bytes_per_expert_weight


def stored_of(shape):
    dense = (shape.dense_weights + shape.lookup_weights) * shape.bytes_per_weight
    return dense + experts_of(shape, shape.experts.number)


def fitted(tokens, kept, stored, memory_bytes):
    return tokens, kept, stored, max(0, math.floor((memory_bytes - stored) / kept))


def sizes__keys_and_values_twice(shape, first, returned, written, turns, memory_bytes):
    """cache_numbers has both already; and a latent row has no factor of 2 at all."""
    tokens = end_of(first, returned, written, turns)
    kept = 2 * cache_of(shape, tokens) + states_of(shape)
    return fitted(tokens, kept, stored_of(shape), memory_bytes)


def sizes__states_forgotten(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    return fitted(tokens, cache_of(shape, tokens), stored_of(shape), memory_bytes)


def sizes__states_for_every_token(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    kept = cache_of(shape, tokens) + tokens * states_of(shape)
    return fitted(tokens, kept, stored_of(shape), memory_bytes)


def sizes__one_layer_only(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    kept = costs.layer_cache_bytes(shape, tokens) + costs.layer_state_bytes(shape)
    return fitted(tokens, kept, stored_of(shape), memory_bytes)


def sizes__state_numbers_like_cache_numbers(shape, first, returned, written, turns, memory_bytes):
    """vllm #13466 in kind: a state takes 32 bits a number, whatever the cache takes."""
    tokens = end_of(first, returned, written, turns)
    states = shape.state.layers * shape.state.state_numbers * shape.bytes_per_cache_number
    return fitted(tokens, cache_of(shape, tokens) + states, stored_of(shape), memory_bytes)


def sizes__used_experts_only(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    stored = (shape.active_weights - shape.dense_weights) * shape.bytes_per_expert_weight
    stored += (shape.dense_weights + shape.lookup_weights) * shape.bytes_per_weight
    return fitted(tokens, cache_of(shape, tokens) + states_of(shape), stored, memory_bytes)


def sizes__experts_in_the_dense_format(shape, first, returned, written, turns, memory_bytes):
    tokens, e = end_of(first, returned, written, turns), shape.experts
    stored = shape.dense_weights + shape.lookup_weights + e.layers * e.number * e.weights
    kept = cache_of(shape, tokens) + states_of(shape)
    return fitted(tokens, kept, stored * shape.bytes_per_weight, memory_bytes)


def sizes__embeddings_forgotten(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    stored = stored_of(shape) - shape.lookup_weights * shape.bytes_per_weight
    return fitted(tokens, cache_of(shape, tokens) + states_of(shape), stored, memory_bytes)


def sizes__answers_not_in_the_history(shape, first, returned, written, turns, memory_bytes):
    return sizes__right_exact(shape, first, returned, 0, turns, memory_bytes)


def sizes__a_tool_after_the_last_answer(shape, first, returned, written, turns, memory_bytes):
    return sizes__right_exact(shape, first + returned, returned, written, turns, memory_bytes)


def sizes__last_answer_left_out(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns) - written
    kept = cache_of(shape, tokens) + states_of(shape)
    return fitted(tokens, kept, stored_of(shape), memory_bytes)


def sizes__less_than_none(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    kept, stored = cache_of(shape, tokens) + states_of(shape), stored_of(shape)
    return tokens, kept, stored, (memory_bytes - stored) // kept


def sizes__all_memory_for_caches(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    kept, stored = cache_of(shape, tokens) + states_of(shape), stored_of(shape)
    return tokens, kept, stored, memory_bytes // kept


def sizes__rounded_to_the_nearest(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    kept, stored = cache_of(shape, tokens) + states_of(shape), stored_of(shape)
    return tokens, kept, stored, max(0, round((memory_bytes - stored) / kept))


def sizes__a_byte_must_be_left(shape, first, returned, written, turns, memory_bytes):
    tokens = end_of(first, returned, written, turns)
    kept, stored = cache_of(shape, tokens) + states_of(shape), stored_of(shape)
    return tokens, kept, stored, max(0, math.ceil((memory_bytes - stored) / kept) - 1)


def sizes__right_exact(shape, first, returned, written, turns, memory_bytes):
    tokens = first + written + (turns - 1) * (returned + written)
    per_token = shape.growing.layers * shape.growing.cache_numbers * shape.bytes_per_cache_number
    kept = per_token * tokens + states_of(shape)
    stored = stored_of(shape)
    fit = (memory_bytes - stored) // kept if memory_bytes > stored else 0
    return tokens, kept, stored, int(fit)


def sizes__right_counted(shape, first, returned, written, turns, memory_bytes):
    tokens = first
    for i in range(turns):
        tokens += written if i == 0 else returned + written
    kept, e, stored = cache_of(shape, tokens) + states_of(shape), shape.experts, 0.0
    stored += shape.bytes_per_expert_weight * (e.layers * e.number * e.weights)
    stored += shape.bytes_per_weight * shape.dense_weights
    stored += shape.bytes_per_weight * shape.lookup_weights
    fit = 0
    while stored + (fit + 1) * kept <= memory_bytes:
        fit += 1
    return tokens, kept, stored, fit


def expected_experts(shape, batch):
    e = shape.experts
    return e.number * (1 - (1 - e.per_token / e.number) ** batch)


def priced(shape, tokens, batch, device, *, weights=None, kept=None, flops=None):
    """A step of which one part is the caller's: bytes of weights or kept, or FLOPs of a sequence."""
    if weights is None:
        weights = shape.dense_weights * shape.bytes_per_weight
        weights += experts_of(shape, expected_experts(shape, batch))
    kept = cache_of(shape, tokens) + states_of(shape) if kept is None else kept
    if flops is None:
        flops = (
            2 * shape.active_weights + tokens * shape.growing.layers * shape.growing.decode_flops
        )
        flops += shape.state.layers * shape.state.decode_flops
    read, flops = weights + batch * kept, batch * flops
    return read, flops, max(read / device.read_bytes_per_second, flops / device.flops_per_second)


def step__all_experts_read(shape, tokens, batch, device):
    weights = shape.dense_weights * shape.bytes_per_weight
    weights += experts_of(shape, shape.experts.number)
    return priced(shape, tokens, batch, device, weights=weights)


def step__experts_of_one_token(shape, tokens, batch, device):
    weights = shape.dense_weights * shape.bytes_per_weight
    weights += experts_of(shape, shape.experts.per_token)
    return priced(shape, tokens, batch, device, weights=weights)


def step__each_token_its_own_experts(shape, tokens, batch, device):
    """As many as there are at most, which is not what is expected."""
    e = shape.experts
    weights = shape.dense_weights * shape.bytes_per_weight
    weights += experts_of(shape, min(e.number, batch * e.per_token))
    return priced(shape, tokens, batch, device, weights=weights)


def step__draws_one_by_one(shape, tokens, batch, device):
    """batch * k single draws: a token would choose the same expert twice."""
    e = shape.experts
    touched = e.number * (1 - (1 - 1 / e.number) ** (batch * e.per_token))
    weights = shape.dense_weights * shape.bytes_per_weight + experts_of(shape, touched)
    return priced(shape, tokens, batch, device, weights=weights)


def step__experts_in_the_dense_format(shape, tokens, batch, device):
    e = shape.experts
    numbers = shape.dense_weights + e.layers * expected_experts(shape, batch) * e.weights
    return priced(shape, tokens, batch, device, weights=numbers * shape.bytes_per_weight)


def step__weights_for_every_sequence(shape, tokens, batch, device):
    weights = shape.dense_weights * shape.bytes_per_weight
    weights += experts_of(shape, expected_experts(shape, batch))
    return priced(shape, tokens, batch, device, weights=batch * weights)


def step__embeddings_read(shape, tokens, batch, device):
    weights = (shape.dense_weights + shape.lookup_weights) * shape.bytes_per_weight
    weights += experts_of(shape, expected_experts(shape, batch))
    return priced(shape, tokens, batch, device, weights=weights)


def step__states_not_read(shape, tokens, batch, device):
    return priced(shape, tokens, batch, device, kept=cache_of(shape, tokens))


def step__states_read_and_written(shape, tokens, batch, device):
    """True of a machine, and not what is asked: the page says that writing is not counted."""
    kept = cache_of(shape, tokens) + 2 * states_of(shape)
    return priced(shape, tokens, batch, device, kept=kept)


def step__one_sequence_read(shape, tokens, batch, device):
    kept = (cache_of(shape, tokens) + states_of(shape)) / batch
    return priced(shape, tokens, batch, device, kept=kept)


def step__multiply_adds(shape, tokens, batch, device):
    flops = shape.active_weights + tokens * shape.growing.layers * shape.growing.decode_flops
    flops += shape.state.layers * shape.state.decode_flops
    return priced(shape, tokens, batch, device, flops=flops)


def step__weights_alone_computed(shape, tokens, batch, device):
    return priced(shape, tokens, batch, device, flops=2 * shape.active_weights)


def step__states_not_computed(shape, tokens, batch, device):
    flops = 2 * shape.active_weights + tokens * shape.growing.layers * shape.growing.decode_flops
    return priced(shape, tokens, batch, device, flops=flops)


def step__states_computed_for_every_token(shape, tokens, batch, device):
    mixing = shape.growing.layers * shape.growing.decode_flops
    mixing += shape.state.layers * shape.state.decode_flops
    flops = 2 * shape.active_weights + tokens * mixing
    return priced(shape, tokens, batch, device, flops=flops)


def step__all_experts_computed(shape, tokens, batch, device):
    e = shape.experts
    flops = 2 * (shape.dense_weights + e.layers * e.number * e.weights)
    flops += tokens * shape.growing.layers * shape.growing.decode_flops
    flops += shape.state.layers * shape.state.decode_flops
    return priced(shape, tokens, batch, device, flops=flops)


def step__one_after_the_other(shape, tokens, batch, device):
    read, flops, _ = priced(shape, tokens, batch, device)
    return read, flops, read / device.read_bytes_per_second + flops / device.flops_per_second


def step__reading_alone(shape, tokens, batch, device):
    read, flops, _ = priced(shape, tokens, batch, device)
    return read, flops, read / device.read_bytes_per_second


def step__time_of_one_token(shape, tokens, batch, device):
    read, flops, seconds = priced(shape, tokens, batch, device)
    return read, flops, seconds / batch


def step__right_in_parts(shape, tokens, batch, device):
    e, g, s = shape.experts, shape.growing, shape.state
    missed = math.pow((e.number - e.per_token) / e.number, batch)
    read = [
        shape.bytes_per_weight * shape.dense_weights,
        shape.bytes_per_expert_weight * e.layers * e.weights * e.number * (1 - missed),
        shape.bytes_per_cache_number * batch * tokens * g.layers * g.cache_numbers,
        shape.bytes_per_state_number * batch * s.layers * s.state_numbers,
    ]
    flops = [
        2 * batch * shape.active_weights,
        batch * tokens * g.layers * g.decode_flops,
        batch * s.layers * s.decode_flops,
    ]
    times = sum(read) / device.read_bytes_per_second, sum(flops) / device.flops_per_second
    return sum(read), sum(flops), sorted(times)[-1]


def step__right_expert_by_expert(shape, tokens, batch, device):
    """The expected number of distinct experts by a recurrence: each token adds k/E of what is missing."""
    e, touched = shape.experts, 0.0
    for _ in range(batch):
        touched += (e.number - touched) * e.per_token / e.number
    weights = shape.bytes_per_weight * shape.dense_weights + experts_of(shape, touched)
    read = weights + batch * (cache_of(shape, tokens) + states_of(shape))
    per_sequence = 2 * (shape.dense_weights + e.layers * e.per_token * e.weights)
    per_sequence += shape.growing.layers * shape.growing.decode_flops * tokens
    flops = batch * (per_sequence + shape.state.layers * shape.state.decode_flops)
    computing = flops / device.flops_per_second
    reading = read / device.read_bytes_per_second
    return read, flops, reading if reading > computing else computing


def serving(shapes, kinds, most, serves):
    """(rent, i, j, n) of every model, kind and number for which serves(shape, device, n)."""
    return [
        (n * price, i, j, n)
        for i, shape in enumerate(shapes)
        for j, (device, price) in enumerate(kinds)
        for n in range(1, most + 1)
        if serves(shape, device, n)
    ]


def answered(found, active, speed):
    if not found:
        return None
    rent, i, j, n = min(found)
    return i, j, n, 1e6 * rent / (3600 * active * speed)


def holds(shape, tokens, opened, device, n):
    return (
        costs.weight_bytes(shape) + opened * costs.kept_bytes(shape, tokens)
        <= n * device.memory_bytes
    )


def in_time(shape, tokens, batch, speed, device, n):
    read, flops = (
        costs.decode_read_bytes(shape, tokens, batch),
        costs.decode_flops(shape, tokens, batch),
    )
    return speed * costs.roofline_seconds(read, flops, device.times(n)) <= 1


def cheapest__room_for_the_active_only(shapes, kinds, tokens, opened, active, speed, most):
    found = serving(
        shapes, kinds, most,
        lambda s, d, n: holds(s, tokens, active, d, n) and in_time(s, tokens, active, speed, d, n),
    )  # fmt: skip
    return answered(found, active, speed)


def cheapest__all_open_decoded(shapes, kinds, tokens, opened, active, speed, most):
    found = serving(
        shapes, kinds, most,
        lambda s, d, n: holds(s, tokens, opened, d, n) and in_time(s, tokens, opened, speed, d, n),
    )  # fmt: skip
    return answered(found, active, speed)


def cheapest__speed_not_asked(shapes, kinds, tokens, opened, active, speed, most):
    found = serving(shapes, kinds, most, lambda s, d, n: holds(s, tokens, opened, d, n))
    return answered(found, active, speed)


def cheapest__room_not_asked(shapes, kinds, tokens, opened, active, speed, most):
    found = serving(shapes, kinds, most, lambda s, d, n: in_time(s, tokens, active, speed, d, n))
    return answered(found, active, speed)


def cheapest__speed_of_all_together(shapes, kinds, tokens, opened, active, speed, most):
    """`speed` tokens per second for the batch, not for each session."""
    found = serving(
        shapes, kinds, most,
        lambda s, d, n: holds(s, tokens, opened, d, n)
        and in_time(s, tokens, active, speed / active, d, n),
    )  # fmt: skip
    return answered(found, active, speed)


def cheapest__one_session_at_a_time(shapes, kinds, tokens, opened, active, speed, most):
    found = serving(
        shapes, kinds, most,
        lambda s, d, n: holds(s, tokens, opened, d, n) and in_time(s, tokens, 1, speed, d, n),
    )  # fmt: skip
    return answered(found, active, speed)


def cheapest__weights_on_every_gpu(shapes, kinds, tokens, opened, active, speed, most):
    found = serving(
        shapes, kinds, most,
        lambda s, d, n: n * costs.largest_batch(s, tokens, d.memory_bytes) >= opened
        and in_time(s, tokens, active, speed, d, n),
    )  # fmt: skip
    return answered(found, active, speed)


def cheapest__fewest_gpus(shapes, kinds, tokens, opened, active, speed, most):
    found = served_by(shapes, kinds, tokens, opened, active, speed, most)
    return answered([min(found, key=lambda x: (x[3], x[0]))] if found else [], active, speed)


def cheapest__cheapest_gpu(shapes, kinds, tokens, opened, active, speed, most):
    found = served_by(shapes, kinds, tokens, opened, active, speed, most)
    return answered(
        [min(found, key=lambda x: (kinds[x[2]][1], x[0]))] if found else [], active, speed
    )


def cheapest__first_model_that_serves(shapes, kinds, tokens, opened, active, speed, most):
    found = served_by(shapes, kinds, tokens, opened, active, speed, most)
    return answered([min(found, key=lambda x: (x[1], x[0]))] if found else [], active, speed)


def cheapest__one_less_than_most(shapes, kinds, tokens, opened, active, speed, most):
    return cheapest__right_all(shapes, kinds, tokens, opened, active, speed, most - 1)


def cheapest__nothing_is_an_error(shapes, kinds, tokens, opened, active, speed, most):
    rent, i, j, n = min(served_by(shapes, kinds, tokens, opened, active, speed, most))
    return i, j, n, 1e6 * rent / (3600 * active * speed)


def cheapest__one_gpu_paid(shapes, kinds, tokens, opened, active, speed, most):
    found = served_by(shapes, kinds, tokens, opened, active, speed, most)
    if not found:
        return None
    _, i, j, n = min(found)
    return i, j, n, 1e6 * kinds[j][1] / (3600 * active * speed)


def cheapest__tokens_of_one_session(shapes, kinds, tokens, opened, active, speed, most):
    found = served_by(shapes, kinds, tokens, opened, active, speed, most)
    return answered(found, 1, speed)


def cheapest__tokens_of_all_open(shapes, kinds, tokens, opened, active, speed, most):
    found = served_by(shapes, kinds, tokens, opened, active, speed, most)
    return answered(found, opened, speed)


def cheapest__tokens_at_the_bound(shapes, kinds, tokens, opened, active, speed, most):
    """The price if the sessions were written for as fast as the bound allows."""
    found = served_by(shapes, kinds, tokens, opened, active, speed, most)
    if not found:
        return None
    rent, i, j, n = min(found)
    seconds = costs.decode_seconds(shapes[i], tokens, active, kinds[j][0].times(n))
    return i, j, n, 1e6 * rent * seconds / (3600 * active)


def served_by(shapes, kinds, tokens, opened, active, speed, most):
    return serving(
        shapes, kinds, most,
        lambda s, d, n: holds(s, tokens, opened, d, n) and in_time(s, tokens, active, speed, d, n),
    )  # fmt: skip


def cheapest__right_all(shapes, kinds, tokens, opened, active, speed, most):
    found = served_by(shapes, kinds, tokens, opened, active, speed, most)
    return answered(found, active, speed)


def cheapest__right_closed_form(shapes, kinds, tokens, opened, active, speed, most):
    """Every limit is proportional to n, so the least n is a quotient rounded up."""
    best = None
    for i, shape in enumerate(shapes):
        memory = costs.weight_bytes(shape) + opened * costs.kept_bytes(shape, tokens)
        read = costs.decode_read_bytes(shape, tokens, active) * speed
        flops = costs.decode_flops(shape, tokens, active) * speed
        for j, (device, price) in enumerate(kinds):
            shares = (
                memory / device.memory_bytes,
                read / device.read_bytes_per_second,
                flops / device.flops_per_second,
            )
            n = max(1, math.ceil(max(shares)))
            if n <= most and (best is None or n * price < best[0]):
                best = n * price, i, j, n
    if best is None:
        return None
    written = active * speed * 60 * 60 / 1_000_000
    return *best[1:], best[0] / written


def sheet__the_given_one(
    weights, weight_bits, layers, kv_heads, head_dim, cache_bits, state_layers, state_numbers,
    tokens, memory_gib, tb_per_second,
):  # fmt: skip
    weights_gb = weights * weight_bits / 1e9
    kept_gb = layers * kv_heads * head_dim * tokens * cache_bits / 8 / 1e9
    fit = int((memory_gib - weights_gb) / kept_gb)
    seconds = (weights_gb + kept_gb) / (tb_per_second * 1024)
    return weights_gb, kept_gb, fit, fit / seconds


def filled_in(
    weights, weight_bits, layers, kv_heads, head_dim, cache_bits, state_layers, state_numbers,
    tokens, memory_gib, tb_per_second, *, bits=8, pair=2, state_bytes=4, gib=2**30 / 1e9, tb=1000,
    least=0, step_of=None,
):  # fmt: skip
    """The mended sheet with a factor of the caller's."""
    weights_gb = weights * weight_bits / bits / 1e9
    kept_gb = pair * layers * kv_heads * head_dim * tokens * cache_bits / 8 / 1e9
    kept_gb += state_layers * state_numbers * state_bytes / 1e9
    fit = max(least, int((memory_gib * gib - weights_gb) / kept_gb))
    seconds = (weights_gb + (step_of or fit) * kept_gb) / (tb_per_second * tb)
    return weights_gb, kept_gb, fit, fit / seconds


def sheet__bits_for_bytes(*arguments):
    return filled_in(*arguments, bits=1)


def sheet__values_forgotten(*arguments):
    return filled_in(*arguments, pair=1)


def sheet__states_forgotten(*arguments):
    return filled_in(*arguments, state_bytes=0)


def sheet__states_in_16_bits(*arguments):
    return filled_in(*arguments, state_bytes=2)


def sheet__gib_taken_for_gb(*arguments):
    return filled_in(*arguments, gib=1)


def sheet__gb_taken_for_gib(*arguments):
    return filled_in(*arguments, gib=1e9 / 2**30)


def sheet__tb_of_1024_gb(*arguments):
    return filled_in(*arguments, tb=1024)


def sheet__step_of_one_sequence(*arguments):
    """All sequences that fit get a token in the time that one of them takes."""
    return filled_in(*arguments, step_of=1)


def sheet__fewer_than_none(*arguments):
    return filled_in(*arguments, least=-math.inf)


def sheet__weights_for_every_sequence(*arguments):
    weights_gb, kept_gb, fit, _ = filled_in(*arguments)
    return weights_gb, kept_gb, fit, arguments[-1] * 1000 / (weights_gb + kept_gb) if fit else 0.0


def sheet__of_one_sequence(*arguments):
    weights_gb, kept_gb, fit, together = filled_in(*arguments)
    return weights_gb, kept_gb, fit, together / max(fit, 1)


def sheet__right_in_bytes(
    weights, weight_bits, layers, kv_heads, head_dim, cache_bits, state_layers, state_numbers,
    tokens, memory_gib, tb_per_second,
):  # fmt: skip
    W = weights * weight_bits / 8
    c = layers * 2 * kv_heads * head_dim * cache_bits / 8
    s = state_layers * state_numbers * 32 / 8
    kept, memory = c * tokens + s, memory_gib * 1024**3
    B = math.floor((memory - W) / kept) if memory > W else 0
    t = (W + B * kept) / (tb_per_second * 1e12)
    return W / 1e9, kept / 1e9, B, B / t


def sheet__right_early(
    weights, weight_bits, layers, kv_heads, head_dim, cache_bits, state_layers, state_numbers,
    tokens, memory_gib, tb_per_second,
):  # fmt: skip
    billion = 10**9
    stored = weight_bits * weights / 8 / billion
    numbers = tokens * layers * kv_heads * head_dim
    each = (numbers * cache_bits + numbers * cache_bits + state_layers * state_numbers * 32) / 8
    room = memory_gib * 1.073741824 - stored
    if room < each / billion:
        return stored, each / billion, 0, 0.0
    fit = int(room * billion // each)
    return stored, each / billion, fit, fit * tb_per_second * 1e12 / (stored * billion + fit * each)

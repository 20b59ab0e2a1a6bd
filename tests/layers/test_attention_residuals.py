"""One reading of the depth: its weights, its mean, its two phases, and the module that has a query."""

import pytest
import torch
from random_tensors import normal

from gpt2_to_k3.layers import (
    AttentionResidual,
    mix_sources,
    read_blocks,
    read_partial,
    source_weights,
)

F64 = torch.float64


def some(n, *shape, dtype=F64):
    return list(normal(n, *shape, seed=1, dtype=dtype))


def test_by_hand():
    """Sources (3, 4) and (0, 2) have root mean squares sqrt(12.5) and sqrt(2)."""
    sources = [torch.tensor([3.0, 4.0], dtype=F64), torch.tensor([0.0, 2.0], dtype=F64)]
    w = torch.tensor([1.0, -1.0], dtype=F64)
    scores = torch.tensor([-1 / 12.5**0.5, -2 / 2**0.5], dtype=F64)
    alpha = scores.exp() / scores.exp().sum()
    torch.testing.assert_close(source_weights(w, sources, 0.0), alpha)
    want = torch.stack([3 * alpha[0], 4 * alpha[0] + 2 * alpha[1]])
    torch.testing.assert_close(mix_sources(w, sources, 0.0), want)


def test_eps_is_added_to_the_mean_of_squares():
    sources = [torch.tensor([1.0, -1.0], dtype=F64), torch.zeros(2, dtype=F64)]
    alpha = source_weights(torch.tensor([2.0, 0.0], dtype=F64), sources, 3.0)
    torch.testing.assert_close(alpha[0], torch.tensor(1.0, dtype=F64).sigmoid())  # 2 / sqrt(1 + 3)


@pytest.mark.parametrize("N", [1, 2, 5])
def test_a_zero_query_gives_the_mean_and_not_the_sum(N):
    sources = some(N, 2, 3, 7)
    w = torch.zeros(7, dtype=F64)
    assert torch.equal(source_weights(w, sources, 1e-5), torch.full((N, 2, 3), 1 / N, dtype=F64))
    torch.testing.assert_close(mix_sources(w, sources, 1e-5), sum(sources) / N)


def test_a_module_starts_with_the_mean_and_with_a_query_that_can_learn():
    mix = AttentionResidual(7).double()
    assert torch.equal(mix.query, torch.zeros(7, dtype=F64)) and (mix.norm.weight == 1).all()
    assert mix.norm.eps == 1e-5 and sum(p.numel() for p in mix.parameters()) == 14
    sources = some(3, 2, 7)
    torch.testing.assert_close(mix(sources), sum(sources) / 3)
    mix(sources).square().sum().backward()
    assert mix.query.grad.abs().min() > 0


def test_the_scale_of_a_source_changes_its_part_and_not_its_weight():
    w, sources = normal(7), some(3, 2, 7)
    larger = [sources[0], 1000 * sources[1], sources[2]]
    alpha = source_weights(w, sources, 0.0)
    torch.testing.assert_close(source_weights(w, larger, 0.0), alpha)
    more = mix_sources(w, larger, 0.0) - mix_sources(w, sources, 0.0)
    torch.testing.assert_close(more, 999 * alpha[1, :, None] * sources[1])


def test_the_order_of_sources_and_the_other_tokens_do_not_matter():
    w, sources = normal(7), some(4, 2, 3, 7)
    h = mix_sources(w, sources, 1e-5)
    torch.testing.assert_close(mix_sources(w, sources[::-1], 1e-5), h)
    token = mix_sources(w, [s[1, 2] for s in sources], 1e-5)
    torch.testing.assert_close(token, h[1, 2])


def test_a_large_score_does_not_overflow():
    w, sources = 1e4 * normal(7), some(3, 2, 7)
    best = source_weights(w, sources, 1e-5).argmax(0)
    want = torch.stack([sources[best[b]][b] for b in range(2)])
    torch.testing.assert_close(mix_sources(w, sources, 1e-5), want)
    o, lse = read_blocks(w[None], sources[:2], 1e-5)
    torch.testing.assert_close(read_partial(w, o[0], lse[0], sources[2], 1e-5), want)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("N", [1, 4])
def test_two_phases_of_one_block(batch, N):
    w, sources = normal(5, 7), some(N + 1, *batch, 7)
    o, lse = read_blocks(w, sources[:N], 1e-5)
    assert o.shape == (5, *batch, 7) and lse.shape == (5, *batch)
    alpha = source_weights(w, sources, 1e-5)
    assert alpha.shape == (5, N + 1, *batch)
    for i in range(5):
        torch.testing.assert_close(o[i], mix_sources(w[i], sources[:N], 1e-5))
        h = read_partial(w[i], o[i], lse[i], sources[N], 1e-5)
        torch.testing.assert_close(h, mix_sources(w[i], sources, 1e-5), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(alpha[i], source_weights(w[i], sources, 1e-5))


def test_gradcheck():
    w, *sources = [x.requires_grad_() for x in (normal(3), *some(3, 2, 3))]
    queries = normal(2, 3, seed=3).requires_grad_()
    check = torch.autograd.gradcheck
    assert check(lambda w, *s: mix_sources(w, s, 0.1), (w, *sources))
    assert check(lambda w, *s: source_weights(w, s, 0.1), (queries, *sources))
    assert check(lambda w, *s: read_blocks(w, s, 0.1), (queries, *sources))

    def phases(w, *s):
        o, lse = read_blocks(w[None], s[:2], 0.1)
        return read_partial(w, o[0], lse[0], s[2], 0.1)

    assert check(phases, (w, *sources))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype):
    """Mixed in float32: the squares of 300 overflow float16. h is rounded once."""
    sources = [(300 * s).to(dtype) for s in some(3, 2, 64)]
    w = normal(64, dtype=torch.float32)
    h = mix_sources(w, sources, 1e-5)
    assert h.dtype == dtype and source_weights(w, sources, 1e-5).dtype == torch.float32
    assert torch.equal(h, mix_sources(w, [s.float() for s in sources], 1e-5).to(dtype))
    w = w.to(dtype)
    alpha = source_weights(w, sources, 1e-5)
    assert torch.equal(alpha, source_weights(w.float(), sources, 1e-5))
    assert torch.equal(
        read_blocks(w[None], sources, 1e-5)[0][0].to(dtype), mix_sources(w, sources, 1e-5)
    )


def test_a_bfloat16_mixer_scores_in_float32():
    mix = AttentionResidual(64)
    mix.query.data = normal(64, dtype=torch.bfloat16).float()
    mix.norm.weight.data = normal(64, seed=3, dtype=torch.bfloat16).float()
    w = mix.score_vector()
    assert torch.equal(mix.bfloat16().score_vector(), w) and w.dtype == torch.float32


def test_autocast_does_not_narrow_the_mixing():
    w, sources = normal(64, dtype=torch.float32), some(3, 2, 64, dtype=torch.float32)
    want = [mix_sources(w, sources, 1e-5), *read_blocks(w[None], sources, 1e-5)]
    with torch.autocast("cpu", torch.bfloat16):
        got = [mix_sources(w, sources, 1e-5), *read_blocks(w[None], sources, 1e-5)]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)


def test_the_callers_sources_are_unchanged():
    sources, mix = some(3, 2, 5), AttentionResidual(5).double()
    before = [s.clone() for s in sources]
    mix(sources)
    assert all(torch.equal(a, b) for a, b in zip(sources, before, strict=True))


@pytest.mark.parametrize(
    "sources, message",
    [
        ([], "^sources must hold at least one tensor .*, got none"),
        ([torch.tensor(1.0)], r"^sources\[0\] has shape \(\), expected \[..., D\]"),
        ([torch.ones(2, 3), torch.ones(1, 3)], r"^sources\[1\] has shape \(1, 3\).*\(2, 3\)"),
        (
            [torch.ones(3), torch.ones(3).double()],
            r"^sources\[1\] is torch.float64 .*torch.float32",
        ),
        ([torch.ones(3), torch.ones(3, device="meta")], r"^sources\[1\] is .* on meta, .* on cpu"),
        ([torch.ones(2, 4)], r"^w has shape \(3,\), expected .* D = 4"),
    ],
)
@pytest.mark.parametrize("f", [source_weights, mix_sources, read_blocks])
def test_bad_sources_are_named(f, sources, message):
    with pytest.raises(ValueError, match=message):
        f(torch.ones(3), sources, 1e-5)


def test_bad_arguments_are_named():
    for w in (torch.tensor(1.0), torch.ones(1, 2, 3), torch.ones(2, 1)):
        with pytest.raises(ValueError, match=r"^w has shape .* expected \[D\] or \[S, D\]"):
            source_weights(w, [torch.ones(3)], 1e-5)
    o, w = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"^w has shape \(2, 3\), expected \[D\]$"):
        mix_sources(w, [torch.ones(3)], 1e-5)
    with pytest.raises(ValueError, match=r"^w has shape \(2, 3\), expected \[D\]$"):
        read_partial(w, o, o[:, 0], o, 1e-5)
    with pytest.raises(ValueError, match=r"^lse has shape \(2, 3\), expected \[2\] as o"):
        read_partial(torch.ones(3), o, o, o, 1e-5)
    with pytest.raises(
        ValueError, match=r"^sources must be floating point tensors, got torch.int64"
    ):
        mix_sources(torch.zeros(2), [torch.tensor([1, 2]), torch.tensor([2, 3])], 1e-5)
    with pytest.raises(ValueError, match=r"^o has shape \(2, 3\), expected \[1, 3\] as partial"):
        read_partial(torch.ones(3), o, o[:, 0], o[:1], 1e-5)
    for size in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"^hidden_size must be an integer >= 1, got {size!r}"):
            AttentionResidual(size)

"""A stack of sublayers that read the depth, in both its forms."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_tensors import normal
from torch import nn

from gpt2_to_k3.layers import (
    AttentionResidual,
    attention_residuals,
    two_phase_attention_residuals,
)

F64 = torch.float64
FORMS = {"direct": attention_residuals, "two phases": two_phase_attention_residuals}


def make_stack(L, D, dtype=F64, query=2.0):
    """L sublayers x -> tanh(W x) and L + 1 mixers, with norm weights that matter."""
    torch.manual_seed(0)
    sublayers = [nn.Sequential(nn.Linear(D, D), nn.Tanh()).to(dtype) for _ in range(L)]
    mixers = [AttentionResidual(D).to(dtype) for _ in range(L + 1)]
    for mix in mixers:
        mix.query.data.normal_(std=query)
        mix.norm.weight.data.uniform_(0.5, 2)
    return sublayers, mixers


def by_definition(x, sublayers, mixers, block_size):
    """Section 4 of the paper, from all outputs so far: sums of whole blocks and of the open one."""
    outputs = []

    def read(mix):
        blocks = [outputs[i : i + block_size] for i in range(0, len(outputs), block_size)]
        s = torch.stack([x, *(torch.stack(b).sum(0) for b in blocks)])
        keys = s / (s.square().mean(-1, keepdim=True) + mix.norm.eps).sqrt() * mix.norm.weight
        alpha = torch.exp((keys * mix.query).sum(-1))
        return (alpha[..., None] * s).sum(0) / alpha.sum(0)[..., None]

    for f, mix in zip(sublayers, mixers, strict=False):
        outputs.append(f(read(mix)))
    return read(mixers[-1])


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=40, deadline=None)
@given(L=st.integers(0, 9), block_size=st.integers(1, 11), B=st.integers(0, 3))
def test_a_stack_is_its_definition(form, L, block_size, B):
    x = normal(B, 2, 5)
    stack = make_stack(L, 5)
    with torch.no_grad():
        want = by_definition(x, *stack, block_size)
        h = FORMS[form](x, *stack, block_size)
    torch.testing.assert_close(h, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_the_sources_that_each_sublayer_sees(form):
    """K3 in small: 7 sublayers in blocks of 3. With zero queries each reading is a mean."""
    sublayers, mixers = [], [AttentionResidual(1).double() for _ in range(8)]
    read = []
    for i in range(7):
        sublayers.append(lambda h, i=i: read.append(h.item()) or torch.full_like(h, 10.0**i))
    out = FORMS[form](torch.zeros(1, dtype=F64) + 0.5, sublayers, mixers, 3)
    want = [0.5, 1.5 / 2, 11.5 / 2]
    want += [111.5 / 2, 1111.5 / 3, 11111.5 / 3]
    want += [111111.5 / 3]
    torch.testing.assert_close(read, want)
    torch.testing.assert_close(out.item(), 1111111.5 / 4)


def test_k3s_schedule():
    """As NeMo and mlx-lm: at each 12th layer the running sum is pushed, after the first mix."""
    L, size = 93, 12
    sublayers, mixers = make_stack(2 * L, 3)
    x = normal(2, 3)
    blocks, p, seen = [], x, []

    def mix(i):
        sources = blocks if p is None else [*blocks, p]
        seen.append(len(sources))
        return mixers[i](sources)

    with torch.no_grad():
        for layer in range(L):
            h = mix(2 * layer)
            if layer % size == 0:
                blocks, p = [*blocks, p], None
            y = sublayers[2 * layer](h)
            p = y if p is None else p + y
            p = p + sublayers[2 * layer + 1](mix(2 * layer + 1))
        want = mix(2 * L)
        for f in FORMS.values():
            torch.testing.assert_close(f(x, sublayers, mixers, 24), want, rtol=1e-11, atol=1e-12)
    assert len(blocks) == 8 and seen[-1] == 9 and len(mixers) == 187


def test_one_block_has_the_embedding_and_the_sum_of_all_outputs():
    sublayers, mixers = make_stack(4, 5)
    x, outputs = normal(2, 5), []
    kept = [lambda h, f=f: outputs.append(f(h)) or outputs[-1] for f in sublayers]
    h = attention_residuals(x, kept, mixers, 4)
    torch.testing.assert_close(h, mixers[-1]([x, sum(outputs)]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 9])
def test_every_weight_counts_but_the_first_mixers(form, block_size):
    """The first sublayer sees the embedding alone, whatever the query."""
    sublayers, mixers = make_stack(5, 4)
    x = normal(2, 3, 4)
    modules = nn.ModuleList([*sublayers, *mixers])
    h = FORMS[form](x, sublayers, mixers, block_size)
    (h * normal(2, 3, 4, seed=2)).sum().backward()
    for name, p in modules.named_parameters():
        first = name.startswith("5.")
        assert (p.grad.abs().max() < 1e-12) == first, name
        with torch.no_grad():
            p.mul_(2)
            moved = (FORMS[form](x, sublayers, mixers, block_size) - h).abs().max()
            p.div_(2)
        assert (moved < 1e-12) == first, name


@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_both_forms_have_the_same_gradients(block_size):
    grads = []
    for f in FORMS.values():
        sublayers, mixers = make_stack(4, 3)
        x = normal(2, 3).requires_grad_()
        f(x, sublayers, mixers, block_size).square().sum().backward()
        modules = nn.ModuleList([*sublayers, *mixers])
        grads.append([x.grad, *(p.grad for p in modules.parameters())])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(form, dtype):
    stack = make_stack(5, 8, dtype)
    h = FORMS[form](normal(2, 8, dtype=dtype), *stack, 2)
    assert h.dtype == dtype
    wide = [m.double() for m in stack[0]], [m.double() for m in stack[1]]
    want = by_definition(normal(2, 8, dtype=dtype).double(), *wide, 2)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(h.double(), want, rtol=20 * eps, atol=20 * eps)


@pytest.mark.parametrize("form", FORMS)
def test_the_callers_tensors_are_unchanged(form):
    x, (sublayers, mixers) = normal(2, 5), make_stack(4, 5)
    kept = [lambda h, f=f: f(h).detach() for f in sublayers]
    FORMS[form](x, kept, mixers, 2)
    assert torch.equal(x, normal(2, 5)) and len(kept) == 4


@pytest.mark.parametrize("form", FORMS)
def test_bad_stacks_are_named(form):
    sublayers, mixers = make_stack(3, 4)
    f = partial(FORMS[form], normal(4), sublayers)
    for size in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match=f"^block_size must be an integer >= 1, got {size!r}"):
            f(mixers, size)
    for wrong in (mixers[:-1], [*mixers, mixers[0]]):
        with pytest.raises(ValueError, match=f"^mixers has length {len(wrong)}, expected 4: one"):
            f(wrong, 2)
    if form == "two phases":
        with pytest.raises(ValueError, match=r"^mixers must have one eps, got \[1e-06, 1e-05\]"):
            f([*mixers[:-1], AttentionResidual(4, eps=1e-6)], 2)

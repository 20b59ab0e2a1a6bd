import pytest
import torch
import torch.nn.functional as F

from gpt2_to_k3.layers import ShortConvolution

B, T, D = 2, 9, 5


def make(kernel_size=4, dtype=torch.float64):
    torch.manual_seed(0)
    conv = ShortConvolution(D, kernel_size)
    conv.weight.data.normal_()
    return conv.to(dtype)


@pytest.fixture
def x():
    return torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def in_pieces(conv, x, lengths):
    ys, tail = [], None
    for piece in x.split(lengths, 1):
        y, tail = conv(piece, tail)
        ys.append(y)
    return torch.cat(ys, 1), tail


@pytest.mark.parametrize("kernel_size", [1, 2, 3, 4, 7, 12])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, T])
def test_it_is_torchs_causal_depthwise_convolution_then_silu(x, kernel_size, length):
    conv, x = make(kernel_size), x[:, :length]
    before = torch.zeros(B, kernel_size - 1, D, dtype=torch.float64)
    seen = torch.cat([before, x], 1)
    y, tail = conv(x)
    assert torch.equal(tail, seen[:, length:]) and tail.shape == before.shape
    assert y.shape == x.shape
    if length:
        peer = torch.nn.Conv1d(D, D, kernel_size, groups=D, bias=False, dtype=torch.float64)
        peer.load_state_dict(conv.state_dict())
        torch.testing.assert_close(y, F.silu(peer(seen.mT)).mT)


def test_by_hand():
    conv = ShortConvolution(1, 2)
    conv.weight.data = torch.tensor([[[10.0, 1.0]]])  # 10 times the last token, plus this one
    y, tail = conv(torch.tensor([[[1.0], [2.0], [3.0]]]))
    torch.testing.assert_close(y, F.silu(torch.tensor([[[1.0], [12.0], [23.0]]])))
    assert tail.item() == 3


SPLITS = [[n, T - n] for n in range(T + 1)]
SPLITS += [[1] * T, [2, 0, 0, 3, 4], [0, 1, 1, 1, 0, 6], [3, 3, 3], [4, 1, 4]]


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7, 12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_every_split_equals_one_pass(x, kernel_size, dtype, split):
    conv, x = make(kernel_size, dtype), x.to(dtype)
    (y, tail), (want, want_tail) = in_pieces(conv, x, split), conv(x)
    assert y.dtype == tail.dtype == dtype and torch.equal(tail, want_tail)
    eps = torch.finfo(dtype).eps  # SiLU may round otherwise in a tensor of another size
    torch.testing.assert_close(y, want, rtol=2 * eps, atol=eps)


def test_a_later_token_does_not_move_an_earlier_output(x):
    changed = x.clone()
    changed[:, 5] += 1
    before, after = make()(x)[0], make()(changed)[0]
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:9] != after[:, 5:9]).all()


def test_channels_and_sequences_are_on_their_own(x):
    changed = x.clone()
    changed[1, :, 2] += 1
    same = make()(x)[0] == make()(changed)[0]
    assert not same[1, :, 2].any()
    same[1, :, 2] = True
    assert same.all()


def test_the_callers_tensors_are_unchanged_and_not_aliased(x):
    conv = make()
    tail = torch.ones(B, 3, D, dtype=torch.float64)
    kept = x.clone(), tail.clone()
    for piece in (x, x[:, :1], x[:, :0]):
        _, new = conv(piece, tail)
        new.zero_()
        assert torch.equal(x, kept[0]) and torch.equal(tail, kept[1])


def test_a_tail_does_not_keep_the_sequence_alive(x):
    _, tail = make()(x)
    assert tail.untyped_storage().nbytes() == tail.nbytes == B * 3 * D * 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_taps_are_summed_in_float32(x, dtype):
    conv, x = make(dtype=dtype), x.to(dtype)
    want = conv.float()(x.float())[0].to(dtype)
    assert torch.equal(conv.to(dtype)(x)[0], want)


def test_gradients_through_a_split(x):
    conv = make()
    inputs = [x[:, :5].clone().requires_grad_(), conv.weight]

    def f(x, weight):
        return in_pieces(
            lambda *a: torch.func.functional_call(conv, {"weight": weight}, a), x, [2, 3]
        )

    assert torch.autograd.gradcheck(f, inputs)


def test_the_weight_is_as_conv1ds():
    torch.manual_seed(0)
    weight, peer = ShortConvolution(1000, 4).weight, torch.nn.Conv1d(1000, 1000, 4, groups=1000)
    assert weight.shape == peer.weight.shape == (1000, 1, 4)
    assert 0.49 < weight.max() <= 0.5 and -0.5 <= weight.min() < -0.49
    assert len(list(ShortConvolution(3).parameters())) == 1 and not list(
        ShortConvolution(3).buffers()
    )


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x, tail: (x[..., :-1], tail), r"^x has shape \(2, 9, 4\), expected \[B, T, 5\]"),
        (lambda x, tail: (x[0], tail), r"^x has shape \(9, 5\)"),
        (lambda x, tail: (x, tail[:, 1:]), r"^tail has shape \(2, 2, 5\), expected \[2, 3, 5\]"),
        (lambda x, tail: (x, tail[:1]), r"^tail has shape \(1, 3, 5\), expected \[2, 3, 5\]"),
        (lambda x, tail: (x, tail[..., :1]), r"^tail has shape \(2, 3, 1\)"),
        (
            lambda x, tail: (x, tail.float()),
            "^tail is torch.float32 on cpu, but x is torch.float64",
        ),
        (
            lambda x, tail: (x, tail.to("meta")),
            "^tail is torch.float64 on meta, but x is .* on cpu",
        ),
    ],
)
def test_bad_arguments_are_named(x, change, message):
    with pytest.raises(ValueError, match=message):
        make()(*change(x, torch.zeros(B, 3, D, dtype=torch.float64)))


@pytest.mark.parametrize("name", ["dim", "kernel_size"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_a_bad_size_is_named(name, size):
    with pytest.raises(ValueError, match=f"^{name} must be an integer >= 1, got {size!r}"):
        ShortConvolution(**({"dim": 5, "kernel_size": 4} | {name: size}))

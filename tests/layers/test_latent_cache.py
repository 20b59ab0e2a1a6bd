import pytest
import torch

from gpt2_to_k3.layers import LatentCache

B, T, DIM = 2, 7, 11
F64 = torch.float64


def test_the_latent_cache_returns_everything_held_in_order():
    cache = LatentCache(B, T, DIM, dtype=F64, device="cpu")
    rows = torch.randn(B, T, DIM, dtype=F64)
    for start, end in [(0, 3), (3, 3), (3, 4), (4, T)]:
        assert torch.equal(cache.append(rows[:, start:end]), rows[:, :end])
        assert cache.length == end and cache.used_bytes == B * end * DIM * 8
    assert cache.nbytes == cache.rows.untyped_storage().nbytes() == B * T * DIM * 8
    assert (cache.batch_size, cache.capacity) == (B, T)


@pytest.mark.parametrize(
    "rows, message",
    [
        (torch.zeros(B, 1, DIM - 1), r"rows has shape \(2, 1, 10\), expected \[2, any, 11\]"),
        (torch.zeros(B + 1, 1, DIM), r"rows has shape \(3, 1, 11\)"),
        (torch.zeros(B, DIM), r"rows has shape \(2, 11\)"),
        (torch.zeros(B, 1, 1, DIM), r"rows has shape \(2, 1, 1, 11\)"),
        (torch.zeros(B, 1, DIM, dtype=F64), "rows has dtype torch.float64, expected torch.float32"),
        (torch.zeros(B, 1, DIM, device="meta"), "rows is on meta, expected cpu"),
        (torch.zeros(B, 8, DIM), "cache overflow: capacity 7, length 0, new tokens 8"),
    ],
)
def test_the_latent_cache_refuses_what_does_not_fit(rows, message):
    cache = LatentCache(B, T, DIM, dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=f"^{message}"):
        cache.append(rows)
    assert cache.length == 0 and not cache.rows.any()


@pytest.mark.parametrize("name", ["batch_size", "capacity", "dim"])
def test_bad_sizes_of_a_latent_cache_are_refused(name):
    sizes = dict(batch_size=B, capacity=T, dim=DIM)
    options = dict(dtype=torch.float32, device="cpu")
    for bad in (-1, 1.0, True):
        with pytest.raises(ValueError, match=f"^{name} must be an integer >= 0, got {bad}"):
            LatentCache(**(sizes | {name: bad}), **options)
    with pytest.raises(ValueError, match="^dtype must be a floating point dtype, got torch.int64"):
        LatentCache(**sizes, dtype=torch.int64, device="cpu")

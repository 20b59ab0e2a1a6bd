"""Sizes, names and first values of the weights of the delta-rule layers, and their cache's bytes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from gpt2_to_k3.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention, RecurrentCache

D, H, K = 12, 3, 5
K3 = partial(KimiDeltaAttention, lower_bound=-5.0, use_full_rank_gate=True)


@pytest.mark.parametrize(
    "make, want",
    [
        (partial(KimiDeltaAttention, 2304, 32, 128), 39_514_272),
        (partial(K3, 7168, 96, 128), 443_740_384),
        (partial(DeltaNet, 2048, 16, 128), 4 * 2048**2 + 3 * 4 * 2048 + 2048 * 16 + 128),
        (
            partial(GatedDeltaNet, 2048, 16, 128, num_v_heads=32),  # Qwen3-Next
            2048 * (2 * 2048 + 3 * 4096 + 64) + 4 * (2 * 2048 + 4096) + 2 * 32 + 128,
        ),
    ],
)
def test_parameter_counts_of_published_layers_on_the_meta_device(make, want):
    with torch.device("meta"):
        layer = make()
    assert sum(p.numel() for p in layer.parameters()) == want
    assert {p.device.type for p in layer.parameters()} == {"meta"}


def test_the_names_are_the_fields():
    shared = {f"{n}_{kind}.weight" for n in "qkv" for kind in ("proj", "conv1d")}
    shared |= {"b_proj.weight", "o_norm.weight", "o_proj.weight"}
    decay, low = {"A_log", "dt_bias"}, {"g_a_proj.weight", "g_b_proj.weight"}
    kda = shared | decay | {"f_a_proj.weight", "f_b_proj.weight"}
    assert set(DeltaNet(D, H, K).state_dict()) == shared
    gated = shared | decay | {"a_proj.weight", "g_proj.weight"}
    assert set(GatedDeltaNet(D, H, K).state_dict()) == gated
    assert set(KimiDeltaAttention(D, H, K).state_dict()) == kda | low
    assert set(K3(D, H, K).state_dict()) == kda | {"g_proj.weight"}


@pytest.mark.parametrize("make, low", [(GatedDeltaNet, 0.01), (KimiDeltaAttention, 1), (K3, None)])
def test_the_decay_starts_as_published(make, low):
    """C53: dt from 1e-3 to 0.1, its logarithm uniform; rates to 16, or 1 in K3."""
    torch.manual_seed(0)
    previous = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        layer = make(4, 2000, 2)
    finally:
        torch.set_default_dtype(previous)
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    rate, dt = layer.A_log.exp(), F.softplus(layer.dt_bias)
    if low is None:
        assert (layer.A_log == 0).all()
    else:
        assert low <= rate.min() < low + 0.1 and 15.9 < rate.max() < 16.001
        assert abs(rate.mean() - (low + 16) / 2) < 0.4
    assert 0.999e-3 < dt.min() < 1.02e-3 and 0.098 < dt.max() < 0.1001
    assert abs(dt.log().mean().item() - -4.605) < 0.1  # the middle of log 1e-3 and log 0.1


def test_k3s_decay_has_a_floor_and_kimi_linears_has_none():
    """One strong token of a large gate: K3 keeps e^-5 of the state, Kimi Linear nothing."""
    for layer, kept in ((K3(D, H, K), torch.tensor(-5.0).exp()), (KimiDeltaAttention(D, H, K), 0)):
        layer.dt_bias.data.fill_(100.0)
        layer.b_proj.weight.data.fill_(-100.0)  # beta 0: nothing is written
        cache = layer.init_cache(1)
        cache.S = torch.ones(1, H, K, K)
        with torch.no_grad():
            layer(torch.ones(1, 1, D), cache)
        torch.testing.assert_close(cache.S, torch.full_like(cache.S, kept))


def test_a_kimi_linear_layer_keeps_2_mib_and_its_tails():
    with torch.device("meta"):
        cache = KimiDeltaAttention(2304, 32, 128).bfloat16().init_cache(1)
    assert cache.nbytes == 4 * 32 * 128**2 + 2 * 3 * 3 * 4096


@pytest.mark.parametrize("make", [DeltaNet, GatedDeltaNet, KimiDeltaAttention, K3])
@pytest.mark.parametrize("size", ["hidden_size", "num_heads", "head_dim"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_a_bad_size_is_named(make, size, value):
    with pytest.raises(ValueError, match=f"^{size} must be an integer >= 1, got {value!r}"):
        make(**(dict(hidden_size=D, num_heads=H, head_dim=K) | {size: value}))


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="^num_v_heads=4 is not a multiple of num_heads=3"):
        GatedDeltaNet(D, 3, K, num_v_heads=4)
    with pytest.raises(ValueError, match="^head_v_dim must be an integer >= 1, got 0"):
        GatedDeltaNet(D, 3, K, head_v_dim=0)
    for bound in (0, 5.0, float("nan")):
        with pytest.raises(ValueError, match=f"^lower_bound must be negative or None, got {bound}"):
            KimiDeltaAttention(D, H, K, lower_bound=bound)
    sizes = dict(batch_size=1, num_heads=2, key_dim=3, value_dim=4, conv_dims=[5], kernel_size=4)
    options = dict(dtype=torch.float32, device="cpu")
    for name in ("batch_size", "num_heads", "key_dim", "value_dim", "kernel_size"):
        with pytest.raises(ValueError, match=f"^{name} must be an integer"):
            RecurrentCache(**(sizes | {name: -1}), **options)
    with pytest.raises(ValueError, match=r"^conv_dims\[1\] must be an integer >= 1, got 0"):
        RecurrentCache(**(sizes | {"conv_dims": [5, 0]}), **options)
    with pytest.raises(ValueError, match="^dtype must be a floating point dtype, got torch.int8"):
        RecurrentCache(**sizes, **(options | {"dtype": torch.int8}))

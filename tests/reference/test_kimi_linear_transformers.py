"""KimiLinear against transformers' KimiLinearForCausalLM; MLA alone too.

transformers keeps A_log as [1, 1, H, 1], the three convolutions as one, and gate_proj and up_proj
of all experts as one.
"""

from types import SimpleNamespace

import pytest
import torch
from hybrid_tests import (  # noqa: F401
    B,
    T,
    linear_attn_config,
    test_one_pass,
    test_prefill_and_decode_equal_their_one_pass,
    test_prefill_and_rest_equal_their_one_pass_at_every_split,
    test_the_choice_of_experts_is_no_matter_of_rounding,
)

from gpt2_to_k3.layers import MultiHeadLatentAttention
from gpt2_to_k3.models import KimiLinear, KimiLinearConfig
from gpt2_to_k3.ops import kda_log_decay

# Every kind of layer, also MLA with a dense feed-forward; no two widths are equal.
CONFIG = KimiLinearConfig(
    vocab_size=97, n_ctx=80, hidden_size=20, num_hidden_layers=6, full_attn_layers=(2, 4, 6),
    linear_num_heads=3, linear_head_dim=8, num_attention_heads=5, kv_lora_rank=14,
    qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7, intermediate_size=37,
    first_k_dense_replace=2, moe_intermediate_size=11, num_experts=9, num_experts_per_token=3,
    num_shared_experts=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    try:
        import transformers
        import transformers.models.kimi_linear.modeling_kimi_linear as kimi
    except ImportError:
        pytest.fail("KimiLinearForCausalLM is missing: pip install transformers", pytrace=False)
    return SimpleNamespace(kimi=kimi, DynamicCache=transformers.DynamicCache)


def randomise(module):
    """Weights for which decays, gates and the experts chosen differ much from token to token."""
    for name, x in module.state_dict().items():
        x.normal_(std=x.shape[-1] ** -0.5 if x.ndim > 1 else 0.3)
        if name.endswith(("embed_tokens.weight", "conv1d.weight")):
            x.normal_()
        elif name.endswith(("f_b_proj.weight", "b_proj.weight", "mlp.gate.weight")):
            x.mul_(2)
        elif name.endswith("dt_bias"):
            x.sub_(2)
        elif name.endswith("norm.weight"):
            x.add_(1)
    return module.eval()


def converted(weights):
    """Their state_dict under our names."""
    ours = {}
    for name, x in weights.items():
        name = name.removeprefix("model.").replace("forget_gate.", "")
        if name.endswith("A_log"):
            ours[name] = x.flatten()
        elif name.endswith("self_attn.conv1d.weight"):
            for n, w in zip("qkv", x.chunk(3), strict=True):
                ours[name.replace("conv1d", f"{n}_conv1d")] = w
        elif name.endswith("gate_up_proj"):
            for n, w in zip(("gate", "up"), x.chunk(2, dim=1), strict=True):
                ours[name.replace("gate_up", n)] = w
        else:
            ours[name] = x
    return ours


def their_config(kimi, config):
    """config as the release writes it: layers in linear_attn_config, counted from 1."""
    same = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads kv_lora_rank "
        "qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size first_k_dense_replace "
        "moe_intermediate_size num_experts num_experts_per_token num_shared_experts "
        "routed_scaling_factor"
    ).split()
    return kimi.KimiLinearConfig(
        **{name: getattr(config, name) for name in same},
        num_key_value_heads=config.num_attention_heads,
        linear_attn_config=linear_attn_config(config),
        model_max_length=config.n_ctx,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        experts_implementation="eager",  # the default's widths must be multiples of 16 bytes
    )


@pytest.fixture(scope="module")
def pair(transformers):
    """Our model, and theirs with the same random weights."""
    torch.manual_seed(0)
    config = their_config(transformers.kimi, CONFIG)
    theirs = randomise(transformers.kimi.KimiLinearForCausalLM(config))
    ours = KimiLinear(CONFIG)
    ours.load_state_dict(converted(theirs.state_dict()))
    return ours, theirs


@pytest.fixture(scope="module")
def want(pair, tokens):
    """Their logits of one pass without a cache."""
    with torch.no_grad():
        return pair[1](tokens, use_cache=False).logits


@torch.no_grad()
def test_prefill_and_decode_equal_theirs(transformers, pair, tokens, close):
    """Piece by piece, both with their caches; what MLA keeps is the same as well."""
    ours, theirs = pair
    their_cache, cache = transformers.DynamicCache(config=theirs.config), ours.init_cache(B)
    for piece in tokens.split([60] + [1] * (T - 60), 1):
        close(ours(piece, cache), theirs(piece, cache=their_cache).logits)
    for number in CONFIG.full_attn_layers:
        layer = their_cache.layers[number - 1]
        rows = torch.cat([layer.keys, layer.values], -1).squeeze(1)
        close(cache[number - 1].rows[:, :T], rows)


def test_greedy_ids_equal(pair, tokens):
    ours, theirs = pair
    prompt = tokens[:, :7]
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    want = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    for use_cache in (True, False):
        assert torch.equal(ours.generate(prompt, 20, use_cache=use_cache), want)


def test_gradients_equal(pair, tokens):
    ours, theirs = pair
    grads = []
    for model in pair:
        model.zero_grad()
        logits = model(tokens) if model is ours else model(tokens, use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    got, want = grads[0], converted(grads[1])
    assert got.keys() == want.keys()
    for name, grad in got.items():
        size = want[name].abs().max()
        assert size > 0, name
        torch.testing.assert_close(grad, want[name], rtol=0, atol=2e-4 * size.item(), msg=name)


def test_the_counts_of_weights(pair, transformers):
    ours, theirs = pair
    count = sum(x.numel() for x in theirs.state_dict().values())
    assert ours.num_parameters() == count
    with torch.device("meta"):
        config = their_config(transformers.kimi, KimiLinearConfig.kimi_linear_48b())
        theirs = transformers.kimi.KimiLinearForCausalLM(config)
    assert sum(x.numel() for x in theirs.state_dict().values()) == 49_122_681_728


def test_our_defaults_are_theirs(transformers):
    default = transformers.kimi.KimiLinearConfig()
    ours = KimiLinearConfig.kimi_linear_48b()
    got = their_config(transformers.kimi, ours).to_dict()
    want = default.to_dict()
    # Without linear_attn_config their layers are not the release's 4, 8, ... 24, 27.
    ours_alone = {"linear_attn_config", "layer_types", "first_k_dense_replace"}
    ours_alone |= {"pad_token_id", "bos_token_id", "eos_token_id"}
    for name in want.keys() - ours_alone:
        assert got[name] == want[name], name


@torch.no_grad()
@pytest.mark.parametrize("q_lora_rank", [None, 9])
def test_mla_with_and_without_query_lora(transformers, q_lora_rank, close):
    torch.manual_seed(0)
    sizes = dict(kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7)
    sizes |= dict(q_lora_rank=q_lora_rank)
    config = transformers.kimi.KimiLinearConfig(
        hidden_size=20, num_attention_heads=5, num_key_value_heads=5, num_hidden_layers=1, **sizes
    )
    config._attn_implementation = "eager"
    theirs = randomise(transformers.kimi.KimiLinearAttention(config, 0))
    ours = MultiHeadLatentAttention(20, 5, **sizes, n_ctx=T)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, T, 20)
    hidden = torch.full((T, T), -torch.inf).triu(1)
    want, _ = theirs(x, hidden[None, None])
    assert want.std() > 0.1
    q, rows = ours.project(x)
    for form in (ours.naive, ours.absorbed):
        close(ours.o_proj(form(q, rows).flatten(2)), want)


def test_a_large_gate_has_a_gradient_here_and_none_there(transformers):
    """Their softplus is where(g > 20, g, log(1 + e^g)): backward, 0 times the infinity of the branch not taken is NaN."""
    gate = transformers.kimi.KimiLinearForgetGate(their_config(transformers.kimi, CONFIG))
    H, K = CONFIG.linear_num_heads, CONFIG.linear_head_dim
    torch.nn.init.zeros_(gate.A_log)
    torch.nn.init.constant_(gate.dt_bias, 100.0)
    gate.f_b_proj.weight.data.zero_()
    theirs = gate(torch.randn(1, 1, CONFIG.hidden_size))
    theirs.sum().backward()
    dt_bias = torch.full((H * K,), 100.0, requires_grad=True)
    ours = kda_log_decay(torch.zeros(1, 1, H, K), torch.zeros(H), dt_bias)
    ours.sum().backward()
    assert torch.equal(theirs, ours)  # forward they are the same, -100
    assert torch.equal(dt_bias.grad, torch.full((H * K,), -1.0))
    assert gate.dt_bias.grad.isnan().all(), "mended there: compare the gradients"


def test_rates_keep_32_bits_here_when_a_model_is_made_bfloat16(transformers):
    theirs = transformers.kimi.KimiLinearForgetGate(their_config(transformers.kimi, CONFIG))
    ours = KimiLinear(CONFIG).bfloat16()
    rates = [p for name, p in ours.named_parameters() if name.endswith("A_log")]
    assert rates and all(p.dtype == torch.float32 for p in rates)
    assert theirs.bfloat16().A_log.dtype == torch.bfloat16, "mended there"

"""KimiLinear against transformers' KimiLinearForCausalLM; MLA alone also against mlx-lm's, K3's.

transformers keeps A_log as [1, 1, H, 1], the three convolutions as one, and gate_proj and up_proj
of all experts as one.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gpt2_to_k3.layers import MixtureOfExperts, MultiHeadLatentAttention
from gpt2_to_k3.models import KimiLinear, KimiLinearConfig

B, T = 2, 67  # more than one chunk of KDA
ATOL = 1e-4
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
    full, layers = config.full_attn_layers, range(1, config.num_hidden_layers + 1)
    return kimi.KimiLinearConfig(
        **{name: getattr(config, name) for name in same},
        num_key_value_heads=config.num_attention_heads,
        linear_attn_config=dict(
            kda_layers=[n for n in layers if n not in full],
            full_attn_layers=list(full),
            num_heads=config.linear_num_heads,
            head_dim=config.linear_head_dim,
            short_conv_kernel_size=4,
        ),
        model_max_length=config.n_ctx,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        experts_implementation="eager",  # the default's widths must be multiples of 16 bytes
    )


@pytest.fixture(scope="module")
def pair(transformers):
    """Their model with random weights, and ours with the same."""
    torch.manual_seed(0)
    config = their_config(transformers.kimi, CONFIG)
    theirs = randomise(transformers.kimi.KimiLinearForCausalLM(config))
    ours = KimiLinear(CONFIG)
    ours.load_state_dict(converted(theirs.state_dict()))
    return theirs, ours


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(97, (B, T), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def want(pair, tokens):
    """Their logits of one pass without a cache."""
    with torch.no_grad():
        return pair[0](tokens, use_cache=False).logits


@pytest.fixture
def close(request):
    def check(got, want):
        request.node.user_properties.append(
            ("compared", {"tensors": 1, "logits": (got - want).abs().max().item()})
        )
        torch.testing.assert_close(got, want, rtol=0, atol=ATOL)

    return check


@torch.no_grad()
def run(model, tokens, lengths):
    cache = model.init_cache(len(tokens), tokens.shape[1])
    return torch.cat([model(piece, cache) for piece in tokens.split(lengths, dim=1)], dim=1)


def test_one_pass(pair, tokens, want, close):
    assert want.std() > 0.5
    close(pair[1](tokens), want)


def test_the_choice_of_experts_is_no_matter_of_rounding(pair, tokens):
    """Else a difference of 1e-6 could become one of 1. And the choice is not always the same."""
    margins, used = [], []

    def look(router, inputs, outputs):
        s = (inputs[0] @ router.weight.T).sigmoid() + router.e_score_correction_bias
        best = s.topk(router.top_k + 1).values
        margins.append((best[:, -2] - best[:, -1]).min().item())
        used.append(len(outputs[1].unique()))

    routers = [m.gate for m in pair[1].modules() if isinstance(m, MixtureOfExperts)]
    hooks = [router.register_forward_hook(look) for router in routers]
    pair[1](tokens)
    for hook in hooks:
        hook.remove()
    assert len(margins) == 4 and min(margins) > 1e-5, margins
    assert min(used) > 6, used


@pytest.mark.parametrize("n", range(T + 1))
def test_prefill_and_rest_equal_their_one_pass_at_every_split(pair, tokens, want, n, close):
    close(run(pair[1], tokens, [n, T - n]), want)


@pytest.mark.parametrize("prefill", [0, 1, 2, 3, 4, 63, 64, 65])
def test_prefill_and_decode_equal_their_one_pass(pair, tokens, want, prefill, close):
    close(run(pair[1], tokens, [prefill] + [1] * (T - prefill)), want)


@torch.no_grad()
def test_prefill_and_decode_equal_theirs(transformers, pair, tokens, close):
    """Piece by piece, both with their caches; what MLA keeps is the same as well."""
    theirs, ours = pair
    their_cache, cache = transformers.DynamicCache(config=theirs.config), ours.init_cache(B)
    for piece in tokens.split([60] + [1] * (T - 60), 1):
        close(ours(piece, cache), theirs(piece, cache=their_cache).logits)
    for number in CONFIG.full_attn_layers:
        layer = their_cache.layers[number - 1]
        rows = torch.cat([layer.keys, layer.values], -1).squeeze(1)
        close(cache[number - 1].rows[:, :T], rows)


def test_greedy_ids_equal(pair, tokens):
    theirs, ours = pair
    prompt = tokens[:, :7]
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    want = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    for use_cache in (True, False):
        assert torch.equal(ours.generate(prompt, 20, use_cache=use_cache), want)


def test_gradients_equal(pair, tokens):
    theirs, ours = pair
    grads = []
    for model in pair:
        model.zero_grad()
        logits = model(tokens) if model is ours else model(tokens, use_cache=False).logits
        torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    want, got = converted(grads[0]), grads[1]
    assert got.keys() == want.keys()
    for name, grad in got.items():
        size = want[name].abs().max()
        assert size > 0, name
        torch.testing.assert_close(grad, want[name], rtol=0, atol=2e-4 * size.item(), msg=name)


def test_the_counts_of_weights(pair, transformers):
    theirs, ours = pair
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


@torch.no_grad()
def test_gated_mla_of_k3_against_mlx(close):
    try:
        import mlx.core as mx
        from mlx_lm.models import kimi_k3
        from mlx_lm.models.cache import KVCache
    except ImportError:
        pytest.fail('mlx is missing: pip install "mlx[cpu]" mlx-lm', pytrace=False)
    mx.set_default_device(mx.cpu)
    mx.disable_compile()  # that would call a C++ compiler
    torch.manual_seed(0)
    sizes = dict(kv_lora_rank=14, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=7)
    ours = MultiHeadLatentAttention(20, 5, **sizes, q_lora_rank=9, output_gate=True, n_ctx=16)
    weights = dict(randomise(ours).state_dict())
    W_k, W_v = weights.pop("kv_b_proj.weight").unflatten(0, (5, 13)).split([6, 7], 1)
    weights |= {"embed_q.weight": W_k.mT, "unembed_out.weight": W_v}
    args = kimi_k3.TextArgs(
        hidden_size=20, num_attention_heads=5, q_lora_rank=9, mla_use_output_gate=True, **sizes
    )
    theirs = kimi_k3.KimiK3MLAAttention(args)
    theirs.load_weights([(n, mx.array(w.contiguous().numpy())) for n, w in weights.items()])
    x = torch.randn(B, 9, 20)
    their_cache, cache = KVCache(), ours.init_cache(B)
    for piece in x.split([5, 1, 1, 2], 1):
        seen, new = cache.length, piece.shape[1]
        mask = mx.array(torch.ones(new, seen + new).tril(seen).bool().numpy())
        want = theirs(mx.array(piece.numpy()), mask=mask, cache=their_cache)
        want = torch.from_numpy(np.array(want))
        assert want.std() > 0.1
        close(ours(piece, cache), want)

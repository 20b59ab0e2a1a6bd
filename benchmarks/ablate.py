"""What each piece of a small Kimi K3 is worth: trained without it from the start, on the course's own prose.

All variants of one seed see the same batches, for the same number of steps.

usage: python benchmarks/ablate.py [--steps N] [--seeds N] [--only NAME ...] [--save FILE]
"""

import argparse
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
import torch.nn.functional as F
from record import write
from torch import nn

from gpt2_to_k3.lab.text import byte_batches, prose_bytes
from gpt2_to_k3.lab.training import train
from gpt2_to_k3.layers import KimiDeltaAttention, LatentMoE, ShortConvolution
from gpt2_to_k3.models import KimiK3, KimiK3Config

BATCH, LENGTH, LR = 16, 64, 1e-2


class SumOverDepth(nn.Module):
    """GPT-2's way to read the depth: everything before, added up."""

    def forward(self, sources):
        return sum(sources[1:], sources[0])


def modules(model, kind):
    return [m for m in model.modules() if isinstance(m, kind)]


def without_decay(model):
    for layer in modules(model, KimiDeltaAttention):
        layer.lower_bound = -1e-6  # the fastest channel keeps all but a millionth at each token
    return model


def without_convolution(model):
    for c in modules(model, ShortConvolution):
        c.weight.data.zero_()[..., -1] = 1.0  # the token itself
        c.weight.requires_grad_(False)
    return model


def without_routed_experts(model):
    for layer in model.layers:
        if isinstance(layer.mlp, LatentMoE):
            layer.mlp = layer.mlp.shared_experts
    return model


def sum_over_depth(model):
    for layer in model.layers:
        layer.self_attention_res = layer.mlp_res = SumOverDepth()
    model.output_attn_res = SumOverDepth()
    return model


def variants():
    """Name -> (configuration, what is changed in the model made of it)."""
    mini, layers = KimiK3Config.mini(), KimiK3Config.mini().num_hidden_layers
    return {
        "all pieces": (mini, nn.Identity()),
        "every layer KDA": (replace(mini, full_attn_layers=()), nn.Identity()),
        "every layer MLA": (
            replace(mini, full_attn_layers=tuple(range(1, layers + 1))), nn.Identity()
        ),
        "no decay": (mini, without_decay),
        "no short convolution": (mini, without_convolution),
        "one sum over depth": (mini, sum_over_depth),
        "no routed experts": (mini, without_routed_experts),
    }  # fmt: skip


@torch.no_grad()
def held_out_loss(model, data):
    """Mean loss in nats a byte over 64 batches of data."""
    model.eval()
    generator, losses = torch.Generator().manual_seed(10_000), []
    for _ in range(64):
        tokens, targets, _ = byte_batches(data, BATCH, LENGTH, generator)
        losses.append(F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).item())
    return fmean(losses)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=variants())
    parser.add_argument("--save")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    training, held_out = prose_bytes()
    rows = []
    for seed in range(options.seeds):
        for name, (config, change) in variants().items():
            if options.only and name not in options.only:
                continue
            torch.manual_seed(seed)
            model = change(KimiK3(config))
            losses = train(
                model, partial(byte_batches, training, BATCH, LENGTH), options.steps, LR,
                seed=seed, warmup=min(20, options.steps), device="cpu",
            )  # fmt: skip
            row = {"variant": name, "seed": seed, "weights": model.num_parameters()}
            row |= {"training": fmean(losses[-20:]), "held_out": held_out_loss(model, held_out)}
            rows.append(row)
            print(row, flush=True)
            if options.save:  # after each: a long run may end early
                write(options.save, torch.device("cpu"), list(range(options.seeds)), {
                    "steps": options.steps, "batch": BATCH, "length": LENGTH, "lr": LR, "rows": rows,
                })  # fmt: skip


if __name__ == "__main__":
    main()

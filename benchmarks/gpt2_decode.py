"""Time to decode one token with GPT-2 small's shape, with and without a KV cache, against the context length.

Random weights (the time does not depend on them) and a position table long enough for the context.
On a GPU each step is one CUDA graph, so that the time is the kernels', not Python's.

usage: python benchmarks/gpt2_decode.py [--save FILE]
"""

import argparse
import dataclasses

import torch
from record import write

from gpt2_to_k3.lab import pick_device, side_by_side
from gpt2_to_k3.models import GPT2, GPT2Config

SEED = 0


def decode_seconds(model, context, device, use_cache):
    """Median seconds of one step at `context` tokens, the newest included."""
    tokens = torch.randint(model.config.vocab_size, (1, context), device=device)
    if use_cache:
        # What the cache holds does not change the time: set the length instead of running a prefill.
        cache = model.init_cache(1, context)

        def step():
            for layer in cache:
                layer.length = context - 1
            return model.head(model.hidden(tokens[:, -1:], cache))
    else:

        def step():
            return model.head(model.hidden(tokens)[:, -1])

    if device.type == "cuda":
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        seconds = side_by_side({"step": graph.replay}, rounds=9, inner=10, device=device)["step"]
        del graph
        torch.cuda.empty_cache()
        return seconds
    return side_by_side({"step": step}, rounds=3)["step"]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save")
    save = parser.parse_args().save
    device = pick_device()
    torch.manual_seed(SEED)
    big = device.type == "cuda"
    contexts = [2**i for i in (range(7, 18) if big else range(6, 11))]
    config = dataclasses.replace(GPT2Config.gpt2(), n_ctx=contexts[-1])
    model = GPT2(config).to(device)
    result = {
        "dtype": "float32",
        "contexts": contexts,
        "cached_seconds": [],
        "uncached_seconds": [],
    }
    for use_cache, key in ((True, "cached_seconds"), (False, "uncached_seconds")):
        # Without a cache the plain form holds 12 x T x T scores several times: 16k is what fits.
        for context in contexts if use_cache else [c for c in contexts if c <= 16_384]:
            result[key].append(decode_seconds(model, context, device, use_cache))
            print(f"{key} at {context}: {result[key][-1] * 1e3:.3f} ms", flush=True)
    # A short context with a cache, at several depths: what does a layer cost by itself?
    result["depths"], result["depth_seconds"] = [1, 6, 12, 24], []
    for n_layer in result["depths"]:
        model = GPT2(dataclasses.replace(config, n_layer=n_layer)).to(device)
        result["depth_seconds"].append(decode_seconds(model, contexts[0], device, use_cache=True))
        print(f"{n_layer} layers at {contexts[0]}: {result['depth_seconds'][-1] * 1e3:.3f} ms")
    if save:
        write(save, device, SEED, result)


if __name__ == "__main__":
    main()

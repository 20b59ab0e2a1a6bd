"""What one more token costs: four layers of the hybrid, beside four of MLA, of GQA and of MHA.

Equal width, heads and feed-forward part everywhere (SwiGLU as wide as Kimi Linear's active experts),
random weights in bfloat16, states in float32. "hybrid" is three KDA layers and one NoPE MLA layer of
the library, whose two memory reads run as Triton kernels (benchmarks/decode_kernels.py); MLA decodes in its
absorbed form. GQA has 8 key heads, MHA 32; both read their cache through PyTorch's fused attention.
What stands between two readings is compiled by torch.compile, and every step is one CUDA graph.
"mixing" is the reading of caches and states alone, "full" everything.

usage: python benchmarks/decode.py [--tiny] [--memory BYTES] [--minutes N] [--save FILE]
"""

import argparse
import functools
import time

import torch
import torch.nn.functional as F
from record import write
from roofline import matmul_flops, read_bandwidth
from stacks import Buffer, Sizes, Stack, plain_kda_step, plain_latent

from gpt2_to_k3.lab import pick_device, side_by_side

SEED = 0
STACKS = {
    "hybrid": ("KDA", "KDA", "KDA", "MLA"),
    "4 MLA": ("MLA",) * 4,
    "4 GQA": ("GQA",) * 4,
    "4 MHA": ("MHA",) * 4,
}


def seconds_of(step, device):
    """Median seconds of a step, on a GPU as one CUDA graph."""
    if device.type != "cuda":
        return side_by_side({"step": step}, rounds=3)["step"]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # kernels are compiled and workspaces made outside the capture
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    inner = max(1, min(50, round(0.01 / (time.perf_counter() - start))))
    seconds = side_by_side({"step": graph.replay}, rounds=7, inner=inner, device=device)["step"]
    del graph
    torch.cuda.empty_cache()
    return seconds


def measure(stack, memories, batch, sizes, device):
    dtype = stack.norms[0].weight.dtype
    x = torch.randn(batch, 1, sizes.hidden, device=device, dtype=dtype)
    inputs = [m.inputs(batch, sizes) for m in memories]

    def mixing():
        for memory, i in zip(memories, inputs, strict=True):
            memory.read(*i)

    return {
        "mixing_seconds": seconds_of(mixing, device),
        "full_seconds": seconds_of(lambda: stack.step(x, memories), device),
    }


def plans(contexts, memory_bytes, sizes):
    """(tokens, stack, batch): batch 1, powers of 2 in between, and the largest that fits; long contexts first."""
    for tokens in sorted(contexts, reverse=True):
        most = {
            name: max(1, memory_bytes // sizes.sequence_bytes(kinds, tokens))
            for name, kinds in STACKS.items()
        }
        batches = {1, 4, 16, 64, 256, 1024, most["4 MLA"], most["4 GQA"]}
        for name, fits in most.items():
            for batch in sorted({b for b in batches if b <= fits} | {fits}):
                yield tokens, name, batch


def fastest_tiles(stack, sizes, batch, tokens, buffer, device):
    """The latent kernel with the tiles that read fastest here, and bytes per second with each."""
    import decode_kernels

    memory = stack.memories(batch, tokens, buffer, None, None)[-1]
    x, found = memory.inputs(batch, sizes), {}
    for tiles in decode_kernels.LATENT_TILES:
        memory.latent = functools.partial(decode_kernels.latent_attention, tiles=tiles)
        try:
            found[tiles] = memory.rows.nbytes / seconds_of(lambda: memory.read(*x), device)
        except Exception as error:  # a tile that does not fit the device's shared memory
            print(f"tiles {tiles}: {type(error).__name__}")
    best = max(found, key=found.get)
    print({str(k): f"{v / 1e12:.2f} TB/s" for k, v in found.items()}, flush=True)
    return functools.partial(decode_kernels.latent_attention, tiles=best), found


def kernel_errors(sizes, device):
    """Largest error of each kernel against float64, relative to the largest value."""
    import decode_kernels

    B, H, K, T = 2, sizes.heads, sizes.head_dim, 5000
    new = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    q, rows = new(B, H, sizes.rank + sizes.shared), new(B, T, sizes.rank + sizes.shared)
    args = (192**-0.5, sizes.rank)
    want = plain_latent(q.double(), rows.double(), *args)
    errors = {
        "latent": (decode_kernels.latent_attention(q, rows, *args) - want).abs().max()
        / want.abs().max()
    }
    q, k = (F.normalize(new(B, H, K), dim=-1) for _ in range(2))
    v, g, beta = (
        new(B, H, K),
        -5 * torch.rand(B, H, K, device=device),
        torch.rand(B, H, device=device),
    )
    S = torch.randn(B, H, K, K, device=device)
    S64 = S.double()
    want = plain_kda_step(q.double(), k.double(), v.double(), g.double(), beta.double(), S64)
    o = decode_kernels.kda_step(q, k, v, g, beta, S)
    errors["kda"] = (o - want).abs().max() / want.abs().max()
    errors["kda state"] = (S - S64).abs().max() / S64.abs().max()
    return {name: x.item() for name, x in errors.items()}


@torch.no_grad()
def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="toy sizes without kernels: a test")
    parser.add_argument("--memory", type=float, default=100e9, help="bytes for caches and states")
    parser.add_argument("--minutes", type=float, default=9, help="measure nothing later than this")
    parser.add_argument("--save")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    device = pick_device("cpu" if options.tiny else None)
    if not options.tiny and device.type != "cuda":
        parser.error("it takes a GPU; --tiny runs on a CPU")
    torch.manual_seed(SEED)
    sizes, contexts = Sizes(), [2**n for n in (12, 14, 16, 17, 18, 20)]
    memory_bytes, dtype = int(options.memory), torch.bfloat16
    latent, kda, result = plain_latent, plain_kda_step, {"sizes": vars(Sizes()), "rows": []}
    if options.tiny:
        sizes, contexts = Sizes(16, 4, 4, 2, 8, 2, 32), [8, 32]
        memory_bytes, result["sizes"] = 20_000, vars(sizes)
    compiled = device.type == "cuda"
    # Four kinds of layer, each for one sequence and for many.
    torch._dynamo.config.recompile_limit = 64
    stacks = {name: Stack(k, sizes, compiled).to(device, dtype) for name, k in STACKS.items()}
    if device.type == "cuda":
        import decode_kernels

        result["read_bytes_per_second"] = read_bandwidth(device, 2**31)
        result["bf16_matmul_flops_per_second"] = matmul_flops(device, 8192)
        result["errors"], kda = kernel_errors(sizes, device), decode_kernels.kda_step
    buffer = Buffer(memory_bytes, device, dtype)
    if device.type == "cuda":
        latent, tried = fastest_tiles(stacks["hybrid"], sizes, 1, 2**20, buffer, device)
        result["latent_tiles"] = {str(k): v for k, v in tried.items()}
    result["memory_bytes"] = memory_bytes
    for tokens, name, batch in plans(contexts, memory_bytes, sizes):
        if time.monotonic() - start > 60 * options.minutes:
            print("the minutes are over")
            break
        memories = stacks[name].memories(batch, tokens, buffer, latent, kda)
        row = {"stack": name, "tokens": tokens, "batch": batch}
        row["bytes"] = batch * sizes.sequence_bytes(STACKS[name], tokens)
        row |= measure(stacks[name], memories, batch, sizes, device)
        result["rows"].append(row)
        print(row, flush=True)
        if options.save:  # after each: a lent machine may go early
            write(options.save, device, SEED, result)


if __name__ == "__main__":
    main()

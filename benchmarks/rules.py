"""Time and memory of the rules: chunk form against recurrence, against FLA and against softmax attention.

On a CPU one thread is pinned and FLA's plain PyTorch forms are the rivals; on a GPU they are its
Triton kernels (bfloat16), and the chunk form runs in float32 and TF32 (--compile: compiled as well). All
forms of a row take turns in one run; the table gives medians and the sizes they belong to.

usage: python benchmarks/rules.py [--quick] [--compile] [--save FILE]
"""

import argparse
import functools

import torch
import torch.nn.functional as F
from peers import fla_naive
from record import write
from torch.distributed._tools.mem_tracker import MemTracker

from gpt2_to_k3 import ops
from gpt2_to_k3.lab import pick_device, side_by_side

SEED = 0
CHUNK = {
    "linear attention": functools.partial(ops.chunk_linear_attention, normalize=False),
    "delta rule": ops.chunk_delta_rule,
    "gated delta rule": ops.chunk_gated_delta_rule,
    "KDA": ops.chunk_kda,
}
RECURRENT = {
    "linear attention": functools.partial(ops.recurrent_linear_attention, normalize=False),
    "delta rule": ops.recurrent_delta_rule,
    "gated delta rule": ops.recurrent_gated_delta_rule,
    "KDA": ops.recurrent_kda,
}


def inputs(rule, B, T, H, K, device, dtype):
    """Random q, k, v with unit keys, and the gates that `rule` uses; all want gradients."""
    q, k, v = (torch.randn(B, T, H, K, device=device) for _ in range(3))
    x = {"q": F.normalize(q, dim=-1), "k": F.normalize(k, dim=-1), "v": v}
    x = {name: t.to(dtype) for name, t in x.items()}
    if rule != "linear attention":
        x["beta"] = torch.rand(B, T, H, device=device).to(dtype)
    if rule in ("gated delta rule", "KDA"):
        shape = (B, T, H, K) if rule == "KDA" else (B, T, H)
        x["g"] = F.logsigmoid(torch.randn(shape, device=device) + 3)
    return {name: t.requires_grad_() for name, t in x.items()}


def sdpa(q, k, v, **gates):
    """PyTorch's fused softmax attention on the same q, k, v."""
    o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    return o, None


def fla_cpu(rule):
    """FLA's plain chunk form of `rule` behind our signature."""
    if rule == "linear attention":
        chunk = fla_naive("linear_attn").naive_chunk_linear_attn
        return lambda q, k, v: (chunk(q, k, v), None)
    if rule == "delta rule":
        chunk = fla_naive("delta_rule").delta_rule_chunkwise
        heads_first = functools.partial(torch.transpose, dim0=1, dim1=2)
        return lambda q, k, v, beta: chunk(*map(heads_first, (q, k, v, beta)), chunk_size=64)
    if rule == "gated delta rule":
        chunk = fla_naive("gated_delta_rule").naive_chunk_gated_delta_rule
        return lambda q, k, v, beta, g: chunk(q, k, v, g=g, beta=beta)
    chunk = fla_naive("kda").naive_chunk_kda
    return lambda q, k, v, beta, g: chunk(q, k, v, g, beta)


def fla_gpu(rule):
    """FLA's Triton kernel of `rule`."""
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.kda import chunk_kda
    from fla.ops.linear_attn import chunk_linear_attn

    kernels = {
        "linear attention": functools.partial(chunk_linear_attn, normalize=False),
        "delta rule": chunk_delta_rule,
        "gated delta rule": chunk_gated_delta_rule,
        "KDA": chunk_kda,
    }
    return functools.partial(kernels[rule], output_final_state=True)


def forward(form, x):
    with torch.no_grad():
        return form(**x)


def backward(form, x):
    o = form(**x)[0]
    torch.autograd.grad(o, list(x.values()), torch.ones_like(o), allow_unused=True)


def peak_bytes(step, device):
    """Bytes of tensors that one call of `step` holds at its highest, beyond what was held before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    tracker = (
        MemTracker()
    )  # counts tensors: the process keeps freed memory, so its size says little
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[device]["Total"]


def measure(rule, forms, sizes, device, rounds):
    """One row per form and direction: {rule, form, direction, sizes, seconds, peak_bytes}."""
    rows = []
    for direction, run in (("forward", forward), ("forward+backward", backward)):
        steps = {}
        for name, (form, dtype) in forms.items():
            x = inputs(rule, **sizes, device=device, dtype=dtype)
            steps[name] = functools.partial(run, form, x)
        seconds = side_by_side(steps, rounds=rounds, device=device)
        for name, step in steps.items():
            row = {"rule": rule, "form": name, "direction": direction, **sizes}
            row |= {"seconds": seconds[name], "peak_bytes": peak_bytes(step, device)}
            rows.append(row)
            print(line(row, seconds["chunk"]), flush=True)
    return rows


def line(row, chunk_seconds):
    size = " ".join(f"{key}{row[key]}" for key in ("B", "H", "K", "T"))
    peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:9.0f} MB"
    return (
        f"{row['rule']:17} {row['direction']:17} {size:20} {row['form']:20}"
        f"{row['seconds'] * 1e3:10.2f} ms {row['seconds'] / chunk_seconds:8.2f} x chunk {peak}"
    )


def cpu(quick):
    torch.set_num_threads(1)
    device, rows = torch.device("cpu"), []
    f32 = torch.float32
    for T in (512, 2048) if quick else (512, 1024, 2048, 4096, 8192, 16_384):
        for rule in CHUNK:
            forms = {"chunk": (CHUNK[rule], f32), "softmax (SDPA)": (sdpa, f32)}
            if T <= 4096:  # the others grow faster than T with a backward pass
                forms |= {
                    "recurrent": (RECURRENT[rule], f32),
                    "FLA naive chunk": (fla_cpu(rule), f32),
                }
            sizes = {"B": 1, "T": T, "H": 4, "K": 64}
            rows += measure(rule, forms, sizes, device, rounds=5 if T <= 2048 else 3)
    for H, K in ((1, 32), (4, 128)):  # the ratio depends on the size: say so
        forms = {"chunk": (ops.chunk_kda, f32), "recurrent": (ops.recurrent_kda, f32)}
        rows += measure("KDA", forms, {"B": 1, "T": 2048, "H": H, "K": K}, device, rounds=5)
    return rows


def with_precision(precision, form):
    """`form` with float32 products in `precision`: "highest" (float32) or "high" (TF32)."""

    def run(**x):
        torch.set_float32_matmul_precision(precision)
        try:
            return form(**x)
        finally:
            torch.set_float32_matmul_precision("highest")

    return run


def error(form, dtype, sizes, device):
    """Relative error of o against the float64 recurrence on the same (rounded) inputs."""
    torch.manual_seed(SEED)
    x = {name: t.detach() for name, t in inputs("KDA", **sizes, device=device, dtype=dtype).items()}
    o = form(**x)[0].double()
    exact = ops.recurrent_kda(**{name: t.double() for name, t in x.items()})[0]
    return ((o - exact).norm() / exact.norm()).item()


def gpu(compile_too):
    device, rows = torch.device("cuda"), []
    f32, bf16 = torch.float32, torch.bfloat16
    forms = {
        "chunk": (ops.chunk_kda, f32),
        "chunk TF32": (with_precision("high", ops.chunk_kda), f32),
        "chunk bf16 in": (with_precision("high", ops.chunk_kda), bf16),
        "FLA kernel": (fla_gpu("KDA"), bf16),
    }
    if compile_too:
        compiled = torch.compile(ops.chunk_kda)
        forms["chunk TF32 compiled"] = (with_precision("high", compiled), f32)
    for T in (4096, 16_384):
        sizes = {"B": 1, "T": T, "H": 16, "K": 128}
        errors = {}
        for name, (form, dtype) in forms.items():
            errors[name] = error(form, dtype, sizes, device)
            print(f"T{T} {name}: relative error {errors[name]:.1e}", flush=True)
        every = forms | {"softmax (SDPA)": (sdpa, bf16)}
        new = measure("KDA", every, sizes, device, rounds=7)
        rows += [row | {"error": errors.get(row["form"])} for row in new]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two lengths, under two minutes")
    parser.add_argument("--compile", action="store_true", help="on a GPU: compiled as well")
    parser.add_argument("--save")
    arguments = parser.parse_args()
    device = pick_device()
    torch.manual_seed(SEED)
    rows = gpu(arguments.compile) if device.type == "cuda" else cpu(arguments.quick)
    if arguments.save:
        write(arguments.save, device, SEED, {"rows": rows})


if __name__ == "__main__":
    main()

"""Time and memory of the rules: chunk form against recurrence, against FLA and against softmax attention.

On a CPU one thread is pinned and FLA's plain PyTorch forms are the rivals; on a GPU they are its
Triton kernels (bfloat16), and the chunk form runs in float32, in TF32, and compiled. All forms of a
row take turns in one run; the table gives medians and the sizes they belong to.

usage: python benchmarks/rules.py [--quick] [--save FILE]
"""

import argparse
import contextlib
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from memory import peak_bytes
from peers import fla_naive
from record import write

from gpt2_to_k3 import ops
from gpt2_to_k3.lab import pick_device, side_by_side

SEED = 0
F32, BF16 = torch.float32, torch.bfloat16


class Form(NamedTuple):
    """One way to compute a rule; `precision` is that of its float32 products ("high" is TF32)."""

    call: callable
    dtype: torch.dtype = F32
    precision: str = "highest"


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


@contextlib.contextmanager
def float32_products(precision):
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def forward(form, x):
    with float32_products(form.precision), torch.no_grad():
        return form.call(**x)[0]


def backward(form, x):
    with float32_products(form.precision):
        o = form.call(**x)[0]
        torch.autograd.grad(o, list(x.values()), torch.ones_like(o), allow_unused=True)


def measure(rule, forms, sizes, device, rounds):
    """One row per form and direction: {rule, form, direction, sizes, seconds, peak_bytes}."""
    rows = []
    for direction, run in (("forward", forward), ("forward+backward", backward)):
        steps = {}
        for name, form in forms.items():
            x = inputs(rule, **sizes, device=device, dtype=form.dtype)
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
    return (
        f"{row['rule']:17} {row['direction']:17} {size:20} {row['form']:20}"
        f"{row['seconds'] * 1e3:10.2f} ms {row['seconds'] / chunk_seconds:8.2f} x chunk"
        f" {row['peak_bytes'] / 1e6:9.0f} MB"
    )


def cpu(quick):
    torch.set_num_threads(1)
    device, rows = torch.device("cpu"), []
    for T in (2048,) if quick else (512, 1024, 2048, 4096, 8192, 16_384):
        for rule in CHUNK:
            forms = {"chunk": Form(CHUNK[rule]), "softmax (SDPA)": Form(sdpa)}
            if T <= 4096:  # the others grow faster than T with a backward pass
                forms["recurrent"] = Form(RECURRENT[rule])
                forms["FLA naive chunk"] = Form(fla_cpu(rule))
            sizes = {"B": 1, "T": T, "H": 4, "K": 64}
            rows += measure(rule, forms, sizes, device, rounds=5 if T <= 2048 and not quick else 3)
    for H, K in () if quick else ((1, 32), (4, 128)):  # the ratio depends on the size: say so
        forms = {"chunk": Form(ops.chunk_kda), "recurrent": Form(ops.recurrent_kda)}
        rows += measure("KDA", forms, {"B": 1, "T": 2048, "H": H, "K": K}, device, rounds=5)
    return rows


def error(form, sizes, device):
    """Relative error of o against the float64 recurrence on the same (rounded) inputs."""
    torch.manual_seed(SEED)
    x = {n: t.detach() for n, t in inputs("KDA", **sizes, device=device, dtype=form.dtype).items()}
    o = forward(form, x).double()
    exact = ops.recurrent_kda(**{name: t.double() for name, t in x.items()})[0]
    return ((o - exact).norm() / exact.norm()).item()


def gpu():
    device, rows = torch.device("cuda"), []
    compiled = torch.compile(ops.chunk_kda, dynamic=False)
    for T in (4096, 16_384):
        sizes = {"B": 1, "T": T, "H": 16, "K": 128}
        forms = {
            "chunk": Form(ops.chunk_kda),
            "chunk TF32": Form(ops.chunk_kda, F32, "high"),
            "chunk bf16 in": Form(ops.chunk_kda, BF16, "high"),
            "FLA kernel": Form(fla_gpu("KDA"), BF16),
        }
        if T == 16_384:  # compiling takes minutes and fits one length
            forms["chunk TF32 compiled"] = Form(compiled, F32, "high")
        errors = {}
        for name, form in forms.items():
            errors[name] = error(form, sizes, device)
            print(f"T{T} {name}: relative error {errors[name]:.1e}", flush=True)
        forms["softmax (SDPA)"] = Form(sdpa, BF16)
        new = measure("KDA", forms, sizes, device, rounds=7)
        rows += [row | {"error": errors.get(row["form"])} for row in new]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one length, under two minutes")
    parser.add_argument("--save")
    arguments = parser.parse_args()
    device = pick_device()
    torch.manual_seed(SEED)
    rows = gpu() if device.type == "cuda" else cpu(arguments.quick)
    if arguments.save:
        write(arguments.save, device, SEED, {"rows": rows})


if __name__ == "__main__":
    main()

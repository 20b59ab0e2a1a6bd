"""What each rule of the ladder can recall: accuracy over seeds, state sizes, lengths and gates.

--quick trains small models on one CPU thread, and fails if the delta rules no longer stand apart
from linear attention on overwritten keys. Without it the whole experiment runs on a GPU, in three
parts: "rules" starves the state (one head of 16 x 16), "states" changes its size, and "lengths"
has the sizes and learning rates of Kimi Linear, section 5.1, with fewer steps than its 20,000.

Models of one task and seed see the same batches. On a GPU they train side by side, each on its own
stream, since one model this small leaves it idle; groups of them run in processes.

usage: python benchmarks/recall.py [--quick | --tiny] [--parts NAME ...] [--rules NAME ...]
           [--lengths T ...] [--rates LR ...] [--seeds N] [--steps N] [--batch N] [--workers N]
           [--minutes N] [--save FILE]
"""

import argparse
import itertools
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from record import write
from torch import nn

from gpt2_to_k3.lab import pick_device, tasks
from gpt2_to_k3.lab.recall import GATES, RULES, RecallModel
from gpt2_to_k3.lab.training import accuracy, learning_rate, optimizer_for, train

PARTS = ("rules", "states", "lengths")
PAPER_RATES = (5e-5, 1e-4, 5e-4, 1e-3)
GATED = ("decay", "gated delta", "kda")
VALUES = 32
WARMUP = 50
MEANS = 20  # of losses, kept of a run
LONGER = 4  # times as many tokens as in training
STARVED = {"T": 96, "keys": 16, "hidden": 64, "layers": 1, "heads": 1, "head_dim": 16}
PAPER = {"keys": 64, "hidden": 256, "layers": 2, "heads": 2, "head_dim": 128}


def problem(task, T, keys, longer=1):
    """A function of (batch_size, generator) with about T * longer tokens a row, and its vocabulary.

    `keys` counts keys, those of both groups of "reset", or stacks; MQAR has what its longest row
    needs.
    """
    n, V = T * longer, VALUES
    if task == "mqar":
        pairs, most = n // 3, LONGER * T // 3
        return lambda B, g: tasks.mqar(B, pairs, pairs, g, keys=most, values=V), V + most
    if task == "overwrite":
        writes = (n - keys) // 2
        return lambda B, g: tasks.overwrite_mqar(B, writes, keys, g, values=V), V + keys
    if task == "reset":
        resets = (n - keys) // 16 + 1
        writes = (n - keys) // 2 - resets
        return (
            lambda B, g: tasks.selective_reset(B, writes, resets, keys // 2, g, values=V),
            V + 1 + keys + 2,
        )
    if task == "palindrome":
        return lambda B, g: tasks.palindrome(B, n // 2, g, values=V), V + 1
    if task == "stacks":
        return lambda B, g: tasks.stacks(B, keys, n // 2, g, values=V), V + 2 * keys
    return lambda B, g: tasks.needle(B, n, g, values=V, words=V), V + V + 1


def variants(rules):
    """(rule, gates) pairs: both ways to start a gate, for the rules that have one."""
    return [(r, g) for r in rules for g in (GATES if r in GATED else ["slow"])]


def jobs(parts, rules, lengths, rates, seeds, steps, batch, tiny):
    """Every run as a dict, in the order of value: first seeds first, and of them the short rows."""
    starved, paper, widths = STARVED, PAPER, (8, 32)  # part "rules" has 16
    if tiny:
        small = {"hidden": 8, "head_dim": 4}
        starved, paper = STARVED | small | {"T": 12, "keys": 4}, PAPER | small | {"keys": 4}
        widths, rates, lengths, steps, batch = (2, 4), (1e-3,), (8, 12), 2, 4
    found = []
    for (rule, gates), seed in itertools.product(variants(rules), range(seeds)):
        run = {"rule": rule, "gates": gates, "seed": seed, "batch": batch}
        quick = run | starved | {"lr": 1e-2, "steps": steps or 1500}
        if "rules" in parts:
            for task in ("overwrite", "mqar", "palindrome", "stacks", "reset", "needle"):
                deep = {"layers": 2} if task in ("mqar", "palindrome") else {}
                found.append(quick | deep | {"part": "rules", "task": task})
        if "states" in parts:
            for task, K in itertools.product(("overwrite", "stacks"), widths):
                found.append(quick | {"part": "states", "task": task, "head_dim": K})
        if "lengths" in parts:
            grid = itertools.product(("palindrome", "mqar", "stacks"), lengths, rates)
            for task, T, lr in grid:
                sizes = paper | {"T": T, "lr": lr, "steps": steps or 4000}
                found.append(run | sizes | {"part": "lengths", "task": task})
    return sorted(found, key=same_batches)


def same_batches(job):
    """What jobs that train side by side have in common."""
    return job["seed"], job["T"], job["part"], job["task"]


def new_model(job, vocabulary):
    torch.manual_seed(job["seed"])
    return RecallModel(
        job["rule"], vocabulary, hidden_size=job["hidden"], layers=job["layers"],
        num_heads=job["heads"], head_dim=job["head_dim"], gates=job["gates"],
    )  # fmt: skip


def measure(job, device, progress=False):
    """Train one model; return job with its accuracy, that on longer rows, and 20 mean losses."""
    torch.set_num_threads(1)
    make, vocabulary = problem(job["task"], job["T"], job["keys"])
    model = new_model(job, vocabulary)
    start, warmup = time.perf_counter(), min(WARMUP, job["steps"])
    losses = train(
        model, partial(make, job["batch"]), job["steps"], job["lr"],
        seed=job["seed"], warmup=warmup, device=device, progress=progress,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    return job | {"seconds": seconds} | tested(model, job, test_batches(job), losses)


def measure_together(group, device):
    """As measure, for jobs that see the same batches, on a GPU: each model's step is one graph."""
    torch.set_num_threads(1)
    first = group[0]
    make, vocabulary = problem(first["task"], first["T"], first["keys"])
    generator = torch.Generator().manual_seed(first["seed"])
    batch = [x.to(device) for x in make(first["batch"], torch.Generator())]
    rates = {job["lr"]: torch.zeros((), device=device) for job in group}
    models = [new_model(job, vocabulary).to(device) for job in group]
    trials = [captured(m, batch, rates[job["lr"]]) for m, job in zip(models, group, strict=True)]
    main, losses = torch.cuda.current_stream(device), []
    for step in range(first["steps"]):
        for lr, rate in rates.items():
            rate.fill_(learning_rate(step, first["steps"], lr, min(WARMUP, first["steps"])))
        for held, new in zip(batch, make(first["batch"], generator), strict=True):
            held.copy_(new)
        for stream, graph, *_ in trials:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                graph.replay()
        for stream, *_ in trials:
            main.wait_stream(stream)
        losses.append(torch.stack([trial[2] for trial in trials]))
    losses, batches = torch.stack(losses, 1).tolist(), test_batches(first)
    return [
        job | tested(model, job, batches, x)
        for job, model, x in zip(group, models, losses, strict=True)
    ]


def captured(model, batch, rate):
    """A stream, a graph of lab.training's step on `batch` with the tensor `rate`, and its loss."""
    tokens, targets, _ = batch  # the targets outside the mask are NO_TARGET
    optimizer = optimizer_for(model, 0.0, 0.01)
    for group in optimizer.param_groups:
        group.update(lr=rate, capturable=True)

    def step():
        logits = model(tokens).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=tasks.NO_TARGET)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()  # the rate is 0: nothing is learned, and what AdamW kept is taken back
        for state in optimizer.state.values():
            for x in state.values():
                x.zero_()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        loss = step()
    return stream, graph, loss, optimizer  # whose memory the graph writes to


def test_batches(job):
    """Rows that no seed trains on, as long as in training and, but for part lengths, longer."""
    found = {}
    for name, longer in (("accuracy", 1), ("longer", LONGER)):
        if name == "accuracy" or job.get("part") != "lengths":
            make, _ = problem(job["task"], job["T"], job["keys"], longer)
            generator = torch.Generator().manual_seed(10_000)
            # few rows at a time: softmax has T^2 scores
            found[name] = [make(job["batch"], generator) for _ in range(8)]
    return found


def tested(model, job, batches, losses):
    """Mean accuracy on each list of batches, and MEANS mean losses."""
    found = {k: fmean(accuracy(model, x) for x in xs) for k, xs in batches.items()}
    if not all(p.isfinite().all() for p in model.parameters()):
        raise RuntimeError(f"weights that are not finite: {job}")
    size = -(-len(losses) // MEANS)
    return found | {"losses": [fmean(losses[i : i + size]) for i in range(0, len(losses), size)]}


def run_group(group, device, start_before):
    if time.time() > start_before:
        return []
    if device.type == "cuda":
        return measure_together(group, device)
    return [measure(job, device) for job in group]


def run_all(found, device, workers, minutes):
    """The rows of all groups that could start within `minutes`, group by group as they come."""
    start_before = float("inf") if minutes is None else time.time() + 60 * minutes
    groups = [list(g) for _, g in itertools.groupby(found, same_batches)]
    if workers == 1:
        for group in groups:
            yield run_group(group, device, start_before)
        return
    places = [device] if device.type != "cuda" else [
        torch.device("cuda", i) for i in range(torch.cuda.device_count())
    ]  # fmt: skip
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [
            pool.submit(run_group, group, places[i % len(places)], start_before)
            for i, group in enumerate(groups)
        ]
        for future in as_completed(futures):
            yield future.result()


def spread(numbers):
    return f"{fmean(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})"


def quick():
    """Overwritten keys, then stacks: the rows, and which of them are not as expected."""
    overwrite = STARVED | {"task": "overwrite", "T": 64, "keys": 8, "lr": 1e-2}
    stacks = STARVED | {"task": "stacks", "T": 48, "keys": 3, "head_dim": 8, "lr": 1e-2}
    plan = [
        (overwrite | {"steps": 250}, ("linear", "delta", "gated delta", "kda")),
        (stacks | {"steps": 200}, ("linear", "delta", "kda")),
    ]
    ceiling = tasks.order_blind_accuracy(28, 8, VALUES)
    print(f"A memory that does not know the order of 28 writes on 8 keys: {ceiling:.3f} at best")
    print(f"{'task':10}{'rule':13}{'accuracy over 3 seeds':25}{f'{LONGER}x longer':25}seconds each")
    rows = []
    for sizes, rules in plan:
        for rule in rules:
            run = sizes | {"rule": rule, "gates": "slow", "batch": 32}
            new = [measure(run | {"seed": s}, torch.device("cpu"), progress=True) for s in range(3)]
            rows += new
            acc, longer, seconds = ([r[k] for r in new] for k in ("accuracy", "longer", "seconds"))
            print(
                f"{run['task']:10}{rule:13}{spread(acc):25}{spread(longer):25}{fmean(seconds):.1f}",
                flush=True,
            )
    wrong = [
        f"{row['rule']}, seed {row['seed']}: {row['accuracy']:.3f}"
        for row in rows
        if row["task"] == "overwrite"
        and not (row["accuracy"] <= 0.55 if row["rule"] == "linear" else row["accuracy"] >= 0.99)
    ]
    return rows, wrong


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="three minutes on a CPU")
    parser.add_argument("--tiny", action="store_true", help="the whole grid with toy sizes: a test")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rules", nargs="+", choices=RULES, default=RULES)
    parser.add_argument("--lengths", nargs="+", type=int, default=(256, 512, 1024, 2048))
    parser.add_argument("--rates", nargs="+", type=float, default=PAPER_RATES)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of 1500, and of 4000 in part lengths")
    parser.add_argument("--workers", type=int, default=1, help="groups that train at once")
    parser.add_argument("--minutes", type=float, help="start no group later than this")
    parser.add_argument("--save")
    options = parser.parse_args(arguments)
    device = pick_device("cpu" if options.quick or options.tiny else None)
    if options.quick:
        rows, wrong = quick()
        if wrong:
            raise SystemExit("Not as expected on overwritten keys: " + "; ".join(wrong))
        result = {"rows": rows}
    else:
        if device.type == "cpu" and not options.tiny:
            parser.error("the whole experiment takes a GPU: --quick or --tiny run on a CPU")
        found = jobs(
            options.parts, options.rules, options.lengths, options.rates, options.seeds,
            options.steps, options.batch, options.tiny,
        )  # fmt: skip
        # A saved run goes on: what it has is not run again.
        saved = Path(options.save or "")
        rows = json.loads(saved.read_text("utf-8"))["result"]["rows"] if saved.is_file() else []
        found = [job for job in found if not any(job.items() <= row.items() for row in rows)]
        result = {"rows": rows, "not_run": len(found)}
        for new in run_all(found, device, options.workers, options.minutes):
            result["rows"] += new
            result["not_run"] -= len(new)
            for row in new:
                keys = ("part", "task", "rule", "gates", "seed", "lr", "T", "head_dim")
                print(*(row[k] for k in keys), f"{row['accuracy']:.3f}", flush=True)
            if options.save:  # after each group: a run on a lent machine may end early
                write(options.save, device, list(range(options.seeds)), result)
        print(f"{result['not_run']} of {len(found)} runs left")
    if options.save:
        write(options.save, device, list(range(options.seeds)), result)


if __name__ == "__main__":
    main()

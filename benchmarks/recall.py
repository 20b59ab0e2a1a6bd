"""What each rule of the ladder can recall: accuracy over seeds, state sizes, lengths and gates.

--quick trains small models on one CPU thread, and fails if the delta rules no longer stand apart
from linear attention on overwritten keys. Without it the whole experiment runs on a GPU, in three
parts: "rules" starves the state (one head of 16 x 16), "states" changes its size, and "lengths"
has the sizes and learning rates of Kimi Linear, section 5.1, with fewer steps than its 20,000.

Models of one seed see the same batches. Several train at once, in processes, since a model this
small leaves a GPU idle.

usage: python benchmarks/recall.py [--quick | --tiny] [--parts NAME ...] [--rules NAME ...]
           [--lengths T ...] [--seeds N] [--steps N] [--workers N] [--minutes N] [--save FILE]
"""

import argparse
import itertools
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import fmean

import torch
from record import write

from gpt2_to_k3.lab import pick_device, tasks
from gpt2_to_k3.lab.recall import GATES, RULES, RecallModel
from gpt2_to_k3.lab.training import accuracy, train

PARTS = ("rules", "states", "lengths")
PAPER_RATES = (5e-5, 1e-4, 5e-4, 1e-3)
GATED = ("decay", "gated delta", "kda")
VALUES = 32
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


def jobs(parts, rules, lengths, seeds, steps, tiny):
    """Every run as a dict, in the order of value: first seeds first, and of them the short rows."""
    starved, paper, widths, rates = STARVED, PAPER, (8, 16, 32, 64), PAPER_RATES
    if tiny:
        small = {"hidden": 8, "head_dim": 4}
        starved, paper = STARVED | small | {"T": 12, "keys": 4}, PAPER | small | {"keys": 4}
        widths, rates, lengths, steps = (2, 4), (1e-3,), (8, 12), 2
    found = []
    for (rule, gates), seed in itertools.product(variants(rules), range(seeds)):
        run = {"rule": rule, "gates": gates, "seed": seed, "batch": 4 if tiny else 64}
        quick = run | starved | {"lr": 1e-2, "steps": steps or 1500}
        if "rules" in parts:
            for task in ("overwrite", "mqar", "palindrome", "stacks", "reset", "needle"):
                deep = {"layers": 2} if task in ("mqar", "palindrome") else {}
                found.append(quick | deep | {"part": "rules", "task": task})
        if "states" in parts:
            for task, K in itertools.product(("overwrite", "mqar", "stacks"), widths):
                found.append(quick | {"part": "states", "task": task, "head_dim": K})
        if "lengths" in parts:
            grid = itertools.product(("palindrome", "mqar", "stacks"), lengths, rates)
            for task, T, lr in grid:
                sizes = paper | {"T": T, "lr": lr, "steps": steps or 4000}
                found.append(run | sizes | {"part": "lengths", "task": task})
    return sorted(found, key=lambda job: (job["seed"], job["T"]))


def measure(job, device, progress=False):
    """Train one model; return job with its accuracy, that on longer rows, and 20 mean losses."""
    torch.set_num_threads(1)
    make, vocabulary = problem(job["task"], job["T"], job["keys"])
    torch.manual_seed(job["seed"])
    model = RecallModel(
        job["rule"], vocabulary, hidden_size=job["hidden"], layers=job["layers"],
        num_heads=job["heads"], head_dim=job["head_dim"], gates=job["gates"],
    )  # fmt: skip
    start, warmup = time.perf_counter(), min(50, job["steps"])
    losses = train(
        model, partial(make, job["batch"]), job["steps"], job["lr"],
        seed=job["seed"], warmup=warmup, device=device, progress=progress,
    )  # fmt: skip
    row = job | {"seconds": time.perf_counter() - start}
    row["accuracy"] = tested(model, make, job)
    if job.get("part") != "lengths":
        row["longer"] = tested(model, problem(job["task"], job["T"], job["keys"], LONGER)[0], job)
    size = -(-len(losses) // 20)
    row["losses"] = [fmean(losses[i : i + size]) for i in range(0, len(losses), size)]
    return row


def tested(model, make, job):
    """Mean accuracy on rows that no seed trains on; few at a time, for softmax has T^2 scores."""
    generator = torch.Generator().manual_seed(10_000)
    return fmean(accuracy(model, make(job["batch"], generator)) for _ in range(8))


def run_all(found, device, workers, minutes):
    """The rows of all jobs that could start within `minutes`, printed as they come."""
    start = time.perf_counter()

    def late():
        return minutes is not None and time.perf_counter() - start > 60 * minutes

    if workers == 1:
        for job in found:
            if late():
                return
            yield measure(job, device)
        return
    places = [device] if device.type != "cuda" else [
        torch.device("cuda", i) for i in range(torch.cuda.device_count())
    ]  # fmt: skip
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        waiting = [
            pool.submit(measure, job, places[i % len(places)]) for i, job in enumerate(found)
        ]
        for i, future in enumerate(waiting):
            if late():  # all of them: while this loop waits for one, the pool starts the next
                for later in waiting[i:]:
                    later.cancel()
            if not future.cancelled():
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
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="instead of 1500, and of 4000 in part lengths")
    parser.add_argument("--workers", type=int, default=1, help="models that train at once")
    parser.add_argument("--minutes", type=float, help="start no model later than this")
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
            options.parts, options.rules, options.lengths, options.seeds, options.steps,
            options.tiny,
        )  # fmt: skip
        rows = []
        for row in run_all(found, device, options.workers, options.minutes):
            rows.append(row)
            keys = ("part", "task", "rule", "gates", "seed", "lr", "T", "head_dim")
            print(*(row[k] for k in keys), f"{row['accuracy']:.3f}", flush=True)
        result = {"rows": rows, "not_run": len(found) - len(rows)}
        print(f"{len(rows)} of {len(found)} runs")
    if options.save:
        write(options.save, device, list(range(options.seeds)), result)


if __name__ == "__main__":
    main()

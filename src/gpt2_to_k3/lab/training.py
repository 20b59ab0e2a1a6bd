"""A small trainer, with checkpoints from which a run goes on to the same losses."""

import math
import os
import pickle
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..layers.norm import check_sizes
from .device import pick_device
from .tasks import NO_TARGET


def learning_rate(step, steps, lr, warmup):
    """The rate of a step from 0 on: linear to lr in `warmup` steps, then linear to 0 at `steps`."""
    up = (step + 1) / warmup if warmup else 1.0
    down = (steps - step) / (steps - warmup) if steps > warmup else 1.0
    return lr * min(1.0, up, down)


def optimizer_for(model, lr, weight_decay):
    """AdamW that pulls matrices to zero, and leaves vectors alone: norms, biases, A_log, dt_bias.

    A decay towards 0 would not make a gate smaller: dt_bias = 0 is a fast forgetting.
    """
    groups = {True: [], False: []}
    for p in model.parameters():
        groups[p.ndim >= 2].append(p)
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": weight_decay},
         {"params": groups[False], "weight_decay": 0.0}],
        lr=lr,
    )  # fmt: skip


def train(
    model, batches, steps, lr, *, seed=0, warmup=50, weight_decay=0.01, clip=1.0, device=None,
    checkpoint=None, save_every=100, progress=True,
):  # fmt: skip
    """Train model in place on batches(generator) with AdamW; return the loss of every step.

    Each batch is new, so a loss is measured on data that the model has not seen.

    Args:
        batches: a function of a torch.Generator (on the CPU, of `seed`) that returns tokens,
            targets and mask [B, T], as lab.tasks has them. model(tokens) gives logits; the loss is
            the mean cross entropy over mask.
        lr: the highest rate, see learning_rate.
        clip: the greatest length of the gradient of all parameters; a longer one is shortened.
        device: see pick_device. The model stays there.
        checkpoint: a file written every save_every steps, and after the last. If it exists, the
            run goes on where it ended, to the same losses as if it had never stopped. It does not
            know batches: other data take another file. Of several processes it keeps the first
            one's random state, so that with dropout the losses are others.
        progress: show how far the run is; nothing of it remains.

    Started by torchrun, every process draws the same batch and takes its share of the rows, so
    that the number of processes changes rounding alone.

    Raises:
        ValueError: a number out of its range, a batch with fewer rows than processes, a file that
            is no checkpoint, or one of a run with other settings or another model.
        RuntimeError: a gradient that is not finite.
    """
    check_sizes(steps=steps, save_every=save_every)
    if type(warmup) is not int or not 0 <= warmup <= steps:
        raise ValueError(f"warmup: expected an integer from 0 to steps={steps}, got {warmup!r}")
    if type(seed) is not int:
        raise ValueError(f"seed: expected an integer, got {seed!r}")
    for name, x in {"lr": lr, "clip": clip}.items():
        if not 0 < x < math.inf:
            raise ValueError(f"{name}: expected a positive number, got {x!r}")
    if not 0 <= weight_decay < math.inf:
        raise ValueError(f"weight_decay: expected a number >= 0, got {weight_decay!r}")

    rank, world, device = _place(device)
    model.to(device).train()
    generator = torch.Generator().manual_seed(seed)
    optimizer = optimizer_for(model, lr, weight_decay)
    losses = torch.zeros(steps, device=device)
    settings = dict(
        steps=steps, lr=lr, seed=seed, warmup=warmup, weight_decay=weight_decay, clip=clip
    )
    run = (model, optimizer, generator, losses, settings)
    start = _resume(checkpoint, *run) if checkpoint and Path(checkpoint).exists() else 0
    replica = model
    if world > 1:
        replica = DistributedDataParallel(model, [device] if device.type == "cuda" else None)

    with _progress_line(steps, show=progress and rank == 0) as say:
        for step in range(start, steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, lr, warmup)
            batch = batches(generator)
            if len(batch[0]) < world:
                raise ValueError(f"batches: expected at least {world} rows, got {len(batch[0])}")
            losses[step] = _step(replica, optimizer, batch, rank, world, device, clip)
            say(step, losses)
            if checkpoint and rank == 0 and ((step + 1) % save_every == 0 or step + 1 == steps):
                _save(checkpoint, step + 1, *run)
    return losses.tolist()


def _step(model, optimizer, batch, rank, world, device, clip):
    """One step on this process's rows; return the loss over the rows of all."""
    tokens, targets, mask = (x[rank::world].to(device) for x in batch)
    scored = batch[2].sum().clamp(min=1).to(device)
    targets = targets.masked_fill(~mask, NO_TARGET).flatten()
    logits = model(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, targets, ignore_index=NO_TARGET, reduction="sum") / scored
    optimizer.zero_grad()
    (loss * world).backward()  # DDP takes the mean over processes, where the sum is meant
    nn.utils.clip_grad_norm_(model.parameters(), clip, error_if_nonfinite=True)
    optimizer.step()
    loss = loss.detach()
    if world > 1:
        dist.all_reduce(loss)
    return loss


@torch.no_grad()
def accuracy(model, batch):
    """The part of the scored positions of batch (tokens, targets, mask) that model answers right.

    Errors: ValueError if the batch scores none.
    """
    device = next(model.parameters()).device
    tokens, targets, mask = (x.to(device) for x in batch)
    if not mask.any():
        raise ValueError("batch: expected at least one scored position, got none")
    training = model.training
    model.eval()
    try:
        right = model(tokens).argmax(-1) == targets
    finally:
        model.train(training)
    return right[mask].float().mean().item()


def _place(device):
    """Rank, number of processes, device: torchrun's if it started us, else those of one process."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        return 0, 1, pick_device(device)
    device = pick_device(device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), world, device


def _save(path, step, model, optimizer, generator, losses, settings):
    cuda = torch.cuda.get_rng_state() if losses.is_cuda else None
    part = Path(f"{path}.part")  # never half a checkpoint under its name
    torch.save(
        dict(
            step=step, settings=settings, losses=losses, model=model.state_dict(),
            optimizer=optimizer.state_dict(), generator=generator.get_state(),
            rng=torch.get_rng_state(), cuda_rng=cuda,
        ),
        part,
    )  # fmt: skip
    os.replace(part, path)


def _resume(path, model, optimizer, generator, losses, settings):
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        found = saved["settings"]
    except (EOFError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"checkpoint: {path} is not one that train wrote") from error
    if found != settings:
        raise ValueError(f"checkpoint: expected a run of {settings}, got {found}")
    shapes = [
        {k: x.shape for k, x in state.items()} for state in (saved["model"], model.state_dict())
    ]
    if shapes[0] != shapes[1]:
        raise ValueError(f"checkpoint: {path} is of a model with other weights")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    losses.copy_(saved["losses"])
    generator.set_state(saved["generator"])
    torch.set_rng_state(saved["rng"])
    if losses.is_cuda and saved["cuda_rng"] is not None:
        torch.cuda.set_rng_state(saved["cuda_rng"])
    return saved["step"]


@contextmanager
def _progress_line(steps, show):
    """Yield say(step, losses), which shows one line a few times a second; at the end it is gone."""
    write, last = _writer() if show else None, [0.0]

    def say(step, losses):
        if write and time.monotonic() - last[0] > 0.3:
            last[0] = time.monotonic()
            write(f"step {step + 1} of {steps}, loss {losses[step].item():.3f}")

    try:
        yield say
    finally:
        if write and last[0]:
            write("")


def _writer():
    """A function that replaces a line, in a notebook or on a terminal; None in a log."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is not None:
        from IPython.display import display

        handle = display({"text/html": ""}, raw=True, display_id=True)
        return lambda text: handle.update({"text/html": text}, raw=True)
    if sys.stderr.isatty():
        return lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
    return None

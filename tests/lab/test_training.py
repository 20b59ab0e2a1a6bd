"""The trainer against plain torch, after interruptions, and as two processes."""

import copy
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt2_to_k3.lab import tasks, training
from gpt2_to_k3.lab.recall import RecallModel
from gpt2_to_k3.lab.training import accuracy, learning_rate, train

QUIET = dict(device="cpu", progress=False)


def batches(generator):
    return tasks.overwrite_mqar(4, 6, 3, generator, values=5)


def small(rule="kda", seed=0, **sizes):
    torch.manual_seed(seed)
    return RecallModel(rule, 8, **{"hidden_size": 12, "head_dim": 4, "num_heads": 2} | sizes)


class Noisy(nn.Module):
    """A model that draws from the global generator at every step."""

    def __init__(self):
        super().__init__()
        self.model, self.drop = small(), nn.Dropout(0.3)

    def forward(self, tokens):
        return self.drop(self.model(tokens))


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_the_rate_rises_and_falls_in_straight_lines():
    rates = [learning_rate(step, 10, 0.8, 4) for step in range(11)]
    assert rates == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 0.8, 4 / 6, 3.2 / 6, 0.4, 1.6 / 6, 0.8 / 6, 0]
    )
    assert learning_rate(0, 5, 0.8, 0) == 0.8
    assert [learning_rate(step, 3, 0.6, 3) for step in range(3)] == pytest.approx([0.2, 0.4, 0.6])


def test_a_step_is_that_of_plain_torch():
    """With gradients that are clipped, a weight decay that shows, and two rates."""
    model, generator = small(), torch.Generator().manual_seed(5)
    plain, before = copy.deepcopy(model), weights(model)
    decayed = [p for n, p in plain.named_parameters() if p.ndim > 1]
    rest = [p for n, p in plain.named_parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]
    optimizer, want = torch.optim.AdamW(groups, lr=0.0), []
    for rate in (0.005, 0.01):
        tokens, targets, mask = batches(generator)
        loss = F.cross_entropy(plain(tokens)[mask], targets[mask])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.sqrt(sum(p.grad.square().sum() for p in plain.parameters()))
        assert norm > 0.1
        for p in plain.parameters():
            p.grad *= 0.1 / norm
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        want.append(loss.item())
    losses = train(model, batches, 2, 0.01, seed=5, warmup=2, weight_decay=0.5, clip=0.1, **QUIET)
    assert losses == pytest.approx(want, abs=1e-6)
    moved = (weights(plain) - before).abs().max()
    assert (weights(model) - weights(plain)).abs().max() < 1e-3 * moved


def test_only_scored_positions_count():
    def unscored_changed(generator):
        tokens, targets, mask = batches(generator)
        return tokens, torch.where(mask, targets, 1), mask

    runs = [
        train(small(), make, 3, 0.01, warmup=0, **QUIET) for make in (batches, unscored_changed)
    ]
    assert runs[0] == runs[1]


def test_a_batch_that_asks_nothing_changes_no_loss_to_nan():
    def nothing(generator):
        tokens, targets, mask = batches(generator)
        return tokens, targets, torch.zeros_like(mask)

    assert train(small(), nothing, 2, 0.01, warmup=0, **QUIET) == [0.0, 0.0]


def test_decays_and_norms_are_not_pulled_to_zero():
    model = small()
    names = {id(p): name for name, p in model.named_parameters()}
    optimizer = training.optimizer_for(model, 0.01, 0.3)
    decay = {
        names[id(p)]: group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert decay.keys() == set(names.values())
    for name, amount in decay.items():
        free = name.endswith(("A_log", "dt_bias")) or "norm" in name
        assert amount == (0.0 if free else 0.3), name


def test_two_runs_of_one_seed_are_equal_and_of_two_are_not():
    runs = [train(small(), batches, 4, 0.01, seed=s, warmup=1, **QUIET) for s in (3, 3, 4)]
    assert runs[0] == runs[1] and len(runs[0]) == 4
    assert runs[0][0] != runs[2][0]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("fails_at", [1, 5, 6, 8])
def test_an_interrupted_run_goes_on_to_the_same_losses(tmp_path, fails_at):
    file, options = tmp_path / "run.pt", dict(seed=2, warmup=2, save_every=3, **QUIET)
    whole = Noisy()
    want = train(whole, batches, 9, 0.02, **options)
    after = torch.get_rng_state()
    calls = []

    def failing(generator):
        calls.append(1)
        if len(calls) > fails_at:
            raise Interrupted
        return batches(generator)

    with pytest.raises(Interrupted):
        train(Noisy(), failing, 9, 0.02, checkpoint=file, **options)
    assert file.exists() == (fails_at >= 3)
    model = Noisy()
    if file.exists():  # what the checkpoint says must win over everything that is there
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(torch.nan)
        torch.manual_seed(77)
    assert train(model, batches, 9, 0.02, checkpoint=file, **options) == want
    assert torch.equal(weights(model), weights(whole))
    assert torch.equal(torch.get_rng_state(), after)
    assert [f.name for f in tmp_path.iterdir()] == ["run.pt"]


def test_a_finished_run_is_not_run_again(tmp_path):
    options = dict(warmup=1, checkpoint=tmp_path / "run.pt", **QUIET)
    model, again = small(), small(seed=1)
    want = train(model, batches, 3, 0.01, **options)
    assert train(again, None, 3, 0.01, **options) == want
    assert torch.equal(weights(model), weights(again))


@pytest.mark.parametrize("other", [dict(lr=0.02), dict(seed=1), dict(steps=4), dict(clip=2.0)])
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, other):
    run = dict(steps=3, lr=0.01, warmup=1, checkpoint=tmp_path / "run.pt", **QUIET)
    train(small(), batches, **run)
    with pytest.raises(ValueError, match="checkpoint"):
        train(small(), batches, **run | other)


def test_a_file_that_is_no_checkpoint_of_this_model_is_refused_and_kept(tmp_path):
    file = tmp_path / "run.pt"
    run = dict(steps=3, lr=0.01, warmup=1, checkpoint=file, **QUIET)
    other = nn.Embedding(32, 32)
    train(other, batches, **run)
    for spoil, message in [
        (lambda: None, "is of a model with other weights"),
        (lambda: torch.save({"weights": torch.ones(2)}, file), "is not one that train wrote"),
        (lambda: file.write_bytes(b""), "is not one that train wrote"),
        (lambda: file.write_bytes(b"not a checkpoint"), "is not one that train wrote"),
    ]:
        spoil()
        kept, model = file.read_bytes(), small()
        before = weights(model).clone()
        with pytest.raises(ValueError, match=f"^checkpoint: .*run.pt {message}"):
            train(model, batches, **run)
        assert file.read_bytes() == kept and torch.equal(weights(model), before)


SHARED = """
import os, sys, torch
sys.path.insert(0, sys.argv[1])
from test_training import batches, small, train
model, file = small(), sys.argv[2]
losses = train(model, batches, 5, 0.02, seed=1, warmup=2, device="cpu", checkpoint=file)
torch.save(model.state_dict() | {"losses": torch.tensor(losses)}, file + os.environ["RANK"])
"""


def test_two_processes_train_as_one(tmp_path):
    """torchrun gives each process half of the rows; the losses and the weights are those of one."""
    script, out = tmp_path / "shared.py", str(tmp_path / "run.pt")
    script.write_text(SHARED, encoding="utf-8")
    here = os.path.dirname(__file__)
    paths = [*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         script, here, out],
        check=True, capture_output=True, timeout=50,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    model = small()
    want = train(model, batches, 5, 0.02, seed=1, warmup=2, **QUIET)
    first, second = (torch.load(out + rank, weights_only=True) for rank in "01")
    assert first["losses"].tolist() == pytest.approx(want, abs=1e-5)
    for name, p in model.state_dict().items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], p, atol=1e-4, rtol=1e-4)
    # One process may go on where two stopped, since all drew the same batches.
    again = train(small(seed=3), None, 5, 0.02, seed=1, warmup=2, checkpoint=out, **QUIET)
    assert again == first["losses"].tolist()


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(steps=0), "steps.*0"),
        (dict(lr=0.0), "lr.*0.0"),
        (dict(lr=float("nan")), "lr.*nan"),
        (dict(warmup=4), "warmup.*3.*4"),
        (dict(warmup=-1), "warmup.*-1"),
        (dict(clip=0), "clip.*0"),
        (dict(weight_decay=-1.0), "weight_decay.*-1.0"),
        (dict(save_every=0), "save_every.*0"),
        (dict(seed=1.5), "seed.*1.5"),
        (dict(device="abacus"), "device.*abacus"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(bad, message):
    with pytest.raises(ValueError, match=message):
        train(small(), batches, **dict(steps=3, lr=0.01, warmup=1, **QUIET) | bad)


def test_a_gradient_that_is_not_finite_stops_the_run():
    model = small("delta")
    with torch.no_grad():
        model.head.weight[0] = torch.inf
    with pytest.raises(RuntimeError, match="non-finite"):
        train(model, batches, 2, 0.01, warmup=0, **QUIET)


def test_accuracy_counts_scored_positions_and_leaves_the_model_as_it_was():
    class Says(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, tokens):
            assert not self.training and not torch.is_grad_enabled()
            return F.one_hot(tokens, 5) * self.weight

    model = Says()
    tokens = torch.tensor([[1, 2, 3, 4]])
    targets = torch.tensor([[1, 2, 0, 0]])
    mask = torch.tensor([[True, False, True, True]])
    assert accuracy(model, (tokens, targets, mask)) == pytest.approx(1 / 3)
    assert model.training
    with pytest.raises(ValueError, match="batch.*scored"):
        accuracy(model, (tokens, targets, torch.zeros_like(mask)))
    with pytest.raises(RuntimeError):
        accuracy(model, (tokens + 5, targets, mask))
    assert model.training


def test_progress_leaves_nothing_on_a_terminal_and_writes_nothing_into_a_log(monkeypatch, capsys):
    train(small(), batches, 2, 0.01, warmup=0, device="cpu")
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    train(small(), batches, 2, 0.01, warmup=0, device="cpu")
    out, err = capsys.readouterr()
    assert "step 1 of 2, loss" in err and err.endswith("\r\033[K") and out == ""
    assert "\n" not in err


def test_progress_in_a_notebook_is_one_output_that_ends_empty():
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell, new_notebook

    code = "\n".join([
        "import torch",
        "from gpt2_to_k3.lab import tasks, training",
        "from gpt2_to_k3.lab.recall import RecallModel",
        "print('before')",
        "losses = training.train(RecallModel('delta', 8, hidden_size=4, head_dim=2),",
        "    lambda g: tasks.overwrite_mqar(2, 3, 3, g, values=5), 3, 0.01,",
        "    warmup=0, device='cpu')",
        "print('after')",
    ])  # fmt: skip
    notebook = new_notebook(cells=[new_code_cell(code)])
    NotebookClient(notebook, timeout=50).execute()
    outputs = notebook.cells[0].outputs
    assert "".join(o.get("text", "") for o in outputs) == "before\nafter\n"
    shown = [o for o in outputs if o.output_type != "stream"]
    assert [o.data for o in shown] == [{"text/html": ""}]

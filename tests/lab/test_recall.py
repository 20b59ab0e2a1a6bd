"""The models against the layers of the course, and the experiment that trains them."""

import json

import pytest
import recall as benchmark
import torch
import torch.nn.functional as F

from gpt2_to_k3.lab import load_record, records, tasks
from gpt2_to_k3.lab.recall import GATES, RULES, RecallMixer, RecallModel, rotate
from gpt2_to_k3.lab.training import accuracy, train
from gpt2_to_k3.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention


def batches(generator):
    return tasks.overwrite_mqar(4, 6, 3, generator, values=5)


@pytest.mark.parametrize("rule", RULES)
def test_every_weight_of_a_model_is_used_and_nothing_looks_ahead(rule):
    torch.manual_seed(0)
    model = RecallModel(rule, 8, hidden_size=12, head_dim=4, num_heads=2, layers=2)
    tokens, targets, mask = batches(torch.Generator())
    loss = F.cross_entropy(model(tokens)[mask], targets[mask])
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0, name
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 8
    difference = (model(tokens) - model(changed)).abs().amax(-1)
    assert difference[:, :7].max() < 1e-6 < difference[:, 7:].max()


@pytest.mark.parametrize("rule", ["delta", "gated delta", "kda"])
def test_a_mixer_is_the_layer_of_the_course(rule):
    torch.manual_seed(0)
    mixer, x = RecallMixer(rule, 10, 2, 4), torch.randn(2, 9, 10)
    state = {name: t.clone() for name, t in mixer.state_dict().items()}
    gate, decay = state.pop("g_proj.weight"), state.pop("f_proj.weight", None)
    if rule == "delta":  # which has no output gate: half open everywhere
        layer = DeltaNet(10, 2, 4)
        mixer.g_proj.weight.data.zero_()
        mixer.o_proj.weight.data *= 2
    elif rule == "gated delta":  # whose gate is SiLU: y sigmoid(y), with its y made 1 by a hook
        layer = GatedDeltaNet(10, 2, 4)
        state |= {"a_proj.weight": decay, "g_proj.weight": gate}
        layer.g_proj.register_forward_hook(lambda m, a, y: torch.full_like(y, 1.0))
        mixer.g_proj.register_forward_hook(lambda m, a, y: torch.full_like(y, 1.0))
    else:
        layer = KimiDeltaAttention(10, 2, 4, use_full_rank_gate=True)
        state |= {"g_proj.weight": gate}
        down = torch.linalg.pinv(torch.randn(8, 4))  # its decay's projection has rank 4
        state |= {"f_a_proj.weight": down @ decay, "f_b_proj.weight": torch.linalg.pinv(down)}
        mixer.f_proj.weight.data = state["f_b_proj.weight"] @ state["f_a_proj.weight"]
    layer.load_state_dict(state)
    torch.testing.assert_close(mixer(x), layer(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rule", ["softmax", "linear", "decay"])
def test_a_mixer_without_a_correction_weighs_what_was_stored(rule):
    """Score by score: softmax with positions as complex angles, a plain sum, a sum that fades."""
    torch.manual_seed(0)
    mixer, x = RecallMixer(rule, 10, 1, 4), torch.randn(1, 7, 10)
    q, k, v, beta = (a[0, :, 0] for a in mixer.project(x, None)[:4])
    o = []
    for t in range(7):
        weights = (k[: t + 1] @ q[t]) / 4**0.5
        if rule == "decay":
            g = -mixer.A_log.exp() * F.softplus(mixer.f_proj(x)[0, :, 0] + mixer.dt_bias)
            weights = weights * torch.stack([g[j + 1 : t + 1].sum().exp() for j in range(t + 1)])
        if rule == "softmax":
            a, b = (torch.complex(y[:, :2], y[:, 2:]) for y in (q, k))
            turn = torch.exp(1j * torch.arange(-t, 1)[:, None] * torch.tensor([1.0, 0.01]))
            scores = (a[t].conj() * turn * b[: t + 1]).real.sum(-1)
            weights = (scores * mixer.log_scale.exp().squeeze()).softmax(0)
        o.append((weights * beta[: t + 1]) @ v[: t + 1])
    want = mixer.o_proj(mixer.o_norm(torch.stack(o)) * mixer.g_proj(x)[0].sigmoid())
    torch.testing.assert_close(mixer(x)[0], want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("gates, half_lives", [("published", (1, 1e3)), ("slow", (60, 1e3))])
def test_gates_begin_where_they_say(gates, half_lives):
    torch.manual_seed(0)
    mixer = RecallMixer("kda", 8, 2, 500, gates)
    decay = F.softplus(mixer.dt_bias).view(2, 500) * mixer.A_log.exp()[:, None]
    memory = 1 / decay.detach().flatten()
    assert half_lives[0] * 0.5 < memory.min() and memory.max() < half_lives[1] * 1.01
    assert (memory.median() < 30) == (gates == "published")
    assert F.softplus(mixer.dt_bias).max() <= GATES[gates][1][1] * 1.001


def test_rotation_makes_scores_depend_on_distance_alone():
    q, k = (torch.randn(1, 1, 1, 6, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    q, k = (rotate(x.expand(1, 9, 1, 6).double())[0, :, 0] for x in (q, k))
    scores = q @ k.T
    for distance in range(9):
        line = scores.diagonal(-distance)
        torch.testing.assert_close(line, line[:1].expand_as(line))
    assert (scores.diagonal(-1)[0] - scores[0, 0]).abs() > 1e-3
    torch.testing.assert_close(q.norm(dim=-1), q[:1].norm().expand(9))


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(rule="gru"), "rule.*gru"),
        (dict(gates="fast"), "gates.*fast"),
        (dict(rule="softmax", head_dim=5), "head_dim.*5"),
        (dict(layers=0), "layers"),
        (dict(vocab_size=0), "vocab_size"),
        (dict(hidden_size=0), "hidden_size"),
    ],
)
def test_models_that_make_no_sense_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        RecallModel(**dict(rule="kda", vocab_size=4) | options)


def test_a_delta_rule_overwrites_and_a_sum_does_not():
    def make(generator):
        return tasks.overwrite_mqar(16, 12, 4, generator, values=8)

    test, found = make(torch.Generator().manual_seed(9)), {}
    for rule in ("linear", "delta"):
        torch.manual_seed(0)
        model = RecallModel(rule, 12, hidden_size=32, head_dim=16)
        train(model, make, 150, 0.01, warmup=20, device="cpu", progress=False)
        found[rule] = accuracy(model, test)
    assert found["delta"] > found["linear"] + 0.25 and found["linear"] < 0.75


@pytest.mark.parametrize("workers", [1, 2])
def test_the_whole_experiment_runs_with_toy_sizes(tmp_path, monkeypatch, capsys, workers):
    file, few = tmp_path / "recall.json", ["--rules", "softmax", "kda", "--seeds", "1"]
    parts = ["rules", "states", "lengths"] if workers == 1 else ["lengths"]
    benchmark.main(
        ["--tiny", "--workers", str(workers), "--parts", *parts, *few, "--save", str(file)]
    )
    monkeypatch.setattr(records.resources, "files", lambda package: tmp_path)
    (tmp_path / "data").mkdir()
    file.rename(tmp_path / "data" / file.name)
    record = load_record("recall")
    rows = record["result"]["rows"]
    assert record["result"]["not_run"] == 0 and {row["part"] for row in rows} == set(parts)
    seen = {(row["rule"], row["gates"]) for row in rows}
    assert seen == {("softmax", "slow"), ("kda", "slow"), ("kda", "published")}
    assert all(0 <= row["accuracy"] <= 1 and len(row["losses"]) == 2 for row in rows)
    assert f"0 of {len(rows)} runs left" in capsys.readouterr().out


def test_the_experiment_can_be_stopped_says_what_is_missing_and_goes_on(tmp_path, capsys):
    file = tmp_path / "recall.json"
    run = ["--tiny", "--parts", "states", "--rules", "linear", "--save", str(file), "--seeds"]
    benchmark.main([*run, "2", "--minutes", "0"])
    assert "8 of 8 runs left" in capsys.readouterr().out
    benchmark.main([*run, "1"])
    first = json.loads(file.read_text("utf-8"))["result"]["rows"]
    capsys.readouterr()
    benchmark.main([*run, "2"])
    rows = json.loads(file.read_text("utf-8"))["result"]["rows"]
    assert "0 of 4 runs left" in capsys.readouterr().out
    assert len(first) == 4 and rows[:4] == first and len(rows) == 8


@pytest.mark.parametrize("task", ["overwrite", "mqar", "palindrome", "stacks", "reset", "needle"])
def test_a_problem_has_the_length_and_vocabulary_it_says(task):
    for longer in (1, benchmark.LONGER):
        make, vocabulary = benchmark.problem(task, 96, 16, longer)
        tokens, targets, mask = make(64, torch.Generator().manual_seed(0))
        assert 96 * longer - 3 < tokens.shape[1] <= 96 * longer
        assert tokens.max() < vocabulary and targets.max() < vocabulary
    assert tokens.max() == vocabulary - 1 or task == "reset"

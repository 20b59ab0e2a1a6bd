"""Inputs of the sequence rules, their gradients, and comparisons that count what they compared."""

import os
import shutil

import pytest
import torch
from hypothesis import settings

# A merge must not depend on luck: in CI the examples are always the same, elsewhere they explore.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# Largest relative errors allowed: forward, gradients.
TOLERANCE = {torch.float64: (1e-12, 1e-12), torch.float32: (1e-6, 2e-6)}


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def random_inputs():
    """random_inputs(B, T, H, K, V, gates="head", ...) -> named float32 tensors of one call.

    Keys have length 1; `gates` is None, "head" or "channel", with log-decays of mean -0.3.
    """

    def make(B, T, H, K, V, gates=None, beta=False, state=False, seed=0):
        q, k, v, z, b, S = (
            normal(*shape, seed=7 * seed + i)
            for i, shape in enumerate(
                [(B, T, H, K), (B, T, H, K), (B, T, H, V), (B, T, H, K), (B, T, H), (B, H, K, V)]
            )
        )
        inputs = dict(q=q, k=torch.nn.functional.normalize(k, dim=-1), v=v)
        if gates:
            inputs["g"] = -0.4 * z.abs() if gates == "channel" else -0.4 * z.abs()[..., 0]
        if beta:
            inputs["beta"] = b.sigmoid()
        if state:
            inputs["initial_state"] = S
        return inputs

    return make


@pytest.fixture(scope="session")
def with_grads():
    """with_grads(f, inputs, dtype) -> o, state and, of a random weighing of both, each gradient."""

    def run(f, inputs, dtype=torch.float64, **options):
        inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
        results = dict(zip(("o", "state", "z"), f(**inputs, **options), strict=False))
        weighed = [(normal(*y.shape, seed=99).to(y) * y).sum() for y in results.values()]
        grads = [None] * len(inputs)
        if any(y.requires_grad for y in weighed):  # without a token nothing may
            grads = torch.autograd.grad(sum(weighed), inputs.values(), allow_unused=True)
        results = {name: y.detach() for name, y in results.items()}
        for (name, x), grad in zip(inputs.items(), grads, strict=True):
            results[f"d{name}"] = torch.zeros_like(x) if grad is None else grad
        return results

    return run


@pytest.fixture
def compare(request):
    """compare(case, got, want): named tensors, by max |error| / max |want|.

    `loosen` multiplies the tolerance; `floor` is the least size that the error of a gradient is
    relative to, where it is a sum of larger terms that cancel.
    """
    record = {"tensors": 0}
    request.node.user_properties.append(("compared", record))

    def check(case, got, want, loosen=1.0, floor=0.0):
        assert got.keys() == want.keys(), case
        for name, x in got.items():
            y, gradient = want[name].double(), name != "z" and name.startswith("d")
            error = relative_error(x, y, floor if gradient else 0.0)
            record["tensors"] += 1
            limit = TOLERANCE[x.dtype][gradient] * loosen
            kind = f"{x.dtype} {'gradient' if gradient else 'forward'}"[6:]
            if loosen == 1.0:
                record[kind] = max(record.get(kind, 0.0), error)
            assert error <= limit, f"{case}: {name} is off by {error:.1e}, limit {limit:.1e}"

    return check


def relative_error(x, y, floor=0.0):
    """max |x - y| / max(|y|, floor); inf where x has a NaN or an infinity, or where only y is all 0."""
    if x.shape != y.shape or not x.isfinite().all():
        return torch.inf
    if x.numel() == 0 or torch.equal(x.double(), y):
        return 0.0
    error, size = (x.double() - y).abs().max().item(), max(y.abs().max().item(), floor)
    return error / size if size else torch.inf


@pytest.fixture(scope="session")
def browser_type_launch_args():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        message = "no Chromium or Chrome found: install one, or set CHROMIUM to its path"
        pytest.fail(message, pytrace=False) if os.environ.get("CI") else pytest.skip(message)
    return {
        "executable_path": path,
        "args": ["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
    }


def pytest_terminal_summary(terminalreporter):
    """Counts travel in the reports, so they arrive from the processes of xdist too."""
    records = [
        record
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for name, record in report.user_properties
        if name == "compared"
    ]
    if records:
        total = sum(record.pop("tensors") for record in records)
        worst = {}
        for record in records:
            for kind, error in record.items():
                worst[kind] = max(worst.get(kind, 0.0), error)
        errors = ", ".join(f"{kind} {error:.1e}" for kind, error in sorted(worst.items()))
        terminalreporter.write_line(f"{total} tensors compared; largest errors: {errors}")

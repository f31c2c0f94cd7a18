"""The table of ``scripts/gpu-check``: verdicts, and the checks that need no run."""

from __future__ import annotations

import ast
from collections.abc import Callable
from types import SimpleNamespace as Of
from typing import Any

import gpu_checks
import pytest
import torch
from gpu_check import Check, Machine, Skipped, checks, main, run_check
from repository import ROOT

from penstock.schemas.errors import RunFailed, UnsupportedRequest

SCRIPTS = ROOT / "scripts"
HERE = Machine("cpu", 0)


def raising(error: Exception) -> Callable[[Machine], str]:
    def check(machine: Machine) -> str:
        raise error

    return check


@pytest.mark.parametrize(
    ("error", "machine", "verdict"),
    [
        (RunFailed("rank 1 failed"), HERE, "FAILED"),
        (AssertionError("gradients 1 apart"), HERE, "FAILED"),
        (ValueError("no traceback"), HERE, "FAILED"),
        (UnsupportedRequest("not with this rule"), HERE, "refused"),
        (Skipped("needs 2 GPUs"), HERE, "no GPU"),
        (Skipped("needs 2 GPUs"), Machine("cuda", 1), "needs 2 GPUs"),
    ],
)
def test_whatever_goes_wrong_becomes_a_verdict(error: Exception, machine: Machine, verdict: str) -> None:
    row = run_check(Check("a check", raising(error)), machine)
    assert row.verdict == verdict
    assert str(error).split(":")[0] in row.figure


@pytest.mark.tier("nightly")
def test_checks_without_a_run_say_what_they_measured(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        named = ("codec", "issuing", "devices", "not there")
        assert main(["--device", "cpu", *(text for name in named for text in ("--only", name))]) == 0
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    verdicts = [line[41:54].strip() for line in printed.splitlines()[1:] if line[:40].strip()]
    assert verdicts == ["no GPU"] * 4, "their CPU forms are ok"
    assert "GB/s" in printed
    assert torch.__version__ in printed
    assert "gloo-staged: send" in printed


def test_every_row_asserts_something() -> None:
    """Itself, or by a function of its file, or by a refusal that it expects."""
    tree = ast.parse((SCRIPTS / "gpu_checks.py").read_text(encoding="utf-8"))
    functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    asserting = {"Refusal"}
    while more := {name for name, one in functions.items() if name not in asserting and _asserts(one, asserting)}:
        asserting |= more
    rows = {getattr(check.run, "func", check.run).__name__ for check in checks()}
    assert rows <= set(functions)
    assert rows <= asserting, f"nothing could fail these: {sorted(rows - asserting)}"


def _asserts(function: ast.FunctionDef, asserting: set[str]) -> bool:
    inside = list(ast.walk(function))
    called = {one.func.id for one in inside if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    return any(isinstance(one, ast.Assert) for one in inside) or bool(called & asserting)


def measured(*, step: float = 1.0, peak: float = 1.0, apart: float | None = 0.0, passed: bool = True) -> Any:
    """Return a run on a GPU with these multiples of the predicted step and peak, and gradients this far apart."""
    memory = Of(peak_memory_bytes=1100, memory=Of(context_bytes=100))
    file = Of(plan=Of(prediction=Of(time_per_global_batch_ns=1000, devices=(memory,))))
    report = Of(peak_memory_bytes=(1000 * peak,), reserved_memory_bytes=(0,), step_times_ns=(1000 * step,))
    report.check_failure = None if passed else RunFailed("gradients 0.5 apart")
    report.gradient_check, report.gradient_tolerance = apart, 1e-6
    return Of(device="cuda", run=lambda precision="fp32": (file, report, None), report=report)


def timed(machine: Any) -> str:
    """Run the last part of the check ``calibrated``, which trains in between."""
    return gpu_checks._timed(machine, *machine.run()[:2], gpu_checks.CALIBRATED)


@pytest.mark.parametrize(
    ("row", "within", "beyond"),
    [
        (lambda at: gpu_checks.memory(at, "fp32"), measured(peak=1.05), measured(peak=1.06)),
        (lambda at: gpu_checks.memory(at, "bf16"), measured(peak=0.96), measured(peak=0.95)),
        (lambda at: gpu_checks.prediction(at, "fp32"), measured(step=1.17), measured(step=1.18)),
        (lambda at: gpu_checks.prediction(at, "bf16"), measured(step=0.87), measured(step=0.86)),
        (timed, measured(step=1.05), measured(step=1.06)),
        (lambda at: gpu_checks.compared(at.report), measured(), measured(passed=False)),
        (lambda at: gpu_checks.compared(at.report), measured(), measured(apart=None)),
    ],
)
def test_what_is_beyond_its_limit_fails_a_row(row: Callable[[Any], str], within: Any, beyond: Any) -> None:
    assert row(within)
    with pytest.raises(AssertionError):
        row(beyond)


def test_the_results_say_of_every_row_when_it_ran() -> None:
    page = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    _, _, table = page.partition("## What has run on a GPU")
    table, _, _ = table.partition("```")
    words = {check.name.split(": ")[-1].replace("update rule ", "").replace("precision ", "") for check in checks()}
    missing = sorted(each for each in words if each not in table and each.rpartition(", ")[0] not in table)
    assert not missing


def test_names_are_unique() -> None:
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)

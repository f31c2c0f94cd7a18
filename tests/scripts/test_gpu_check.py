"""The table of ``scripts/gpu-check``: verdicts, and the checks that need no run."""

from __future__ import annotations

import ast
from collections.abc import Callable

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


def test_checks_without_a_run_say_what_they_measured(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        named = ("codec", "issuing", "devices", "not there")
        assert main(["--device", "cpu", *(text for name in named for text in ("--only", name))]) == 0
    finally:
        torch.set_num_threads(threads)
    said = capsys.readouterr().out
    verdicts = [line[41:54].strip() for line in said.splitlines()[1:] if line[:40].strip()]
    assert verdicts == ["no GPU"] * 4, "their CPU forms are ok"
    assert "GB/s" in said
    assert torch.__version__ in said
    assert "gloo-staged: send" in said


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


def test_the_page_says_of_every_row_when_it_ran() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    _, _, table = page.partition("### What has run on a GPU")
    table, _, _ = table.partition("```")
    words = {check.name.split(": ")[-1].replace("update rule ", "").replace("precision ", "") for check in checks()}
    missing = sorted(each for each in words if each not in table and each.rpartition(", ")[0] not in table)
    assert not missing


def test_names_are_unique() -> None:
    names = [check.name for check in checks()]
    assert len(set(names)) == len(names)

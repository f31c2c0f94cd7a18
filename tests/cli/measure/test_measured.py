"""The lines that a finished run prints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.measure.measured import measured_lines
from penstock.examples.tiny import tiny_plan_file
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.plan import PlanFile

pytestmark = pytest.mark.tier("quick")


@pytest.mark.parametrize(
    ("precision", "words"),
    [("fp32", "0.25 apart from a single process"), ("bf16", "0.25 apart"), ("fp16", "not compared in fp16")],
)
def test_gradients_that_were_not_compared_are_not_called_equal(precision: Any, words: str) -> None:
    ended: Any = SimpleNamespace(step_times_ns=(5,), losses=(2.0,), gradient_check=0.25)
    lines = measured_lines(PlanFile.parse(tiny_plan_file()).plan, ended, RunOptions(precision=precision))
    assert lines[-1].startswith("gradients  " + words)

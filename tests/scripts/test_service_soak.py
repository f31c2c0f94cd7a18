"""Six deaths of ``scripts/soak service`` under load, at random moments: workers, services, a solver, a PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts_path import environment
from soaking import load

from penstock.schemas.errors import RunFailed

pytestmark = pytest.mark.tier("everything")

LIMIT_S = 600


@pytest.mark.timeout(LIMIT_S)
def test_six_deaths_cost_no_job_and_no_answer(tmp_path: Path):
    command = [sys.executable, "-m", "soaking", "service", "--kills", "6", "--seed", "97"]
    done = subprocess.run(
        [*command, "--most-at-once", "10", "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no job lost, none with two answers, events in order, no orphan" in done.stdout
    assert "Traceback" not in "".join(path.read_text(errors="replace") for path in tmp_path.glob("*.log"))


@pytest.mark.tier("quick")
def test_a_job_that_never_gets_on_ends_the_soak(monkeypatch: pytest.MonkeyPatch):
    soaked = load.Load(["http://127.0.0.1:9"], seed=0)
    soaked.jobs["a"] = load.Accepted(seed=0, accepted=0.0, state="running")
    soaked.refuse_fault()
    monkeypatch.setattr(load, "STUCK_S", -1.0)
    with pytest.raises(RunFailed, match="1 jobs are stuck, unchanged for -1 s: a is running"):
        soaked.refuse_fault()
    soaked.jobs["a"].state = "succeeded"
    soaked.refuse_fault()

"""Six deaths of ``scripts/soak service`` under load, at random moments: workers, services, a solver, a PostgreSQL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts_path import environment

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

"""Six deaths of ``scripts/soak``: an agent, a node, the service and ranks, at random moments."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts_path import environment

from penstock.executor.checkpoints.checkpoint import newest

pytestmark = pytest.mark.tier("everything")

LIMIT_S = 900


@pytest.mark.timeout(LIMIT_S)
def test_six_deaths_cost_no_checkpoint_and_leave_the_losses_as_they_are(tmp_path: Path):
    command = [sys.executable, "-m", "soaking", "--kills", "6", "--seed", "4", "--most-at-once", "10"]
    done = subprocess.run(
        [*command, "--directory", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no hang, no orphan, no lost checkpoint, the same losses" in done.stdout
    checkpoint = newest(tmp_path / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.next_step(1) > 0

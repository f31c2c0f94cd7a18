"""The CPU time that the tiers print counts a process while it runs, and does not count it again when it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest
from cpu_time import cpu_s

pytestmark = pytest.mark.tier("ci")

BUSY = """
import subprocess, sys, time
if sys.argv[1:]:
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
while time.process_time() < 0.3:
    pass
print(flush=True)
input()
"""


def test_a_process_counts_while_it_runs_and_only_once() -> None:
    """Also one that it has started and waited for."""
    before = cpu_s()
    with subprocess.Popen(
        [sys.executable, "-c", BUSY, "import time\nwhile time.process_time() < 0.3: pass"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        running = cpu_s() - before
        process.communicate("\n", timeout=60)
    ended = cpu_s() - before
    assert running > 0.55
    assert running - 0.05 < ended < running + 0.2, "what a process takes to end, and a tick of the clock"

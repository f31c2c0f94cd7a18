"""Processes that a command keeps: they are ended with it, whatever ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from background import background
from scripts_path import environment

from penstock.schemas.errors import RunFailed

pytestmark = pytest.mark.tier("ci")

SLEEPER = [sys.executable, "-c", "import time; print('up 42', flush=True); time.sleep(600)"]
PARENT = f"""
import sys, time
from pathlib import Path
from background import background
with background(Path(sys.argv[1])) as processes:
    for name in ("one", "two"):
        processes.start(name, {SLEEPER!r})
        processes.wait_for(name, r"up (\\d+)", 30)
    print(*[process.pid for process in processes._running.values()], flush=True)
    time.sleep(600)
"""


def heed_interrupts() -> None:
    """Reset SIGINT: a shell starts background jobs with SIGINT ignored, and their children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _parent(directory: Path) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    parent = subprocess.Popen(
        [sys.executable, "-P", "-c", PARENT, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=heed_interrupts,
    )
    assert parent.stdout is not None
    return parent, [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]


def test_it_waits_for_words_in_the_log_and_stops_everything(tmp_path: Path) -> None:
    with background(tmp_path) as processes:
        processes.start("one", SLEEPER)
        assert processes.wait_for("one", r"up (\d+)", 30) == "42"
        processes.check()
        child = psutil.Process(processes._running["one"].pid)
    assert not child.is_running()
    assert (tmp_path / "one.log").read_text() == "up 42\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_the_command_ends_its_processes(number: signal.Signals, tmp_path: Path) -> None:
    parent, children = _parent(tmp_path)
    assert len(children) == 2
    parent.send_signal(number)
    assert parent.wait(30) != 0
    assert parent.stdout is not None
    parent.stdout.close()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []


def test_a_process_that_ends_early_is_reported_with_its_words(tmp_path: Path) -> None:
    with background(tmp_path) as processes:
        processes.start("bad", [sys.executable, "-c", "raise SystemExit('no way')"])
        with pytest.raises(RunFailed, match=r"bad ended with exit code 1:\n    no way"):
            processes.wait_for("bad", r"up (\d+)", 30)
        with pytest.raises(RunFailed, match="bad ended"):
            processes.check()

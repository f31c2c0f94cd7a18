"""A forkserver that warms up gives children all the while, and leaves nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from penstock.workers.forkserver import Forkserver

LIMIT_S = 30.0


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Forkserver]]:
    """Start a forkserver whose warm-up is one of ``slow_steps``."""
    monkeypatch.setenv("PIDS_FILE", str(tmp_path / "pids"))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    running: list[Forkserver] = []

    def start(name: str) -> Forkserver:
        running.append(Forkserver(preload=(f"slow_steps:{name}",)))
        running[-1].start()
        return running[-1]

    yield start
    for one in running:
        one.stop()


@pytest.mark.tier("nightly")
def test_what_takes_long_holds_no_child_up_and_ends_with_the_forkserver(
    started: Callable[[str], Forkserver], tmp_path: Path
) -> None:
    forkserver = started("endless")
    compiling = written(tmp_path / "pids")
    for _ in range(2):
        child = forkserver.spawn()
        child.pipe.close()
        assert child.wait(LIMIT_S) == 0
        child.close()
    assert compiling.is_running()
    forkserver.stop()
    assert psutil.wait_procs([compiling], LIMIT_S)[1] == []


@pytest.mark.tier("nightly")
def test_what_children_have_started_ends_with_a_service_that_dies_before_all_is_warm(
    started: Callable[[str], Forkserver], tmp_path: Path
) -> None:
    """As the kernel does when a process is killed: its pipes and sockets close, and nothing is said."""
    forkserver = started("starting")
    written(tmp_path / "pids")
    child = forkserver.spawn()
    beyond = written(tmp_path / "pids-started")
    try:
        assert forkserver._process is not None
        assert forkserver._process.stdin is not None
        assert forkserver._control is not None
        forkserver._process.stdin.close()
        forkserver._control.close()
        assert psutil.wait_procs([beyond], LIMIT_S)[1] == []
    finally:
        child.close()
        with suppress(psutil.NoSuchProcess):
            beyond.kill()


def written(path: Path) -> psutil.Process:
    """Return the process whose id is written to a file."""
    until = time.monotonic() + LIMIT_S
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    return psutil.Process(int(path.read_text()))


def test_a_warm_up_that_fails_costs_no_child(
    started: Callable[[str], Forkserver], capfd: pytest.CaptureFixture[str]
) -> None:
    forkserver = started("failing")
    assert forkserver.wait_ready(LIMIT_S)
    child = forkserver.spawn()
    child.pipe.close()
    assert child.wait(LIMIT_S) == 0
    child.close()
    printed, until = "", time.monotonic() + LIMIT_S
    while "cannot be warmed up" not in printed:  # children come first
        assert time.monotonic() < until
        time.sleep(0.01)
        printed += capfd.readouterr().err

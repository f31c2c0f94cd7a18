"""A forkserver that warms up gives children all the while, and leaves nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
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


def test_what_takes_long_holds_no_child_up_and_ends_with_the_forkserver(
    started: Callable[[str], Forkserver], tmp_path: Path
) -> None:
    forkserver = started("endless")
    until = time.monotonic() + LIMIT_S
    while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    compiling = psutil.Process(int((tmp_path / "pids").read_text()))
    for _ in range(2):
        child = forkserver.spawn()
        child.pipe.close()
        assert child.wait(LIMIT_S) == 0
        child.close()
    assert compiling.is_running()
    forkserver.stop()
    assert psutil.wait_procs([compiling], LIMIT_S)[1] == []


def test_a_warm_up_that_fails_costs_no_child(
    started: Callable[[str], Forkserver], capfd: pytest.CaptureFixture[str]
) -> None:
    forkserver = started("failing")
    assert forkserver.wait_ready(LIMIT_S)
    child = forkserver.spawn()
    child.pipe.close()
    assert child.wait(LIMIT_S) == 0
    child.close()
    forkserver.stop()
    assert "cannot be warmed up" in capfd.readouterr().err

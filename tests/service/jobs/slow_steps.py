"""Warm-ups for ``test_warming``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from penstock.solvers.solve.warm import WarmUp
from penstock.workers import forks
from penstock.workers.child import die_with


def endless() -> Iterator[WarmUp]:
    """Compile for ever."""
    yield WarmUp(_pause, apart=True)
    raise AssertionError("the step before has ended")


def starting() -> Iterator[WarmUp]:
    """Compile for ever, and let children start a process instead of a task."""
    forks.serve_and_exit = _start
    yield from endless()


def failing() -> Iterator[WarmUp]:
    """Fail at the first step."""
    yield WarmUp(lambda: 1 // 0)


def _start(pipe: socket.socket, parent: int) -> NoReturn:
    die_with(parent)
    started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(f"{os.environ['PIDS_FILE']}-started").write_text(str(started.pid))
    while True:
        signal.pause()


def _pause() -> None:
    Path(os.environ["PIDS_FILE"]).write_text(str(os.getpid()))
    while True:
        signal.pause()

"""The interface of a process that does one task, and its implementation as a new interpreter.

The service forks its children (``forkserver``), and a process with a single thread forks its own. Where forking is not
safe, as in a task of a Dask worker, the child is a new interpreter that runs ``solve_child``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Protocol

_PR_SET_PDEATHSIG = 1
_LAUNCH = """import sys
from importlib import import_module
from penstock.workers.child import die_with
die_with(int(sys.argv[1]))
import_module(sys.argv[2]).main()
"""
"""The program of a new interpreter, which dies with its parent even while it imports."""


class Child(Protocol):
    """The process of one task; it leads its own process group."""

    pid: int
    pipe: socket.socket

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's process group."""

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status (negative: the signal that killed it), or None when it has not ended in time."""

    def close(self) -> None:
        """Release the child's resources."""


class Spawner(Protocol):
    """The interface of objects that start children."""

    def spawn(self) -> Child:
        """Return a child that waits for its task."""


class InterpreterChild:
    """A new interpreter that runs ``main`` of a module; it dies with the thread that started it."""

    def __init__(self, module: str = "penstock.workers.solve_child") -> None:
        self.pipe, theirs = socket.socketpair()
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, str(os.getpid()), module],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "OPENBLAS_NUM_THREADS": "1"},
            )
        self.pid = self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status, or None when it has not ended in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def close(self) -> None:
        """Release the child's resources; a child that still runs is killed."""
        self.pipe.close()
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait()


def die_with(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; exit if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

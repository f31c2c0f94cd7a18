"""A process that has imported the solvers and forks one child per task.

Python's own forkserver makes each child import the parent's ``__main__`` again and lets a child outlive the death of
its grandparent; this one does neither. The service and the forkserver share a socket: a request carries two
descriptors, the child's end of its pipe and one on which the forkserver writes the child's process id and, later,
its exit status. When the service dies in any way the socket closes, and the forkserver kills its children with all
that they have started; when the forkserver dies, the kernel kills its children (``PR_SET_PDEATHSIG``). The process
itself is ``forking``.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Self

from penstock.schemas.errors import Unreachable

PRELOAD = ("penstock.planning.solve", "penstock.planning.compare", "penstock.workers.solve_child", "networkx")
WARM = (*PRELOAD, "penstock.solvers.solve.warm:steps")
"""Modules to import, and functions whose steps are done afterwards while the process is idle."""
READY = b"ready"
"""The message of the process when all is imported."""


class ForkedChild:
    """A child of the forkserver, as the service sees it."""

    def __init__(self, pid: int, pipe: socket.socket, status: socket.socket) -> None:
        self.pid = pid
        self.pipe = pipe
        self._status = status

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status (negative: the signal that killed it), or None when it has not ended in time.

        Raises Unreachable when the forkserver itself is gone.
        """
        self._status.settimeout(timeout_s)
        try:
            text = self._status.recv(64)
        except (TimeoutError, BlockingIOError):  # the latter where the timeout is zero
            return None
        if not text:
            self.signal(signal.SIGKILL)  # the child is dead already, but not the processes that it has started
            raise Unreachable("the forkserver has died, and its children with it")
        return int(text)

    def close(self) -> None:
        """Release the child's resources."""
        self.pipe.close()
        self._status.close()


class Forkserver:
    """The service's interface to the forkserver process. It is safe to use from several threads."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._preload = preload
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._has_forked = False
        self._is_over = False

    @classmethod
    def for_solves(cls, *, warm_up: bool) -> Self:
        """Return a forkserver whose children solve; with ``warm_up`` they find every kernel loaded after a while."""
        return cls(WARM if warm_up else PRELOAD)

    def start(self) -> None:
        """Start the process, unless it runs; it imports in the background, and the first child waits for that."""
        with self._lock:
            self._is_over = False
            if self._process is None or self._process.poll() is not None:
                self._start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the imports are done, so that children start at once; return False when they are not in time."""
        if not self._lock.acquire(timeout=timeout_s):
            return False
        try:
            if self._is_over:
                return False
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            if not self._is_ready and select.select([self._control], [], [], timeout_s)[0]:
                self._is_ready = self._control.recv(16) == READY
            return self._is_ready
        finally:
            self._lock.release()

    def spawn(self) -> ForkedChild:
        """Fork a child that waits for its task. Raises Unreachable when that fails twice, or during shutdown."""
        with self._lock:
            for _ in range(2):
                if self._is_over:
                    raise Unreachable(
                        "the service is shutting down and starts no more processes", remedy="try again later"
                    )
                if self._process is None or self._process.poll() is not None:
                    self._start()
                try:
                    return self._spawn()
                except OSError:
                    self._stop()
        raise Unreachable("no solver process can be started", remedy="look at the service's log and its memory")

    def end_loading(self) -> None:
        """End a process that still imports, so that waiting threads return at once; do nothing to another one."""
        process = self._process
        if process is not None and not (self._is_ready or self._has_forked):
            self._is_over = True
            process.kill()

    def stop(self) -> None:
        """End the process and all children."""
        self.end_loading()
        with self._lock:
            self._is_over = True
            self._stop()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.workers.forking", str(theirs.fileno()), *self._preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "NUMBA_THREADING_LAYER": "workqueue", "OPENBLAS_NUM_THREADS": "1"},
            )
        self._control, self._is_ready, self._has_forked = ours, False, False

    def _stop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(0.5)
            except subprocess.TimeoutExpired:
                self._process.kill()  # it is importing, or stuck; the kernel kills its children with it
                self._process.wait()
            assert self._process.stdin is not None
            self._process.stdin.close()
        self._control = self._process = None

    def _spawn(self) -> ForkedChild:
        assert self._control is not None
        pipe, child_pipe = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        status, child_status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with child_pipe, child_status:
            socket.send_fds(self._control, [b"fork"], [child_pipe.fileno(), child_status.fileno()])
        pid = status.recv(64)
        if not pid:
            pipe.close()
            status.close()
            raise OSError("the forkserver has died")
        self._has_forked = True
        return ForkedChild(int(pid), pipe, status)

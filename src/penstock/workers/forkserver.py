"""A process that has imported the solvers and forks one child per task.

Python's own forkserver makes each child import the parent's ``__main__`` again and lets a child outlive the death of
its grandparent; this one does neither. The service and the forkserver share a socket: a request carries two
descriptors, the child's end of its pipe and one on which the forkserver writes the child's process id and, later,
its exit status. When the service dies in any way the socket closes, and the forkserver kills its children with all
that they have started; when the forkserver dies, the kernel kills its children (``PR_SET_PDEATHSIG``). The forkserver
runs one thread and never a parallel kernel, so that forking is safe.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import logging
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from penstock.schemas.errors import Unreachable
from penstock.workers.child import serve_and_exit

PRELOAD = ("penstock.planning.solve", "penstock.planning.compare", "penstock.workers.solve_child")
WARM = (*PRELOAD, "penstock.solvers.solve.warm:warm")
"""Modules to import, and functions to call afterwards."""
READY = b"ready"


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

    def start(self) -> None:
        """Start the process; it imports in the background, and the first child waits for that."""
        with self._lock:
            self._is_over = False
            self._start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the imports are done, so that a child can be had at once; waits for that a while."""
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
                        "the service is shutting down and starts no more processes", remedy="ask again later"
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
                [sys.executable, "-m", "penstock.workers.forkserver", str(theirs.fileno()), *self._preload],
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


# ---- in the forkserver's own process ---------------------------------------------------------------------------------


def main(control_fd: int, preload: Sequence[str]) -> None:
    """Import, then fork on request until the service is gone."""
    control = socket.socket(fileno=control_fd)
    _load_ahead(preload)
    with suppress(BrokenPipeError, ConnectionResetError):  # the end of the service is noticed below
        control.send(READY)
    wake_read, wake_write = socket.socketpair()
    for end in (wake_read, wake_write):
        end.setblocking(False)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake_read:
                    wake_read.recv(4096)
                    _reap(running)
                elif not _fork(control, running, (wake_read, wake_write)):
                    signal.set_wakeup_fd(-1)  # it is closed before the last child's end is noticed
                    _kill(running)
                    return


def _load_ahead(preload: Sequence[str]) -> None:
    """Import and warm up, which may take minutes; meanwhile the kernel ends this process when the service ends.

    Standard input is a pipe to which nothing is written and that closes when the service ends in any way: the kernel
    then sends SIGKILL. Neither a thread nor a signal handler would run inside the compiler.
    """
    fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(0, fcntl.F_GETFL)
    fcntl.fcntl(0, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # the service had ended before that
        os._exit(0)
    for name in preload:
        _load(name)
    gc.collect()
    gc.freeze()  # a child's garbage collection then does not touch, and so does not copy, what all children share
    fcntl.fcntl(0, fcntl.F_SETFL, flags)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _load(name: str) -> None:
    module, _, function = name.partition(":")
    try:
        loaded = importlib.import_module(module)
        if function:
            getattr(loaded, function)()
    except Exception:  # the first task meets the same error and reports it
        logging.getLogger("penstock.service").warning("%s cannot be loaded ahead", name, exc_info=True)


def _fork(control: socket.socket, running: dict[int, socket.socket], ours: Sequence[socket.socket]) -> bool:
    try:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 2)
    except ConnectionResetError:  # the service has ended without reading all that was written
        return False
    if not message:
        return False
    pipe, status = (socket.socket(fileno=fd) for fd in descriptors)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        for end in (control, status, *ours, *running.values()):
            end.close()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        serve_and_exit(pipe, parent)
    pipe.close()
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)
    status.send(str(pid).encode())
    running[pid] = status
    return True


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as end, suppress(OSError):
            end.send(str(os.waitstatus_to_exitcode(status)).encode())


def _kill(running: dict[int, socket.socket]) -> None:
    """End all children and the processes that they have started."""
    for pid in running:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

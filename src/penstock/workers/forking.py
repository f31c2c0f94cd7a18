"""The forkserver's own process: imports, then forks on request until the service is gone.

It runs one thread and never a parallel kernel, so that forking is safe. While no child is requested it warms up, one
short step at a time, so that children find every kernel loaded. A child does each step that would take long.
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
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

from penstock.workers.child import die_with
from penstock.workers.forkserver import READY

log = logging.getLogger("penstock.service")


class Step(Protocol):
    """A part of a warm-up. ``apart``: whether it may take minutes; a child does it then, for the files it writes."""

    run: Callable[[], object]
    apart: bool


def main(control_fd: int, preload: Sequence[str]) -> None:
    """Import the modules of ``preload``, then serve. The steps of a ``module:function`` are done later, when idle."""
    watch = killed_with_service()
    control = socket.socket(fileno=control_fd)
    steps = [step for name in preload if (step := _loaded(name)) is not None]
    _share()
    with suppress(BrokenPipeError, ConnectionResetError):  # the end of the service is noticed below
        control.send(READY)
    Forking(control, watch, (step for function in steps for step in function())).serve()
    os._exit(0)  # unloading all that takes longer than a client waits


def killed_with_service() -> int:
    """Have the kernel end this process when the service ends; return the descriptor whose closing undoes that.

    Standard input is a pipe to which nothing is written and that closes when the service ends in any way: the kernel
    then sends SIGKILL. Neither a thread nor a signal handler would run inside an import.
    """
    watch = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    fcntl.fcntl(watch, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(watch, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(watch, fcntl.F_SETFL, fcntl.fcntl(watch, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([watch], [], [], 0)[0]:  # the service had ended before that
        os._exit(0)
    return watch


class Forking:
    """A loop that forks children on request over ``control``, and takes ``steps`` meanwhile."""

    def __init__(self, control: socket.socket, watch: int, steps: Iterator[Step]) -> None:
        self._control, self._steps = control, steps
        self._watch: int | None = watch
        self._running: dict[int, socket.socket] = {}
        self._apart: int | None = None
        """The child that takes a long step."""
        self._is_warm = False
        self._most_running = max(1, len(os.sched_getaffinity(0)) - 1)
        """Number of running children at which no processor is left for steps."""
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)

    def serve(self) -> None:
        """Fork until the service is gone; then end the children."""
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while True:
                idle = not self._is_warm and self._apart is None and len(self._running) < self._most_running
                ready = selector.select(0 if idle else None)
                for key, _ in ready:
                    if key.fileobj is self._wake:
                        self._wake.recv(4096)
                        self._reap()
                    elif not self._fork():
                        signal.set_wakeup_fd(-1)  # it is closed before the last child's end is noticed
                        self._kill()
                        return
                if idle and not ready:
                    self._warm_up()

    def _warm_up(self) -> None:
        """Take the next step; after the last one share what was loaded."""
        try:
            step = next(self._steps, None)
            if step is not None and step.apart:
                self._apart = self._forked_for(step)
                return
            if step is not None:
                step.run()
                return
        except Exception:  # the first task meets the same error and reports it
            log.warning("the solvers cannot be warmed up", exc_info=True)
        self._end_warm_up()

    def _end_warm_up(self) -> None:
        self._is_warm = True
        _share()
        self._outlive_service()

    def _outlive_service(self) -> None:
        """Stop the kernel from ending this process; notice the end of the service between steps instead.

        The kernel would end the children as well, but not the processes that they have started; this process does both.
        """
        if self._watch is not None:
            os.close(self._watch)
            self._watch = None

    def _forked_for(self, step: Step) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                self._forget()
                die_with(parent)
                step.run()
                code = 0
            finally:
                os._exit(code)
        return pid

    def _forget(self) -> None:
        """Close the forkserver's descriptors in a child."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for end in (self._control, self._wake, self._waker, *self._running.values()):
            end.close()
        if self._watch is not None:
            os.close(self._watch)

    def _fork(self) -> bool:
        """Fork a child as the service asks; return False when the service is gone."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, 16, 2)
        except ConnectionResetError:  # the service has ended without reading all that was written
            return False
        if not message:
            return False
        pipe, status = (socket.socket(fileno=fd) for fd in descriptors)
        self._outlive_service()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            from penstock.workers.forks import serve_and_exit  # not before the watch is set: it loads much

            status.close()
            self._forget()
            serve_and_exit(pipe, parent)
        pipe.close()
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(pid, pid)
        status.send(str(pid).encode())
        self._running[pid] = status
        return True

    def _reap(self) -> None:
        while self._running or self._apart is not None:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == self._apart:
                self._apart = None
                if status != 0:  # the steps that follow would take as long
                    log.warning("the solvers cannot be warmed up: %s", os.waitstatus_to_exitcode(status))
                    self._end_warm_up()
                continue
            with self._running.pop(pid) as end, suppress(OSError):
                end.send(str(os.waitstatus_to_exitcode(status)).encode())

    def _kill(self) -> None:
        """End all children and the processes that they have started."""
        for pid in self._running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _loaded(name: str) -> Callable[[], Iterator[Step]] | None:
    """Import a module; return the function that is named after it, if any."""
    module, _, function = name.partition(":")
    try:
        loaded = importlib.import_module(module)
    except Exception:  # the first task meets the same error and reports it
        log.warning("%s cannot be loaded ahead", name, exc_info=True)
        return None
    steps: Callable[[], Iterator[Step]] | None = getattr(loaded, function) if function else None
    return steps


def _share() -> None:
    """Protect the memory that all children share from a child's garbage collection, which would copy it."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

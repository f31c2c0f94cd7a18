"""Processes forked from one that has loaded torch: each is there at once, where a new interpreter imports for seconds.

``ForkedProcesses`` is the tests' side; run as a script, this file is the process that imports and forks.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from penstock.executor.children import die_with
from penstock.executor.run.local import loopback_interface

MODULES = ("rank_worker", "torch_runtime_worker")
"""Modules whose ``main`` a process can run; they import all that it needs."""


class Forked:
    """A process that reads lines from ``stdin`` and writes lines to ``stdout``; its logs go to the tests' stderr."""

    def __init__(self, control: socket.socket, module: str) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out) = os.pipe(), os.pipe()
        socket.send_fds(control, [module.encode()], [theirs_in, theirs_out])
        os.close(theirs_in)
        os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)
        _, [self._handle], _, _ = socket.recv_fds(control, 1, 1)

    def kill(self) -> None:
        """End it, whatever it is doing; it may have ended already."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        for end in (self.stdin, self.stdout):
            end.close()
        os.close(self._handle)


class ForkedProcesses:
    """Forks processes, from one that is started when the first of them is wanted."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None

    def start(self, module: str) -> Forked:
        """Start a process that runs the ``main`` of one of ``MODULES``."""
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env=os.environ | {"GLOO_SOCKET_IFNAME": loopback_interface(), "OMP_NUM_THREADS": "1"},
                )
        return Forked(self._control, module)

    def close(self) -> None:
        """End all of them: forked processes die with the process that forked them."""
        if self._control is not None:
            self._control.close()
            assert self._process.wait(30) == 0


def main(control: socket.socket) -> None:
    """Import, then fork until the tests are gone. Ended processes are waited for, so that their CPU time counts."""
    die_with(os.getppid())
    for module in MODULES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread of ours would be missing in what is forked"
    running: set[int] = set()
    while True:
        request, ends, _, _ = socket.recv_fds(control, 64, 2)
        running = {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0] == 0}
        if not request:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            control.close()
            _run(request.decode(), ends, parent)
        for end in ends:
            os.close(end)
        running.add(pid)
        handle = os.pidfd_open(pid)
        socket.send_fds(control, [b"."], [handle])
        os.close(handle)


def _run(module: str, ends: list[int], parent: int) -> NoReturn:
    code = 1
    try:
        die_with(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, end in enumerate(ends):
            os.dup2(end, number)
            os.close(end)
        sys.stdin = os.fdopen(0)
        importlib.import_module(module).main()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parent / "jobs"))
    main(socket.socket(fileno=int(sys.argv[1])))

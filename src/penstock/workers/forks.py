"""Children that are forks: of the forkserver, and of a process with a single thread."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import NoReturn

from penstock.workers.child import die_with
from penstock.workers.solve_child import serve


class OwnFork:
    """A fork of this process, which must have a single thread; the fork dies with it."""

    def __init__(self) -> None:
        self.pipe, theirs = socket.socketpair()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            serve_and_exit(theirs, parent)
        theirs.close()
        with suppress(ProcessLookupError, PermissionError):
            os.setpgid(self.pid, self.pid)
        self._status: int | None = None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's process group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit status, or None when it has not ended in time."""
        if self._status is None:
            ends = os.pidfd_open(self.pid)
            ended = select.select([ends], [], [], timeout_s)[0]
            os.close(ends)
            if ended:
                self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def close(self) -> None:
        """Release the child's resources; a child that still runs is killed."""
        self.pipe.close()
        if self._status is None:
            self.signal(signal.SIGKILL)
            os.waitpid(self.pid, 0)


def serve_and_exit(pipe: socket.socket, parent: int) -> NoReturn:
    """Do one task in this process, a fork of ``parent``, and end it."""
    code = 1
    try:
        die_with(parent)
        os.setpgid(0, 0)
        with pipe, pipe.makefile("rb") as source, pipe.makefile("wb") as sink:
            serve(source, sink)
        code = 0
    except (BrokenPipeError, ConnectionResetError):
        pass
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)

"""A worker process of a solve: it runs its parent's tasks, until the parent ends it or dies.

In: a task with its number, or the best time so far. Out: ``(number, JudgedPlan | Bound | Outcome | Compiling |
Crash)``. On Linux the kernel kills it when its parent's thread dies (``PR_SET_PDEATHSIG``); elsewhere it ends when it
next reads or writes.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NamedTuple

from penstock.solvers.compiled.progress import listening
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.planners.setting import Setting


class Crash(NamedTuple):
    """An exception in a task, which is our bug."""

    traceback: str


class Compiling(NamedTuple):
    """The kernel that a task waits for; None: it is ready."""

    kernel: str | None


class PipeLink:
    """A task's link over the pipe."""

    def __init__(self, pipe: Connection, number: int, best_ns: int | None) -> None:
        self._pipe, self._number, self._best_ns = pipe, number, best_ns

    def best_ns(self) -> int | None:
        """Return the least time that the parent has sent."""
        while self._pipe.poll():
            self._best_ns = self._pipe.recv()
        return self._best_ns

    def announce(self, plan: JudgedPlan) -> None:
        """Send a plan to the parent."""
        self._pipe.send((self._number, plan))

    def proven(self, bound: Bound) -> None:
        """Send a bound to the parent."""
        self._pipe.send((self._number, bound))

    def compiling(self, kernel: str | None) -> None:
        """Send the parent which kernel the task compiles, None if none."""
        self._pipe.send((self._number, Compiling(kernel)))


def serve(pipe: Connection, setting: Setting) -> None:
    """Run the tasks that arrive, until the pipe is closed."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            message = pipe.recv()
            if isinstance(message, int):
                continue  # the best time of a task that has ended
            number, task, best_ns = message
            link = PipeLink(pipe, number, best_ns)
            try:
                with listening(link.compiling):
                    answer = task.run(setting, link)
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return
            except Exception:  # the parent raises it where the user sees it
                answer = Crash(traceback.format_exc())
            pipe.send((number, answer))


def main(descriptor: int) -> None:
    """Serve in a fresh interpreter; the setting is the first message."""
    with Connection(descriptor) as pipe:
        serve(pipe, pipe.recv())

"""A solve by interpreted kernels until the compiled ones are ready: slow, but with a plan at once.

It takes half of the request's remaining time, so that its answer with its bounds is in time on a busy machine too. The
rest is for searches that need compiled kernels.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from penstock.schemas.request import PlanRequest
from penstock.workers.child import InterpreterChild
from penstock.workers.protocol import Message, drain, send, solve_task

ENTRY = "penstock.planning.solve:solve_verified"
SHARE = 2
"""Divisor of the remaining time."""

log = logging.getLogger("penstock.service")


class StandIn:
    """The interpreting process; ``take`` is called with its messages, whose plans it has verified."""

    def __init__(self, request: PlanRequest, until: float, take: Callable[[Message], None]) -> None:
        self._request, self._until, self._take = request, until, take
        self._child: InterpreterChild | None = None
        self._buffer = bytearray()
        self._began = False

    def start(self) -> None:
        """Start the process, unless it was started before."""
        if self._began:
            return
        self._began = True
        left_ns = int((self._until - time.monotonic()) * 1e9) // SHARE
        if left_ns <= 0:
            return
        limits = self._request.termination.model_copy(update={"time_limit_ns": left_ns})
        request = self._request.model_copy(update={"termination": limits})
        self._child = InterpreterChild("penstock.workers.stand_in")
        send(self._child, solve_task(ENTRY, request.model_dump_json().encode(), 0))

    def look(self) -> None:
        """Pass on new messages. A process that has failed is ended: the compiled solve has the same request."""
        for message in self._messages():
            if message.kind in ("error", "crash"):
                log.debug("interpreted kernels have failed: %s", message)
                self.end()
                return
            self._take(message)

    def end(self) -> None:
        """End the process, if it runs; it is not started again."""
        self._began = True
        if self._child is not None:
            self._child.close()
            self._child = None

    def _messages(self) -> Iterator[Message]:
        if self._child is not None:
            yield from drain(self._buffer, self._child)


def main() -> None:
    """Do one task in this process, which has imported no kernel yet."""
    from penstock.solvers.compiled.interpreted import interpret

    interpret()
    from penstock.workers.solve_child import main as do_task

    do_task()

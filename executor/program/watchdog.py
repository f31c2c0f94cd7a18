"""A watchdog that ends a rank whose instruction does not end, and says whether it waits for a peer or computes.

Groups of torch have one time limit for everything. A limit that a healthy first step meets, with kernels to compile and
caches to fill, is far too long for a peer that hangs in step 1,000. So groups get a long limit, and this thread watches
the mark: the first step may take long, later ones ``FACTOR`` times as long as the first. Peers that die are noticed at
once, by gloo or by the process that started them. Time in which this process itself was stopped does not count: a job
that was suspended and resumed continues.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from penstock.executor.program.mark import Mark

FIRST_STEP_S = 600.0
"""Time limit of an instruction of the first step, in seconds."""
FACTOR = 10
"""Time limit of an instruction of a later step, in multiples of the first step's time."""

_PATIENCE = 2
"""Checks by which a waiting rank is reported later than a computing one: the awaited rank should report first."""

_LINES = 12
_WAITING = ("penstock.executor.", "torch.distributed", "torch.cuda", "threading")
"""Modules whose code is innermost while a rank waits for a peer. Computation is in layers, or in torch below them."""


class Stuck(NamedTuple):
    """An instruction that does not end, by its number. ``waits``: it waits for a peer; ``stack``: its stack's lines."""

    number: int
    step: int
    for_s: float
    waits: bool
    stack: tuple[str, ...]


class Watchdog(threading.Thread):
    """A thread that calls ``on_stuck`` once when an instruction takes longer than the limit.

    ``limit_s``: the limit of every instruction; None: limits as in the module's description, at least ``least_s`` from
    the second step on. ``thread``: the thread that runs the instructions; None: the thread that creates the watchdog.
    ``clock``: returns seconds.
    """

    def __init__(
        self,
        mark: Mark,
        on_stuck: Callable[[Stuck], None],
        *,
        limit_s: float | None = None,
        least_s: float = 60.0,
        thread: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(name="penstock-watchdog", daemon=True)
        self._mark = mark
        self._on_stuck = on_stuck
        self._is_fixed = limit_s is not None
        self._least_s = least_s
        self._limit_s = limit_s if limit_s is not None else FIRST_STEP_S
        self._thread = threading.get_ident() if thread is None else thread
        self._clock = clock
        self._times_watched = 0
        self._watching = threading.Event()
        self._closed = threading.Event()
        self.start()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps that run within this context. Evaluations, checkpoints and checks are not watched."""
        self._times_watched += 1
        self._watching.set()
        try:
            yield
        finally:
            self._watching.clear()

    def first_step_took(self, seconds: float) -> None:
        """Derive the limit of later steps from the first step's time."""
        if not self._is_fixed:
            self._limit_s = max(self._least_s, FACTOR * seconds)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._watching.set()

    def run(self) -> None:
        seen: tuple[int, ...] = ()
        stuck_s, looked = 0.0, self._clock()
        while self._watching.wait() and not self._closed.is_set():
            pause_s = min(1.0, self._limit_s / 10)
            at, now = (self._times_watched, *self._mark), self._clock()  # in this order: this thread may be held up
            stuck_s += min(now - looked, 2 * pause_s)
            looked = now
            if at != seen:
                seen, stuck_s = at, 0.0
            elif stuck_s > self._limit_s and self._watching.is_set() and self._times_watched == at[0]:
                stuck = self._stuck(stuck_s)
                if not stuck.waits or stuck_s > self._limit_s + _PATIENCE * pause_s:
                    self._on_stuck(stuck)
                    return
            self._closed.wait(pause_s)

    def _stuck(self, for_s: float) -> Stuck:
        frame = sys._current_frames().get(self._thread)
        module = "" if frame is None else str(frame.f_globals.get("__name__", ""))
        stack = [] if frame is None else traceback.format_stack(frame)
        lines = "".join(stack).splitlines()[-_LINES:]
        index, *step = self._mark
        return Stuck(index, step[0] if step else -1, for_s, module.startswith(_WAITING), tuple(lines))

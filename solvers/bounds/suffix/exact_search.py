"""The shortest schedule of a line, suffix by suffix from the last stage up: BOUNDS Part II, 1.5 and 1.6.

The bounds proven for a suffix prune the searches on longer suffixes, so that few states of a level are left. Each
search looks for a schedule below a value a little above the known bound. If there is no such schedule, that value is
the new bound, and the next search goes further. A search that exhausts its share proves nothing: the bound stays.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.suffix.search_kernel import (
    BEST,
    LEVELS,
    NONE,
    OUTCOME,
    SPENT,
    STOPPED,
    SUCCESS,
    VALUE,
    States,
    search,
)
from penstock.solvers.bounds.suffix.stage_line import suffix_line
from penstock.solvers.bounds.suffix.state_kernel import JUDGED, SHARED, Line, Scratch
from penstock.solvers.bounds.suffix.table import fill_table, whole_bound_ns
from penstock.solvers.bounds.suffix.table_kernel import close_row

WIDEST = 1 << 16
"""The most states of one level."""

ROOM_BYTES = 1 << 28
"""Memory for the states of two levels: on long lines with many micro-batches in flight fewer fit."""

WORDS = 128
"""Number of times in a state that counts as one more state."""

EVERY = 16
"""Largest number of micro-batches up to which every number is searched; then each is an eighth above the one before."""

FINEST = 1000
"""A search goes at least one part in ``FINEST`` beyond the known bound, and twice as far each time."""


NEAR = 100
"""The limit for the whole line is tried at once if it is less than one part in ``NEAR`` above the known bound."""


class Proof(NamedTuple):
    """A proof that no schedule is shorter than ``bound_ns``, with the ``actions`` of the best schedule.

    ``actions``: as in ``state_kernel.apply``. ``proven``: the bound is the optimum, or no schedule is within the given
    limit.
    """

    bound_ns: int
    actions: tuple[int, ...] | None
    proven: bool
    spent: int


class SuffixSearch:
    """The searches of one line; ``effort``: the states that they may make together."""

    def __init__(self, line: Line, effort: int) -> None:
        self.line = line
        self.left = self.effort = effort
        stages = line.forward.size
        self._scratch = Scratch(np.zeros(stages, dtype=np.int64), np.zeros(stages, dtype=np.int64))
        fill_table(line)
        words = 3 * stages + _ring(line)
        self._weight = 1 + words // WORDS
        slots = 2 * max(2, min(WIDEST, effort + 2, ROOM_BYTES // (16 * words)))
        self._states = _new_states(line, effort, slots)
        self._words = np.zeros(slots * words, dtype=np.int64)
        self._counts = np.zeros(slots * 5 * stages, dtype=np.int32)

    @property
    def bound_ns(self) -> int:
        """The bound on the whole line that the suffixes prove."""
        return whole_bound_ns(self.line)

    def run(self, at_most_ns: int) -> Proof:
        """Search for the shortest schedule of at most ``at_most_ns``; stop as soon as none is possible."""
        batches = self.line.phi.shape[1] - 1
        for s in range(self.line.forward.size - 2, 0, -1):
            close_row(self.line, s, 1)
            share = self.left // (2 * s)
            values = [(0, 0)]
            for n in _numbers(batches):
                if self.bound_ns > at_most_ns or share < 2 * n:
                    break
                if not self._raise(s, n, values, share):
                    share //= 4
                values.append((n, int(self.line.phi[s, n])))
                close_row(self.line, s, n)
        close_row(self.line, 0, 1)
        return self._whole(self.line, self.bound_ns, at_most_ns)

    def run_as_judged(self, at_most_ns: int) -> Proof:
        """Run the search under the judge's rules: first any order of the channels, then the judge's, with the effort
        left.

        If that effort is too little, the actions are the best ones of the first search.
        """
        free = self.run(at_most_ns)
        if free.bound_ns > at_most_ns:
            return free
        lane = np.where(self.line.lane == SHARED, JUDGED, self.line.lane)
        judged = self._whole(self.line._replace(lane=lane), free.bound_ns, at_most_ns)
        return judged if judged.proven else judged._replace(actions=free.actions)

    def _raise(self, s: int, n: int, values: list[tuple[int, int]], share: int) -> bool:
        """Find phi[s, n]; return True if the effort sufficed. ``values``: of fewer micro-batches, to begin from."""
        line, low = suffix_line(self.line, s), int(self.line.phi[s, n])
        guess, step = _continued(values, n), 1 + low // FINEST
        below = max(low, guess) + 1
        while self.left > 0:
            outcome = self._ask(line, n, below, share)
            if outcome == SUCCESS:
                self.line.phi[s, n] = self._states.result[VALUE]
                return True
            if outcome == STOPPED:
                break
            self.line.phi[s, n] = below
            below += step
            step *= 2
        return False

    def _whole(self, line: Line, bound: int, at_most_ns: int) -> Proof:
        batches = line.phi.shape[1] - 1
        step = at_most_ns + 1 - bound if at_most_ns - bound < bound // NEAR else 1 + bound // FINEST
        while bound <= at_most_ns and self.left > 0 and step > 0:
            below = min(bound + step, at_most_ns + 1)
            outcome = self._ask(line, batches, below, 1 + self.left // 2)
            if outcome == SUCCESS:
                return Proof(int(self._states.result[VALUE]), self._actions(), True, self.effort - self.left)
            if outcome == NONE:
                bound, step = below, 2 * step
            else:
                step //= 4
        return Proof(bound, None, bound > at_most_ns, self.effort - self.left)

    def _ask(self, line: Line, n: int, below_ns: int, most: int) -> int:
        """Run one search of at most ``most`` states; its result is in the states."""
        slots, stages = self._states.dead.size, line.forward.size
        width = 3 * stages + _ring(line)
        counts = self._counts[: slots * 5 * stages].reshape(slots, 5 * stages)
        times = self._words[: slots * width].reshape(slots, width)
        self._states = self._states._replace(counts=counts, times=times)
        search(line, self._states, self._scratch, n, below_ns, min(most, self.left) // self._weight)
        self.left -= int(self._states.result[SPENT]) * self._weight
        return int(self._states.result[OUTCOME])

    def _actions(self) -> tuple[int, ...]:
        states, at = self._states, int(self._states.result[BEST])
        actions = []
        for level in range(int(states.result[LEVELS]) - 1, -1, -1):
            place = int(states.begin[level + 1]) + at
            actions.append(int(states.action[place]))
            at = int(states.parent[place]) - int(states.begin[level])
        return tuple(reversed(actions))


def _numbers(batches: int) -> list[int]:
    """Return the numbers of micro-batches for which the suffixes are searched."""
    numbers = list(range(1, min(batches, EVERY) + 1))
    while numbers[-1] < batches:
        numbers.append(min(batches, numbers[-1] + max(1, numbers[-1] // 8)))
    return numbers


def _continued(values: list[tuple[int, int]], n: int) -> int:
    """Return the time of n micro-batches if they continue as the last ones did, one after another or one in two."""
    last, value = values[-1]
    best = value
    for before, less in values[-3:-1]:
        best = max(best, value - (less - value) * (n - last) // (last - before))
    return best


def _ring(line: Line) -> int:
    """Return the slots for micro-batches in transit: a power of two."""
    return 1 << int(line.limit[0] - 1).bit_length()


def _new_states(line: Line, effort: int, slots: int) -> States:
    """Return all arrays except counts and times, whose width depends on the suffix."""
    stages, batches = line.forward.size, line.phi.shape[1] - 1
    history = effort + 2
    return States(
        counts=np.zeros((0, 0), dtype=np.int32),
        times=np.zeros((0, 0), dtype=np.int64),
        key=np.zeros(slots, dtype=np.uint64),
        dead=np.zeros(slots, dtype=np.bool_),
        link=np.zeros(slots, dtype=np.int64),
        head=np.zeros(2 * WIDEST, dtype=np.int64),
        stamp=np.zeros(2 * WIDEST, dtype=np.int64),
        parent=np.zeros(history, dtype=np.int32),
        action=np.zeros(history, dtype=np.int32),
        begin=np.zeros(4 * stages * batches + 2, dtype=np.int64),
        result=np.zeros(5, dtype=np.int64),
    )

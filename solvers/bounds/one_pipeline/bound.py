"""The largest time that no plan of one pipeline can beat, over all numbers of micro-batches that a request allows.

A time T is proven when every plan that took less would contradict itself: no cut may keep a channel or a node's link
busy for T, no run of layers its devices, and the label search finds that work and waiting of so many devices take more
than T of each. Numbers of micro-batches are looked at together first, in halves where that
proves nothing. The largest proven T is found by bisection; what is counted is steps, so the answer is always the same.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from penstock.solvers.bounds.one_pipeline.confined import holders
from penstock.solvers.bounds.one_pipeline.crossings import Crossings, crossings
from penstock.solvers.bounds.one_pipeline.label_kernel import Labels, Terms, least_cost
from penstock.solvers.bounds.one_pipeline.layer_costs import Holding, Numbers, Option, numbers_of
from penstock.solvers.bounds.one_pipeline.layer_runs import possible_work
from penstock.solvers.bounds.one_pipeline.slice_times import Times, least_of
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.model.problem import Problem

CAP = 4
"""Labels that a state keeps."""
STEP, FINE = 256, 4096
"""Times are tried from a 256th above what is known, and the bound is found to a 4096th of it."""
MOST_NS = 2**50
"""No time is asked for above this: 13 days."""
NEAR = 5, 4
"""Numbers of micro-batches that are no further apart stay together."""


WEIGHTS = ((2, 0), (1, 1), (0, 2))
"""Of what follows a device's last backward, and of its updates; see ``Terms``."""


class Piece:
    """A range of numbers of micro-batches, and what plans with them cost at least."""

    def __init__(self, holding: Holding, numbers: Numbers) -> None:
        self._devices = holding.problem.num_devices
        self._options = holding.options
        times = [holding.times(numbers, option) for option in self._options]
        least = least_of(times)
        around = np.concatenate(([0], np.cumsum(least.forward + least.backward)))
        self._least_work_ns = int(least.work.sum())
        self._filled_ns = max(int(around[-1]), _filled_ns(least, self._devices))
        found = crossings(holding, numbers)
        self._busy = tuple(np.where(busy > 0, busy + around[:-1], 0) for busy in (found.busy, found.busy_same))
        self._terms = _terms(holding, self._options, times, found)
        self._last = 0

    def proves(self, time_ns: int) -> bool:
        """Whether no plan with these numbers of micro-batches takes less than ``time_ns``."""
        if self._filled_ns >= time_ns:
            return True
        terms = self._within(time_ns)
        fewest = max(1, -(-self._least_work_ns // time_ns))
        return all(self._refuted(terms, used, time_ns) for used in range(self._devices, fewest - 1, -1))

    def _within(self, time_ns: int) -> Terms:
        """Without what takes ``time_ns`` by itself."""
        closed, closed_same = (busy >= time_ns for busy in self._busy)
        cuts = self._terms.cuttable
        work = possible_work(self._terms.work, self._options, closed & closed_same, cuts, time_ns)
        return self._terms._replace(work=work, closed=closed, closed_same=closed_same)

    def _refuted(self, terms: Terms, devices: int, time_ns: int) -> bool:
        """Whether plans on so many devices take ``time_ns`` at least; the weights that said so last come first."""
        most = 2 * devices * (time_ns - 1)
        for i in range(len(WEIGHTS)):
            which = (self._last + i) % len(WEIGHTS)
            rest, update = WEIGHTS[which]
            weighted = terms._replace(rest_weight=rest, update_weight=update)
            if least_cost(weighted, _room(devices, len(self._options)), devices, most + 1) > most:
                self._last = which
                return True
        return False


class TimeBisection:
    """The bisection on the time of a step: which times no plan takes, of any number of micro-batches of a request."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._holding = Holding(problem)
        self._pieces: dict[Numbers, Piece] = {}
        self._open: Numbers | None = None

    def bound_ns(self, known_ns: int) -> int:
        """The largest time that is proven, ``known_ns`` at least."""
        low, step = known_ns, known_ns // STEP + 1
        while low + step < MOST_NS and self.proves(low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > known_ns // FINE + 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.proves(middle) else (low, middle)
        return low

    def proves(self, time_ns: int) -> bool:
        """Whether no plan takes less than ``time_ns``; first what was left open last."""
        if self._open is not None and not self._piece(self._open).proves(time_ns):
            return False
        waiting = numbers_of(self._problem)
        while waiting:
            numbers = waiting.pop()
            if self._piece(numbers).proves(time_ns):
                continue
            if NEAR[1] * numbers.most <= NEAR[0] * numbers.least:
                self._open = numbers
                return False
            middle = max(numbers.least, min(numbers.most - 1, isqrt(numbers.least * numbers.most)))
            waiting += [Numbers(numbers.least, middle), Numbers(middle + 1, numbers.most)]
        return True

    def _piece(self, numbers: Numbers) -> Piece:
        if numbers not in self._pieces:
            self._pieces[numbers] = Piece(self._holding, numbers)
        return self._pieces[numbers]


def _filled_ns(least: Times, devices: int) -> int:
    """Before a first micro-batch has come to layer j only forwards before j have run, and mirrored in time.

    So all devices' time until then is idle but for the forward work before j; the same before the end.
    """
    total = 0
    for each, work in ((least.forward, least.work - least.backward_work), (least.backward, least.backward_work)):
        idle = np.concatenate(([0], np.cumsum(devices * each - work)))
        total += int(work.sum() + idle.max())
    return -(-total // devices)


def _terms(holding: Holding, options: list[Option], times: list[Times], found: Crossings) -> Terms:
    return Terms(
        least=np.asarray([option.least for option in options]),
        most=np.asarray([option.most for option in options]),
        forward=np.stack([each.forward for each in times]),
        gradient=np.stack([each.backward for each in times]),
        work=np.stack([_possible(holding, option, each.work) for option, each in zip(options, times, strict=True)]),
        behind=holding.behind_ns,
        update=holding.update_ns,
        cuttable=np.concatenate(([True], holding.problem.cuttable)),
        out=found.out,
        back=found.back,
        out_same=found.out_same,
        back_same=found.back_same,
        closed=np.zeros_like(found.out, dtype=np.bool_),
        closed_same=np.zeros_like(found.out, dtype=np.bool_),
        rest_weight=2,
        update_weight=0,
    )


def _possible(holding: Holding, option: Option, work: np.ndarray) -> np.ndarray:
    """A layer's work held by so many devices, ``FAR_NS`` where the pins allow it fewer."""
    most = np.asarray([len(own) for own in holders(holding.problem)])
    return np.asarray(np.where(most < option.least, FAR_NS, work))


def _room(devices: int, options: int) -> Labels:
    shape = (2, devices + 1, options)
    cost, rest = (np.zeros((*shape, CAP), dtype=np.int64) for _ in range(2))
    return Labels(cost, rest, np.zeros(shape, dtype=np.int64))

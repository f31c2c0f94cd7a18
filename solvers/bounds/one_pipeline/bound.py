"""The largest time that no plan of one pipeline can beat, over all numbers of micro-batches that a request allows.

A time T is proven if every faster plan would contradict itself: no cut may keep a channel or a node's link busy for T,
no run of layers its devices, and the label search finds that the work and waiting of n devices exceed T for each of
them. Numbers of micro-batches are tested together first, and in halves where that proves nothing. The largest proven T
is found by bisection; effort is counted in steps, so that the answer is always the same.
"""

from __future__ import annotations

from itertools import product
from math import isqrt
from typing import Any

import numpy as np

from penstock.solvers.bounds.one_pipeline.confined import holders
from penstock.solvers.bounds.one_pipeline.crossings import Crossings, crossings
from penstock.solvers.bounds.one_pipeline.deferred_weights import deferred_weights
from penstock.solvers.bounds.one_pipeline.held_bytes import held_bytes
from penstock.solvers.bounds.one_pipeline.label_kernel import Labels, Terms, least_cost
from penstock.solvers.bounds.one_pipeline.layer_costs import DeviceRange, Holding, Numbers, numbers_of
from penstock.solvers.bounds.one_pipeline.layer_runs import possible_work
from penstock.solvers.bounds.one_pipeline.slice_times import LeastTimes, least_of
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.model.problem import Problem, prefix_sums

CAP = 4
"""The number of labels that a state keeps."""
STEP, FINE = 256, 4096
"""Times are tried from a 256th above the known bound, and the result is exact to a 4096th of it."""
MOST_NS = 2**50
"""The largest time that is tried: 13 days."""
NEAR = 5, 4
"""Numbers of micro-batches within this ratio stay in one range."""


WEIGHTS = ((2, 0), (1, 1), (0, 2))
"""Weights of the time after a device's last backward, and of its updates; see ``Terms``."""
SPLIT_WEIGHTS = ((0, 2), (2, 0), (1, 1))
"""The same weights if backwards may be split: weight gradients, too, count with the updates, or by their memory."""
Way = tuple[float, tuple[int, int]]
"""A price of held bytes, and two such weights."""
LITTLE = 0, 64, 16
"""Parts of all work; layers in front with no more work may be left out, as any device may begin with them."""


BY_LAYER = (
    *("forward", "gradient", "work", "after", "update", "cuttable"),
    *("out", "back", "out_same", "back_same", "closed", "closed_same"),
)
"""The fields of ``Terms`` that are arrays by layer."""


class Piece:
    """A range of numbers of micro-batches, and the least costs of plans with them.

    ``split``: backwards may be split into input and weight gradients. ``fits``: only plans that fit into memory count.
    """

    def __init__(self, holding: Holding, numbers: Numbers, *, split: bool = False, fits: bool = False) -> None:
        self._devices = holding.problem.num_devices
        self._options = holding.options
        times = [holding.times(numbers, option) for option in self._options]
        least = least_of(times)
        self._back = least.gradient if split else least.backward
        around = prefix_sums(least.forward + self._back)
        self._least = least
        self._least_work_ns = int(least.work.sum())
        self._filled_ns = max(int(around[-1]), _filled_ns(least, self._devices, split))
        transfers = crossings(holding, numbers)
        self._busy = tuple(np.where(busy > 0, busy + around[:-1], 0) for busy in (transfers.busy, transfers.busy_same))
        self._terms = _terms(holding, self._options, times, transfers, split)
        self._memory = held_bytes(holding.problem, self._options, least, split=split) if fits else None
        price = 0.0 if self._memory is None else self._memory.best_price(self._least_work_ns, self._devices)
        self._waiting = deferred_weights(holding.problem, self._options, times, fits=fits) if split else None
        self.priced = price > 0 or (self._waiting is not None and self._waiting.price > 0)
        prices = (0.0, price) if price > 0 else (0.0,)
        self._ways = list(product(prices, SPLIT_WEIGHTS if split else WEIGHTS))
        self._firsts = self._starts(holding)

    def _starts(self, holding: Holding) -> list[int]:
        """Return the first layers that the search may begin with: all, or without some in front of little work."""
        before = prefix_sums(self._least.work)[:-1]
        most = [self._least_work_ns // part if part else 0 for part in LITTLE]
        return sorted({0, *(int(np.searchsorted(before, each, side="right")) - 1 for each in most)})

    def proves(self, time_ns: int) -> bool:
        """Return True if no plan with these numbers of micro-batches takes less than ``time_ns``."""
        if self._filled_ns >= time_ns:
            return True
        for at, first in enumerate(self._firsts):
            every = self._within(time_ns, first)
            fewest = max(1, -(-int(self._least.work[first:].sum()) // time_ns))
            terms = {way: self._weighted(every, way, time_ns, first) for way in self._ways}
            if all(self._refuted(terms, used, time_ns) for used in range(self._devices, fewest - 1, -1)):
                self._firsts.insert(0, self._firsts.pop(at))
                return True
        return False

    def _within(self, time_ns: int, first: int) -> Terms:
        """Return the terms of layers from ``first`` on, without the options that take ``time_ns`` by themselves.

        ``work`` is of all layers.
        """
        closed, closed_same = (busy >= time_ns for busy in self._busy)
        cuts = self._terms.cuttable
        work = possible_work(self._terms.work, self._options, closed & closed_same, cuts, time_ns)
        head, tail = int(self._least.forward[:first].sum()), int(self._back[:first].sum())
        every = self._terms._replace(closed=closed, closed_same=closed_same)
        of_layers: dict[str, Any] = {name: np.ascontiguousarray(getattr(every, name)[..., first:]) for name in BY_LAYER}
        if first > 0:
            tail += int(every.after[1, 0])
        return every._replace(**{**of_layers, "work": work}, head=head, tail=tail)

    def _weighted(self, terms: Terms, way: Way, time_ns: int, first: int) -> Terms:
        """Return the terms with weights; the bytes that samples and copies hold cost a price for each byte and ns."""
        price, (rest, update) = way
        work = terms.work
        if self._waiting is not None and rest > 0:
            work = self._waiting.work(work, rest)
        if price > 0 and self._memory is not None:
            work = work + self._memory.priced(price, time_ns)
        return terms._replace(work=np.ascontiguousarray(work[:, first:]), rest_weight=rest, update_weight=update)

    def _refuted(self, terms: dict[Way, Terms], devices: int, time_ns: int) -> bool:
        """Return True if plans on ``devices`` devices take at least ``time_ns``; try weights that proved it first."""
        for at, way in enumerate(self._ways):
            price, (rest, _update) = way
            held_ns = self._memory.most_ns(price, time_ns - 1) if price > 0 and self._memory is not None else 0
            most = 2 * (devices * (time_ns - 1) + held_ns)
            if self._waiting is not None:
                most += rest * self._waiting.most_ns(devices)
            if least_cost(terms[way], _room(devices, len(self._options)), devices, most + 1) > most:
                self._ways.insert(0, self._ways.pop(at))
                return True
        return False


class TimeBisection:
    """Bisect on the step time: find the times that no plan reaches, for any number of micro-batches of a request.

    ``split`` and ``fits``: as for ``Piece``; if layers may recompute single modules, memory does not count.
    """

    def __init__(self, problem: Problem, *, split: bool = False, fits: bool = False) -> None:
        # a layer whose modules are recomputed singly keeps between all and nothing
        is_priced = problem.recompute == "never" or not problem.modules
        self._problem, self._split, self._fits = problem, split, fits and is_priced
        self._holding = Holding(problem)
        self._pieces: dict[Numbers, Piece] = {}
        self._open: Numbers | None = None

    def bound_ns(self, known_ns: int) -> int:
        """Return the largest proven time, at least ``known_ns``."""
        low, step = known_ns, known_ns // STEP + 1
        while low + step < MOST_NS and self.proves(low + step):
            low, step = low + step, 2 * step
        high = low + step
        while high - low > known_ns // FINE + 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.proves(middle) else (low, middle)
        return low

    def proves(self, time_ns: int) -> bool:
        """Return True if no plan takes less than ``time_ns``; the range that failed last is tested first."""
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

    @property
    def priced(self) -> bool:
        """True if memory counted: the proof then holds for plans that fit."""
        return any(piece.priced for piece in self._pieces.values())

    def _piece(self, numbers: Numbers) -> Piece:
        if numbers not in self._pieces:
            self._pieces[numbers] = Piece(self._holding, numbers, split=self._split, fits=self._fits)
        return self._pieces[numbers]


def _filled_ns(least: LeastTimes, devices: int, split: bool) -> int:
    """Return the least step time, ns: work plus idle time of filling and draining, shared by all devices.

    Until a first micro-batch reaches layer j, devices only run forwards before j; the same holds mirrored in time,
    unless weight gradients may wait (``split``)."""
    total = int(least.backward_work.sum()) if split else 0
    sides = ((least.forward, least.work - least.backward_work), (least.backward, least.backward_work))
    for each, work in sides[:1] if split else sides:
        idle = prefix_sums(devices * each - work)
        total += int(work.sum() + idle.max())
    return -(-total // devices)


def _terms(
    holding: Holding, options: list[DeviceRange], times: list[LeastTimes], transfers: Crossings, split: bool
) -> Terms:
    return Terms(
        least=np.asarray([option.least for option in options]),
        most=np.asarray([option.most for option in options]),
        forward=np.stack([each.forward for each in times]),
        gradient=np.stack([each.gradient if split else each.backward for each in times]),
        work=np.stack([_possible(holding, option, each.work) for option, each in zip(options, times, strict=True)]),
        after=holding.after_ns,
        update=holding.update_ns,
        cuttable=np.concatenate(([True], holding.problem.cuttable)),
        out=transfers.out,
        back=transfers.back,
        out_same=transfers.out_same,
        back_same=transfers.back_same,
        closed=np.zeros_like(transfers.out, dtype=np.bool_),
        closed_same=np.zeros_like(transfers.out, dtype=np.bool_),
        head=0,
        tail=0,
        rest_weight=2,
        update_weight=0,
    )


def _possible(holding: Holding, option: DeviceRange, work: np.ndarray) -> np.ndarray:
    """Return a layer's work when held by that many devices, ``FAR_NS`` where the pins allow it fewer."""
    most = np.asarray([len(devices) for devices in holders(holding.problem)])
    return np.asarray(np.where(most < option.least, FAR_NS, work))


def _room(devices: int, options: int) -> Labels:
    shape = (2, devices + 1, options)
    cost, rest = (np.zeros((*shape, CAP), dtype=np.int64) for _ in range(2))
    return Labels(cost, rest, np.zeros(shape, dtype=np.int64))

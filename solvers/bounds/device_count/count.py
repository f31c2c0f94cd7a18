"""The least price of devices with which pipelines of stages apart may keep to a time, by the time before each stage.

A stage's *head* is a micro-batch's round trip through all stages before it, its *rest* the round trip through all
stages after it, transfers included. Within less than T a stage can do its work only if head + work < T. The most
micro-batches that it holds, which no stage before it may fall short of, let it idle in the first and the last round
trip and space its micro-batches (BOUNDS section 12). Ways are rounded down to a grid, so that head + way + rest of all
stages is one number, the *whole*. Wholes are searched in ranges, in which the rest is at least the range's start minus
head and way. Each class of devices has a price. If for every whole each plan costs more than all devices together, no
plan takes less than T.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.device_count.count_kernel import MANY, CountQuestion, Counts, Rest, least_price, rests
from penstock.solvers.bounds.device_count.device_classes import device_classes
from penstock.solvers.bounds.device_count.prices import HIGHEST, highest
from penstock.solvers.bounds.device_count.stage_runs import runs_within
from penstock.solvers.costs.stage import least_update_ns
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem

GRID = 2**13
"""The number of parts of T to which ways are rounded."""
RATIO, FINEST = 1.12, 1.01
"""Ratio of the two ends of a range of wholes, and the ratio from which a range is not halved any more."""
CLASSES = 1.25
"""The ratio of the limits in flight that a class of states has."""


class Ended(NamedTuple):
    """The final prices of a count, and the whole, in ns, that it could not exclude last: -1 if it excluded all."""

    prices: np.ndarray
    whole_ns: int


class Count:
    """The count for one number of micro-batches and a time ``time_ns``; ``last``: the end of another count.

    ``ended`` is the end of this count: the next count begins with its prices and its whole.
    """

    def __init__(self, problem: Problem, batch: Batch, time_ns: int, last: Ended | None = None) -> None:
        # The first stage updates at least the first layer when all backwards are over.
        self._time_ns = max(1, time_ns - int(least_update_ns(problem)[1]))
        self._batches = batch.num_micro_batches
        self._unit_ns = max(1, self._time_ns // GRID)
        classes = device_classes(problem)
        self._devices = np.asarray([each.devices for each in classes])
        self._runs = runs_within(problem, batch, self._time_ns, classes)
        self._rest = Rest(*np.full((2, problem.num_layers + 1), MANY, dtype=np.int64))
        self.ended = last or Ended(np.full_like(self._devices, HIGHEST), -1)
        self._pay(self.ended.prices)

    def refuted(self) -> bool:
        """Return True if every plan takes at least ``time_ns``."""
        shortest, most = int(self._rest.way[0]), self._time_ns // self._unit_ns + 1
        if self._rest.price[0] > self._worth:
            return True
        if 8 * self._batches * self._time_ns >= 2**63:
            return False  # nothing is concluded from products that leave 64 bits
        ends = [shortest]
        while ends[-1] < most:
            ends.append(max(ends[-1] + 1, int(ends[-1] * RATIO)))
        alone, joined = self._room(ends[-1], self._batches), self._room(ends[-1], 1)
        ranges = [*pairwise(ends)]
        if self._every_one_refuted(ranges, alone, joined):
            return True
        before = self.ended.prices
        self._pay(self._best_prices(ranges, alone))
        return not np.array_equal(before, self.ended.prices) and self._every_one_refuted(ranges, alone, joined)

    def _every_one_refuted(self, ranges: list[tuple[int, int]], alone: Counts, joined: Counts) -> bool:
        """Return True if all devices cost less than the cheapest plan of each range."""
        doubted = self.ended.whole_ns // self._unit_ns
        left = sorted(ranges, key=lambda each: (each[0] <= doubted < each[1], -each[0]))
        while left:
            low, high = left.pop()
            if self._share(low, high, alone) <= 1:
                if high > max(low + 1, low * FINEST):
                    middle = (low + high) // 2
                    halves = (middle, high), (low, middle)
                    left += halves[::-1] if middle <= doubted < high else halves
                elif self._share(low, high, joined) <= 1:
                    self.ended = self.ended._replace(whole_ns=low * self._unit_ns)
                    return False
        return True

    def _best_prices(self, ranges: list[tuple[int, int]], counts: Counts) -> np.ndarray:
        """Return the prices at which the cheapest plan costs most, the same for all ranges.

        A range may not have separate prices: which class a stage counts as, and so how long its way is, depends on the
        prices.
        """
        prices = self.ended.prices
        if prices.size == 1:
            return prices
        order = ranges[:]

        def least_share(prices: np.ndarray, best: float) -> float:
            self._pay(prices)
            least = np.inf
            for at, each in enumerate(order):
                least = min(least, self._share(*each, counts))
                if least <= best:
                    order.insert(0, order.pop(at))
                    break
            return least

        return highest(least_share, prices)

    def _share(self, low: int, high: int, counts: Counts) -> float:
        """Return the price of the cheapest plan with a whole in [low, high) units, as a share of all devices' price."""
        question = CountQuestion(self._time_ns, self._batches, self._worth, self._unit_ns, low, high)
        return int(least_price(self._runs, question, counts, self._rest)) / self._worth

    def _pay(self, prices: np.ndarray) -> None:
        """Write the prices of all runs, and the least price of the stages from each layer on."""
        self.ended, self._worth = self.ended._replace(prices=prices), int(prices @ self._devices)
        np.multiply(self._runs.replicas, prices[self._runs.of], out=self._runs.price)
        rests(self._runs, self._unit_ns, self._rest)

    def _room(self, heads: int, least: int) -> Counts:
        """Return empty arrays for that many heads and for classes of limits from M down to ``least``."""
        limits = [self._batches]
        while limits[-1] > least:
            limits.append(max(least, min(limits[-1] - 1, int(limits[-1] / CLASSES))))
        falling = np.asarray(limits)
        class_of = np.searchsorted(-falling, -np.arange(self._batches + 1), side="right") - 1
        longest = int(self._runs.layers.max(initial=1))
        return Counts(
            np.empty((longest + 1, len(limits), heads), dtype=np.int32),
            falling,
            np.maximum(0, class_of),
            np.empty((len(limits), 2), dtype=np.int64),
            np.empty(heads, dtype=np.int64),
        )

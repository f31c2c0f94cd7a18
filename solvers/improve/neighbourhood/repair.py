"""Large moves: neighbouring stages give up their cuts and devices, and are rebuilt (destroy and repair).

The freed devices form a row: as they were, sorted, or reversed. Repairs cut the row and the freed layers into new
stages. Few repairs are all listed; of many, some are drawn, with cuts that give each stage about as much of the work
as of the devices.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import comb

import numpy as np

from penstock.solvers.improve.neighbourhood.moves import MOST_STAGES, Stages, as_asked
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.problem import Problem

JITTER = 2
"""The largest distance, in places, of a drawn cut from an even one."""


@dataclass(frozen=True, eq=False)
class Repairs:
    """The repairs of a request's plans; at most ``most`` at a time."""

    problem: Problem
    most: int

    def of(self, stages: Stages, low: int, high: int, draw: random.Random) -> Iterator[Stages]:
        """Yield the plan with stages ``low`` to ``high`` (not included) rebuilt, with up to two more stages."""
        freed = stages[low:high]
        inside = [k for k, cut in enumerate(self._cuts) if freed[0].first <= cut < freed[-1].last]
        for devices in self._rows(freed):
            most = min(len(inside) + 1, len(devices), len(freed) + 2, MOST_STAGES - len(stages) + len(freed))
            for parts in self._parts(inside, len(devices), most, draw):
                yield as_asked(self.problem, stages[:low] + self._rebuild(freed, devices, *parts) + stages[high:])

    def _parts(
        self, inside: list[int], devices: int, most: int, draw: random.Random
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield cuts of the layers, by number, with the places where the row of devices is cut."""
        if _count(len(inside), devices, most) <= self.most:
            for count in range(1, most + 1):
                for cuts in combinations(inside, count - 1):
                    for places in combinations(range(1, devices), count - 1):
                        yield cuts, places
            return
        for _ in range(self.most):
            count = draw.randint(1, most)
            places = tuple(sorted(draw.sample(range(1, devices), count - 1)))
            yield self._near_even(inside, places, devices, draw), places

    def _near_even(
        self, inside: list[int], places: tuple[int, ...], devices: int, draw: random.Random
    ) -> tuple[int, ...]:
        """Return cuts that give each group of devices about its share of the work, off by up to ``JITTER`` places."""
        begin, end = self._work[inside[0]] if inside[0] else 0, self._work[inside[-1] + 1]
        chosen: list[int] = []
        for k, place in enumerate(places):
            wanted = begin + (end - begin) * place / devices
            at = int(np.searchsorted(self._work, wanted)) + draw.randint(-JITTER, JITTER)
            low = chosen[-1] + 1 if chosen else inside[0]
            chosen.append(min(max(at, low), inside[-1] - (len(places) - 1 - k)))
        return tuple(chosen)

    def _rebuild(self, freed: Stages, devices: Sequence[int], cuts: tuple[int, ...], places: tuple[int, ...]) -> Stages:
        lasts = [*(self._cuts[k] for k in cuts), freed[-1].last]
        firsts = [freed[0].first, *(last + 1 for last in lasts[:-1])]
        again = 2 * sum(bool(stage.recompute) for stage in freed) > len(freed)
        modules = () if again or any(stage.recompute for stage in freed) else max(stage.modules for stage in freed)
        groups = [tuple(sorted(devices[i:j])) for i, j in pairwise((0, *places, len(devices)))]
        return tuple(
            Stage(first, last, group, recompute=((first, last),) if again else (), modules=modules)
            for first, last, group in zip(firsts, lasts, groups, strict=True)
        )

    def _rows(self, freed: Stages) -> list[tuple[int, ...]]:
        """Return the orders in which the freed devices are shared out; each of equivalent orders once."""
        row = tuple(d for stage in freed for d in stage.devices)
        rows: dict[tuple[object, ...], tuple[int, ...]] = {}
        for each in (row, tuple(sorted(row)), row[::-1]):
            alike = tuple((self.problem.devices[d].node, self.problem.devices[d].kind) for d in each)
            rows.setdefault(alike, each)
        return list(rows.values())

    @cached_property
    def _cuts(self) -> list[int]:
        return [int(cut) for cut in np.flatnonzero(self.problem.cuttable)]

    @cached_property
    def _work(self) -> np.ndarray:
        """Work before each cut on the first kind of devices; (number of cuts + 1,)."""
        work = self.problem.costs(self.problem.devices[0].kind, self.problem.min_slice).passes_ns
        return np.asarray([*(work[cut + 1] for cut in self._cuts), work[-1]])


def _count(inside: int, devices: int, most: int) -> int:
    return sum(comb(inside, k - 1) * comb(devices - 1, k - 1) for k in range(1, most + 1))

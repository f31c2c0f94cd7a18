"""Large moves: neighbouring stages give up their cuts and devices, and are rebuilt (destroy and repair).

The freed devices stay in a row, as they were, sorted, or the other way round; the repairs cut the row and the freed
layers into new stages. All repairs are listed where they are few; else some are drawn, with cuts near those
that share the work as the devices are shared.
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
    """How a request's plans are repaired; at most ``most`` ways at a time."""

    problem: Problem
    most: int

    def of(self, stages: Stages, low: int, high: int, draw: random.Random) -> Iterator[Stages]:
        """The plan with stages ``low`` to ``high`` (not included) rebuilt, with up to two more stages."""
        freed = stages[low:high]
        inside = [k for k, cut in enumerate(self._cuts) if freed[0].first <= cut < freed[-1].last]
        for devices in self._rows(freed):
            most = min(len(inside) + 1, len(devices), len(freed) + 2, MOST_STAGES - len(stages) + len(freed))
            for parts in self._parts(inside, len(devices), most, draw):
                yield as_asked(self.problem, stages[:low] + self._made(freed, devices, *parts) + stages[high:])

    def _parts(
        self, inside: list[int], devices: int, most: int, draw: random.Random
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Cuts (by number) and places where the row of devices is cut."""
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
        """Cuts that give each group of devices about its share of the work, a little off."""
        begin, end = self._work[inside[0]] if inside[0] else 0, self._work[inside[-1] + 1]
        chosen: list[int] = []
        for k, place in enumerate(places):
            wanted = begin + (end - begin) * place / devices
            at = int(np.searchsorted(self._work, wanted)) + draw.randint(-JITTER, JITTER)
            low = chosen[-1] + 1 if chosen else inside[0]
            chosen.append(min(max(at, low), inside[-1] - (len(places) - 1 - k)))
        return tuple(chosen)

    def _made(self, freed: Stages, devices: Sequence[int], cuts: tuple[int, ...], places: tuple[int, ...]) -> Stages:
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
        """The freed devices in the orders in which they are shared; orders that mean the same once."""
        row = tuple(d for stage in freed for d in stage.devices)
        known: dict[tuple[object, ...], tuple[int, ...]] = {}
        for each in (row, tuple(sorted(row)), row[::-1]):
            alike = tuple((self.problem.devices[d].node, self.problem.devices[d].kind) for d in each)
            known.setdefault(alike, each)
        return list(known.values())

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

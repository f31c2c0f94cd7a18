"""Sums of tied parameters for plans that were simulated in bulk: which stage waits for which, and until when."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.solvers.costs.collectives import all_reduce_ns
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import owned_of
from penstock.solvers.costs.ties import trained_ties
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.problem import Problem


class BulkTies:
    """The sums of tied parameters in plans of one pipeline whose stages share no devices.

    In a private network they end when the judge's do. In a shared network the time that they wait for links is left
    out.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ties = [(layers, owned_of(problem, size)) for _name, layers, size in trained_ties(problem)]
        self._sum_ns: dict[tuple[int, tuple[int, ...]], int] = {}

    def __bool__(self) -> bool:
        return bool(self._ties)

    def finish_ns(self, plan: tuple[Sequence[int], Sequence[Stage]], ready_ns: np.ndarray, step_ns: np.ndarray) -> int:
        """Return when a plan ends.

        ``plan``: its stages with their numbers. ``ready_ns``: when each has reduced its buckets. ``step_ns``: how long
        the optimizer's step of each takes.
        """
        numbers, stages = plan
        at: list[int] = ready_ns.tolist()
        for k, (layers, size) in enumerate(self._ties):
            users = [s for s, stage in enumerate(stages) if any(stage.first <= x <= stage.last for x in layers)]
            if len(users) > 1:
                key = k, tuple(numbers[s] for s in users)
                if key not in self._sum_ns:
                    devices = sorted(d for s in users for d in stages[s].devices)
                    self._sum_ns[key] = all_reduce_ns(self._problem, size, devices)
                end = max(at[s] for s in users) + self._sum_ns[key]
                for s in users:
                    at[s] = end
        ends: list[int] = [ready + step for ready, step in zip(at, step_ns.tolist(), strict=True)]
        return min(NEVER_NS, max(ends))

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
    """Adds the sums to plans of one pipeline whose stages lie on devices of their own.

    In a private network that is what the judge does. In a shared one the sums' own waiting for links is left out.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._ties = [(layers, owned_of(problem, size)) for _name, layers, size in trained_ties(problem)]
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def __bool__(self) -> bool:
        return bool(self._ties)

    def finish_ns(self, plan: tuple[Sequence[int], Sequence[Stage]], ready_ns: np.ndarray, step_ns: np.ndarray) -> int:
        """When a plan ends, given its stages with their numbers, when each has reduced its buckets, and its step."""
        numbers, stages = plan
        at: list[int] = ready_ns.tolist()
        for k, (layers, size) in enumerate(self._ties):
            users = [s for s, stage in enumerate(stages) if any(stage.first <= x <= stage.last for x in layers)]
            if len(users) > 1:
                key = k, tuple(numbers[s] for s in users)
                if key not in self._known:
                    devices = sorted(d for s in users for d in stages[s].devices)
                    self._known[key] = all_reduce_ns(self._problem, size, devices)
                end = max(at[s] for s in users) + self._known[key]
                for s in users:
                    at[s] = end
        ends: list[int] = [ready + step for ready, step in zip(at, step_ns.tolist(), strict=True)]
        return min(NEVER_NS, max(ends))

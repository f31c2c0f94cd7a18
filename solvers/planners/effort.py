"""Efforts: the counts after which a solve looks for no better plan; the same answer on every machine (decision 10).

A planner that has had many plans judged without one that is better than its best rarely finds one later, and what it
finds then is rarely the answer: docs/benchmarks.md has the figures that the counts are from.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.micro_batches import size_of
from penstock.solvers.model.problem import Problem

FULL_SIZE = 20_000
"""The size of a request above which planners are less patient, as each of their plans takes longer."""
LEAST_PATIENCE = 8
LARGE = 50_000
"""The size of a problem above which planners that prove what is best of a small one are not asked."""


class Effort(NamedTuple):
    """``patience``: plans in a row, none better than its best, after which a planner ends; None: at its own end.

    ``proves``: planners of proofs are not ended so. ``improving``: what the search from the best plan and the
    optimisation of its order may take, as a multiple of the usual; None: the usual, or more with a long time limit.
    ``comparing``: the effort for comparing choices of degrees by plans of all planners: the sizes
    (``micro_batches.size_of``) of those compared, added up. ``compares``: whether some choices of a request that is too
    large for comparing all are compared so, or all by planner ``even`` alone.
    """

    name: str
    patience: int | None = None
    proves: bool = True
    improving: float | None = None
    comparing: int = 160_000
    compares: bool = True

    def patience_for(self, problem: Problem) -> int | None:
        """Return the patience of planners with a problem: less for a large one."""
        if self.patience is None:
            return None
        return min(self.patience, max(LEAST_PATIENCE, self.patience * FULL_SIZE // max(1, size_of(problem))))


QUICK = Effort("quick", patience=LEAST_PATIENCE, proves=False, improving=0.0, comparing=20_000, compares=False)
NORMAL = Effort("normal", patience=64, improving=0.5)
THOROUGH = Effort("thorough")
EFFORTS = {effort.name: effort for effort in (QUICK, NORMAL, THOROUGH)}


def effort_of(name: str) -> Effort:
    """Return the effort of a name. Raises UnsupportedRequest for an unknown name."""
    if name not in EFFORTS:
        raise UnsupportedRequest(f"no effort {name!r}; there are {', '.join(EFFORTS)}")
    return EFFORTS[name]

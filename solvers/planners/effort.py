"""The efforts: counts after which a solve ends its search for a better plan; the same answer on every machine.

A planner with many simulated plans, none better than its best, rarely finds a better one later, and what it finds then
is rarely the answer. docs/benchmarks.md has the figures behind the counts; decision 10 has the reasons.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.micro_batches import size_of
from penstock.solvers.model.problem import Problem

FULL_SIZE = 20_000
"""The size of a request above which planners stop sooner, as each of their plans takes longer."""
LEAST_PATIENCE = 8
LARGE = 50_000
"""The size of a problem above which planners that prove optima of small problems do not run."""


class Effort(NamedTuple):
    """A limit on the work of a solve.

    ``patience``: plans in a row, none better than its best, after which a planner ends. None: it ends by itself.
    ``proves``: planners of proofs have no such limit. ``improving``: the work of the search from the best plan and of
    the optimisation of its order, as a multiple of the usual. None: the usual, or more with a long time limit.
    ``comparing``: the limit for comparing choices of degrees by plans of all planners: the total size
    (``micro_batches.size_of``) of the compared problems. ``compares``: if a request is too large for comparing all
    choices so, some of them are still compared so. Otherwise planner ``even`` alone compares all choices.
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

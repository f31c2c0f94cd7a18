"""The label search as a bound alone: no plan of it is judged (BOUNDS section 3, deepening).

The number of micro-batches whose bound is lowest is searched next, until that bound is its plan's exact bound, or the
counted effort is spent. ``planners/contiguous_bound`` searches in the same way and judges the plans that it meets.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.solvers.bounds.contiguous.label_search import PIECE, BatchSearch
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.model.micro_batches import batches_tried
from penstock.solvers.model.problem import Problem

FURTHER, SLOWER = 4, 8
"""A search goes up to 1/4 above the known bound; with more devices than 32, up to ``SLOWER`` / devices."""


def further_ns(problem: Problem, bound_ns: int) -> int:
    """Return the limit of the next search above a bound."""
    return bound_ns + bound_ns // max(FURTHER, problem.num_devices // SLOWER) + 1


def least_bound_ns(
    problem: Problem, effort: int, *, split: bool = False, stopped: Callable[[], bool] = lambda: False
) -> int | None:
    """Return the least bound of any plan with stages apart, for the numbers of micro-batches that planners try, in ns.

    ``effort``: points of labels of all searches together. ``split``: whether backwards may be split. ``stopped``:
    whether to end with the bound proven so far. None: no plan.
    """
    links = Links(problem)
    searches = [BatchSearch(problem, batch, links, split=split) for batch in batches_tried(problem)]
    while searches:
        lowest = min(searches, key=lambda search: search.proven_ns)
        if stopped():
            return lowest.proven_ns
        if lowest.closed:
            if lowest.carried_ns >= 0:
                return lowest.proven_ns
            lowest.carry(FAR_NS)
            continue
        spent = sum(search.steps for search in searches)
        for pieces, _piece in enumerate(lowest.step(further_ns(problem, lowest.bound_ns)), start=1):
            if spent + pieces * PIECE > effort or stopped():
                return lowest.proven_ns
        if lowest.empty:
            searches.remove(lowest)
    return None

"""The label search's bound alone, and the least bound of all plans, one by one."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import numpy as np
from split_plans import variants

from penstock.solvers.bounds.contiguous.label_search import BatchSearch, Path
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.contiguous_bound.planner import Relaxation
from penstock.solvers.planners.exact.chain_tables import WHOLE_BACKWARDS, ChainTables

EFFORT = 10**8
T = TypeVar("T")


def raised(search: BatchSearch) -> Path | None:
    """Run one step with a generous limit, and return the plan that it ends at."""
    return result_of(search.step(search.bound_ns * 2 + 10))


def result_of(work: Generator[None, None, T]) -> T:
    """Run a search to its end."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def proven_ns(problem: Problem, space: Space) -> tuple[int, bool]:
    """Return the bound without any plan that cuts the search off, and whether a plan exists."""
    searches = Relaxation(problem, EFFORT).searches_of(space.batches)
    for search in searches:
        while not search.closed:
            raised(search)
    bounds = [search.bound_ns for search in searches if not search.empty]
    return min(bounds, default=NEVER_NS), bool(bounds)


def least_of_all(space: Space) -> int:
    """Return the least bound of any plan."""
    return min([NEVER_NS, *(least_of(space, batch) for batch in space.batches)])


def least_of(space: Space, batch: Batch) -> int:
    """Return the least bound of the plans of one number of micro-batches; ``ChainTables`` gives the order."""
    tables, least = ChainTables(space, batch), NEVER_NS
    for stages in range(1, space.most_stages + 1):
        fed = [p for p in space.placements(stages) if max(map(len, p)) <= batch.replicas_fed(space.problem.min_slice)]
        partitions = space.partitions(stages)
        if not fed or not len(partitions):
            continue
        bounds = tables.bounds(partitions, fed)
        for p, cut in zip(*np.unravel_index(np.argsort(bounds, axis=None, kind="stable"), bounds.shape), strict=True):
            if bounds[p, cut] >= least:
                break
            for plan in variants(space.problem, space.allocation(batch, partitions[cut], fed[p])):
                least = min(least, schedule_bound(space.problem, plan, WHOLE_BACKWARDS).bound_ns)
    return least

"""A proof of the shortest step of a given allocation: the exact suffix search of BOUNDS Part II."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.suffix.exact_search import SuffixSearch
from penstock.solvers.bounds.suffix.stage_line import line_of
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row

EFFORT = 4_000_000
"""The default number of states; about a million are made in a second."""


class SuffixAnswer(NamedTuple):
    """A proof that no step takes less than ``bound_ns``; ``orders``: the best orders of the model within the given
    limit.

    ``proven``: the bound is the optimum of the model, or no step is within the limit. ``spent``: states made.
    """

    bound_ns: int
    orders: Orders | None
    proven: bool
    spent: int


def takes(times: StageTimes) -> bool:
    """Return True if the model covers the step: one pipeline, no device in two stages, whole backwards.

    A separate recomputation may run while its gradient is awaited, so the way back is shorter than the model's.
    """
    return times.stages_apart and not times.split and not times.recomputes_apart


def judgeable(times: StageTimes) -> bool:
    """Return True if the model also covers the judge's rules: private channels, micro-batches of one size, no ties."""
    return takes(times) and not times.problem.rules.shared and len(times.classes) == 1 and not times.ties


def prove(
    problem: Problem, allocation: Allocation, at_most_ns: int, effort: int = EFFORT, *, as_judged: bool = False
) -> SuffixAnswer:
    """Search for a step of at most ``at_most_ns``, with whole backwards in any order; return a bound on all such steps.

    In the model, channels carry in any order, micro-batches of two sizes count as small ones, and transfers of
    different edges do not meet (``line_of`` proves the relaxation), so that the orders have to be simulated.
    ``as_judged``: channels carry first the transfer that is ready first and nothing waits on purpose, micro-batches in
    index order. If that is proven, the bound is the judge's time of ``orders``. ``effort`` counts states; the answer is
    the same on every machine. Raises UnsupportedRequest where ``takes`` is false, or with ``as_judged`` where
    ``judgeable`` is.
    """
    times = StageTimes(problem, allocation, Orders("any order of whole backwards", ()))
    if not takes(times):
        raise UnsupportedRequest(
            "the suffix search needs one pipeline of stages on separate devices, whose replicas split each "
            "micro-batch, and backwards that are not split",
            remedy="use schedule_bound, which bounds every plan",
        )
    if as_judged and not judgeable(times):
        raise UnsupportedRequest(
            "the suffix search follows the simulator only for private channels, micro-batches of one size, and no "
            "tied parameters",
            remedy="leave as_judged out, for a bound on every order",
        )
    search = SuffixSearch(line_of(times), effort)
    proof = search.run_as_judged(at_most_ns) if as_judged else search.run(at_most_ns)
    orders = None if proof.actions is None else _orders(allocation, proof.actions)
    return SuffixAnswer(proof.bound_ns, orders, proof.proven, proof.spent)


def _orders(allocation: Allocation, actions: tuple[int, ...]) -> Orders:
    """Return each stage's forwards and backwards as they were scheduled; transfers run in order of arrival."""
    stages = len(allocation.stages)
    count = [0] * (2 * stages)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in range(stages)]
    for action in actions:
        if action < 2 * stages:
            kind, s = divmod(action, stages)
            rows[s].append((kind, s, count[action]))
            count[action] += 1
    return Orders(
        "suffix-search",
        tuple(
            Row(stage.devices, np.asarray(row, dtype=np.int32))
            for stage, row in zip(allocation.stages, rows, strict=True)
        ),
    )

"""DAPPLE's early-backward schedule (section III-B, V-C; ALGORITHMS 2.6): K forwards, then B and F in turn.

Symbols: K_i is ``warmup[i]``, D_i is ``micro_batches_that_fit``, P_A and P_B are policies ``A`` and ``B``, ACR is
``activation_communication_ratio``.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.costs.tables.step_graph import StepGraph
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.support.rows import flushed_rows

ACR_THRESHOLD = 0.08
"""R-9: the paper runs P_B for ratios of 0.10 and more and P_A for 0.06 and less, and names no threshold."""


def early_backward(problem: Problem, allocation: Allocation, *, warmup: Sequence[int] | None = None) -> Orders:
    """Return orders in which stage i runs ``warmup[i]`` forwards, then strictly alternates backward and forward.

    ``warmup`` counts in-flight micro-batches of the stage over all its round-robin replicas; None means policy A.
    Raises ``InvalidPlan`` where a stage would wait for more forwards than the stage before it sends (a deadlock).
    """
    vector = tuple(warmup) if warmup is not None else policy_a(problem, allocation)
    _refuse_growing(allocation, vector)
    capped = tuple(min(k, len(allocation.micro_batches(s))) for s, k in enumerate(vector))
    return Orders("early-backward", flushed_rows(problem, allocation, capped), capped)


def one_f_one_b(problem: Problem, allocation: Allocation) -> Orders:
    """Return 1F1B as other trainers run it: S - i forwards of stage i first, regardless of memory."""
    count, number = len(allocation.stages), allocation.num_micro_batches
    return early_backward(problem, allocation, warmup=[min(count - s, number) for s in range(count)])


def policy_a(problem: Problem, allocation: Allocation) -> tuple[int, ...]:
    """Return P_A: K_i = min(S - i, D_i)."""
    return fitted(problem, allocation, depths(allocation))


def policy_b(problem: Problem, allocation: Allocation) -> tuple[int, ...]:
    """Return P_B: K_i = min(2 (S - i) - 1, D_i)."""
    return fitted(problem, allocation, tuple(2 * depth - 1 for depth in depths(allocation)))


def by_acr(problem: Problem, allocation: Allocation) -> tuple[int, ...]:
    """Return P_B where the activation communication ratio reaches ``ACR_THRESHOLD``, else P_A."""
    chosen = policy_b if activation_communication_ratio(problem, allocation) >= ACR_THRESHOLD else policy_a
    return chosen(problem, allocation)


def depths(allocation: Allocation) -> tuple[int, ...]:
    """Return S - i of each stage; a round-robin stage counts once per replica, to keep all of them busy."""
    depth = [0] * len(allocation.stages)
    for number in reversed(range(len(depth))):
        stage = allocation.stages[number]
        after = allocation.next(number)
        depth[number] = stage.replicas if stage.dispatch == "round_robin" else 1
        depth[number] += 0 if after is None else depth[after]
    return tuple(depth)


def room(problem: Problem, allocation: Allocation) -> tuple[int, ...]:
    """Return D_i of each stage, over all round-robin replicas; at least 1, as the simulation checks memory."""
    rows = most_rows(problem, allocation)
    fits = []
    for stage in allocation.stages:
        each = max(1, micro_batches_that_fit(problem, stage, rows))
        fits.append(each * stage.replicas if stage.dispatch == "round_robin" else each)
    return tuple(fits)


def fitted(problem: Problem, allocation: Allocation, wanted: Sequence[int]) -> tuple[int, ...]:
    """Return ``wanted``, clamped by memory and by the micro-batches, and never growing along a pipeline.

    A stage that warms up with more forwards than the one before it would wait forever; the clamp D_i of an
    early stage therefore clamps the later ones too.
    """
    vector: list[int] = []
    for number, (want, most) in enumerate(zip(wanted, room(problem, allocation), strict=True)):
        before = allocation.previous(number)
        k = min(want, most, len(allocation.micro_batches(number)))
        vector.append(k if before is None else min(k, vector[before]))
    return tuple(vector)


def activation_communication_ratio(problem: Problem, allocation: Allocation) -> float:
    """Return ACR: a cut's mean round-trip time over the mean time of a stage's forward and backward."""
    graph, stages = StepGraph(problem, allocation), range(len(allocation.stages))
    computed = sum(costs[0].passes_ns for costs in graph.costs)
    moved = sum(graph.lags_ns(s, way)[0] for s in stages for way in (0, 1))
    cuts = len(stages) - len(allocation.pipelines)
    if cuts == 0 or computed == 0:
        return 0.0
    return (moved / cuts) / (computed / len(stages))


def _refuse_growing(allocation: Allocation, vector: tuple[int, ...]) -> None:
    if len(vector) != len(allocation.stages) or min(vector) < 1:
        raise InvalidPlan(
            f"warm-up {list(vector)} has to be {len(allocation.stages)} numbers of at least 1, one per stage"
        )
    for number, k in enumerate(vector):
        before = allocation.previous(number)
        limit = None if before is None else min(vector[before], len(allocation.micro_batches(number)))
        if limit is not None and min(k, len(allocation.micro_batches(number))) > limit:
            raise InvalidPlan(
                f"stage {number} warms up with {k} forwards, but stage {before} sends only {vector[before or 0]} "
                "before it waits for a backward: a deadlock",
                remedy=f"at most {vector[before or 0]} for stage {number}",
            )

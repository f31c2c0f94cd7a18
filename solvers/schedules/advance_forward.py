"""AvgPipe's advance forward propagation (section 4.2, algorithm 1; ALGORITHMS 6.2): 1F1B with forwards in advance.

Symbols: K is the number of stages of a pipeline, adv_k is ``advances``, δ = adv_1 - (K - 1) is ``delta``. Stage k runs
adv_k forwards, then forward and backward in turn, then the remaining adv_k backwards: adv_k + 1 micro-batches in
flight.

Algorithm 1 is for the first GPU, and its printed loop lacks the last backwards (R-29, R-30). For the other GPUs adv
tapers to 0 at the last one. δ = 0 is 1F1B (DAPPLE's P_A), δ = K - 1 is DAPPLE's P_B; ``afab`` runs all forwards first.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.schemas.errors import InvalidDocument
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.schedules.early_backward import depths
from penstock.solvers.schedules.support.rows import flushed_rows


def advance_forward(
    problem: Problem,
    allocation: Allocation,
    *,
    delta: int = 0,
    afab: bool = False,
    warmup: tuple[int, ...] | None = None,
) -> Orders:
    """Return the orders of every pipeline, each independent, so that pipelines may share devices (one row per stage).

    ``warmup``: the in-flight micro-batches of each stage, instead of ``delta``. Raises ``InvalidDocument`` for a
    negative ``delta``.
    """
    if delta < 0:
        raise InvalidDocument(f"delta {delta} is negative; 0, which is 1F1B, is the smallest")
    flying = warmup or (everything(allocation) if afab else in_flight(allocation, delta))
    rows: list[Row] = []
    first = 0
    for pipeline in allocation.pipelines:
        of_pipeline = flying[first : first + len(pipeline.stages)]
        for row in flushed_rows(problem, Allocation((pipeline,), allocation.num_micro_batches), of_pipeline):
            operations = row.operations.copy()
            operations[:, 1] += first
            rows.append(Row(row.devices, operations))
        first += len(pipeline.stages)
    return Orders("advance-forward", tuple(rows), flying)


def advances(allocation: Allocation, delta: int) -> tuple[int, ...]:
    """Return adv_k = min(M, ceil((K - k) (1 + δ / (K - 1)))) of each stage, k from 1 (R-30)."""
    advance = []
    depth = depths(allocation)
    for s, pipeline in enumerate(allocation.pipeline_of):
        after, most = depth[s] - 1, depth[allocation.pipeline_of.index(pipeline)] - 1
        wanted = -(-after * (most + delta) // most) if most else 0
        advance.append(min(len(allocation.micro_batches(s)), wanted))
    return tuple(advance)


def in_flight(allocation: Allocation, delta: int) -> tuple[int, ...]:
    """Return the in-flight micro-batches of each stage: adv_k + 1, at most the number of micro-batches."""
    return tuple(min(adv + 1, len(allocation.micro_batches(s))) for s, adv in enumerate(advances(allocation, delta)))


def everything(allocation: Allocation) -> tuple[int, ...]:
    """Return the number of all micro-batches, for each stage."""
    return tuple(len(allocation.micro_batches(s)) for s in range(len(allocation.stages)))


def deltas(num_stages: int) -> list[int]:
    """Return the values of δ worth simulating: 0, powers of two, and K - 1 (P_B); larger ones gained nothing (6.2)."""
    most = num_stages - 1
    return sorted({0, most, *(2**e for e in range(most.bit_length()))})


def climb(judged_ns: Callable[[int], int | None]) -> tuple[int, int]:
    """Run algorithm 1: raise δ by one while that is faster and fits in memory; return (δ, schedules simulated).

    ``judged_ns``: the time with a δ, None where it does not fit. The paper averages several iterations and requires
    a gain above 1 %, against noise (R-31); the simulation has none, so any gain counts.
    """
    delta, best = 0, judged_ns(0)
    judged = 1
    while best is not None:
        following = judged_ns(delta + 1)
        judged += 1
        if following is None or following >= best:
            break
        delta, best = delta + 1, following
    return delta, judged

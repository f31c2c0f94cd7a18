"""The share of a processor that an operation uses, in millionths (AvgPipe, sections 2 and 5.2.2).

The share of a stage is the mean of its measured curve φ over the computing time. With micro-batches of another size it
changes in proportion, up to a whole processor. Without a measured run every operation uses the whole processor.
"""

from __future__ import annotations

from penstock.schemas.errors import InvalidPlan
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem

WHOLE = 1_000_000
"""A whole processor, in millionths."""


def utilisation_ppm(problem: Problem, allocation: Allocation, stage: int, rows: int) -> int:
    """Return the share that a stage's operations use on micro-batches of ``rows`` samples, rounded up, at least 1 ppm.

    Raises ``InvalidPlan`` where the measured pipeline has another number of stages than the plan's.
    """
    run = problem.pipeline_run
    if run is None:
        return WHOLE
    pipeline = allocation.pipeline_of[stage]
    stages = len(allocation.pipelines[pipeline].stages)
    if stages != len(run.ranks):
        raise InvalidPlan(
            f"the pipeline profile has {len(run.ranks)} ranks, but the plan's pipelines have {stages} stages",
            remedy=f"a plan of {len(run.ranks)} stages, or a pipeline profile of {stages} ranks",
        )
    return rank_share(problem, stage - allocation.pipeline_of.index(pipeline), rows)


def rank_share(problem: Problem, rank: int, rows: int) -> int:
    """Return the share that a measured rank's operations use on micro-batches of ``rows`` samples, in millionths."""
    run = problem.pipeline_run
    assert run is not None
    curve = run.ranks[rank].utilisation_ppm
    volume = sum(curve) * rows * run.num_micro_batches
    measured = len(curve) * problem.global_batch_size * run.num_pipelines
    return min(WHOLE, max(1, -(-volume // measured)))

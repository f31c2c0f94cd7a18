"""A plan of one stage that all GPUs share out, as the replicas that run it: ranks are lowered from this form.

Such a stage is planned on one device, the cell of all GPUs, whose meshes run equally many samples (``one_stage``).
"""

from __future__ import annotations

from dataclasses import replace

from penstock.solvers.degrees.contract import replicas_apart
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row, Schedule


def on_replicas(problem: Problem, allocation: Allocation, schedule: Schedule) -> tuple[Problem, Allocation, Schedule]:
    """Return the plan with every replica as a device, all in the same order; any other plan as it is."""
    if problem.choice is None or not problem.choice.in_one_stage:
        return problem, allocation, schedule
    apart = replicas_apart(problem)
    everyone = tuple(range(apart.num_devices))
    (stage,) = allocation.stages
    assert isinstance(schedule, Orders), "updates of one version of the model are flushed"
    rows = tuple(Row(everyone, row.operations) for row in schedule.rows if len(row.operations))
    spread = single_pipeline((replace(stage, devices=everyone),), allocation.num_micro_batches)
    return apart, spread, replace(schedule, rows=rows)

"""The plans of PRM along one order of the devices, and whether they fit in memory with P_A's micro-batches (O-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.solvers.costs.memory import micro_batches_that_fit
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.spp.estimate import estimate_ns
from penstock.solvers.planners.spp.partition import Parts, ReplicatedPart, search, stages_that_fit
from penstock.solvers.planners.spp.tables import Depth, Windows, chain_of

WORTH_JUDGING = 8
"""The plans up to 1/8 above the best estimate are simulated: so far the simulator may reverse their order."""
FEW_STAGES = 8


class RatedPlan(NamedTuple):
    """A plan with its expected time, and whether its stages hold what P_A keeps in flight."""

    estimate_ns: int
    allocation: Allocation
    fits: bool


def partitioned(
    problem: Problem, line: Windows, batch: Batch, replicas: Sequence[int], *, unused: bool = True, best_ns: int
) -> list[RatedPlan]:
    """Run PRM without regard to memory; if its best plan does not fit, with stages that fit, then with any that do.

    ``best_ns``: the best estimate so far. W counts all of an all-reduce, so one stage on all devices is taken whatever
    its W where all-reduces overlap.
    """
    fed = [r for r in replicas if r <= batch.replicas_fed(problem.min_slice)]
    if not fed:
        return []
    blocks = problem.num_blocks
    most = min(blocks, stages_that_fit(problem.num_layers, problem.num_devices, len(fed)))

    def worth(parts: Parts) -> int:
        return _limit(found_of(problem, line, batch, parts).estimate_ns)

    plans: list[RatedPlan] = []
    if problem.rules.overlap_all_reduce:
        plans.append(found_of(problem, line, batch, (ReplicatedPart(0, problem.num_layers, fed[-1], 0),)))
    for depths in ((), _depths(most, batch), (Depth(most, 1),)):
        chain = chain_of(problem, line, batch, fed, most, unused=unused, depths=depths)
        for partition in search(chain, most, _limit(best_ns), worth).values():
            plans += [found_of(problem, line, batch, parts) for parts in partition.parts]
        ahead = plans if depths else sorted(plans, key=lambda plan: plan.estimate_ns)[:1]
        if any(plan.fits for plan in ahead):
            break
    return plans


def _limit(best_ns: int) -> int:
    return best_ns + best_ns // WORTH_JUDGING


def _depths(most: int, batch: Batch) -> tuple[Depth, ...]:
    """Return P_A's micro-batches in flight by the number of stages that follow.

    Beyond ``FEW_STAGES`` stages they are given for powers of two, rounded up.
    """
    ends = [*range(min(FEW_STAGES, most)), *(FEW_STAGES << e for e in range(max(0, most // FEW_STAGES).bit_length()))]
    return tuple(Depth(end, min(end + 1, batch.num_micro_batches)) for end in ends)


def found_of(problem: Problem, line: Windows, batch: Batch, parts: Parts) -> RatedPlan:
    """Return parts as stages on the devices of the order."""
    stages, place = [], 0
    for part in parts:
        first, last = part.first, part.end - 1
        again = problem.recompute == "always" or part.way == 1
        devices = line.order[place : place + part.replicas]
        stages.append(Stage(first, last, devices, recompute=((first, last),) if again else ()))
        place += part.replicas
    allocation = single_pipeline(tuple(stages), batch.num_micro_batches)
    wanted = (min(len(stages) - n, batch.num_micro_batches) for n in range(len(stages)))
    capacities = (micro_batches_that_fit(problem, stage, batch.most_rows) for stage in stages)
    return RatedPlan(
        estimate_ns(problem, allocation), allocation, all(h >= w for h, w in zip(capacities, wanted, strict=True))
    )

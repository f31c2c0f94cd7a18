"""Lower a plan file to programs: one per rank, or several variants for AvgPipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.planning.judge import Judgement, judge
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.program import Needs, Program
from penstock.solvers.costs.memory import context_bytes, shortages
from penstock.solvers.degrees.replicas import on_replicas
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.lowering import lower
from penstock.solvers.lowering.transports import TransportChoice
from penstock.solvers.model.schedule import Orders, Schedule
from penstock.solvers.schedules.advance_forward import advance_forward


def programs(
    file: PlanFile,
    *,
    batches: int = 1,
    norm: bool = False,
    transport: TransportChoice = "auto",
    staleness: int = 0,
) -> list[Program]:
    """Return one program per rank. Raises InvalidPlan when the plan does not verify or would deadlock.

    ``batches``: global batches that a program of a periodic plan trains before it is flushed. ``norm``: with the norm
    of all gradients, for clipping and fp16. ``staleness``: of the reference model, under elastic averaging.
    ``transport``: what ranks must be able to send over; ``auto``: also NCCL where the plan's devices are no CPUs.
    Raises UnsupportedRequest where the plan, or its update rule, does not support an option.
    """
    judgement = _judged(file)
    assert judgement.schedule is not None
    return _lowered(judgement, judgement.schedule, batches, norm, transport, staleness)


def ladder(
    file: PlanFile, *, norm: bool = False, transport: TransportChoice = "auto", staleness: int = 0
) -> list[list[Program]]:
    """Return programs with δ = 0, 1, … forwards in advance, one per rank each (AvgPipe, algorithm 1), as memory allows.

    The last has K - 1, beyond which nothing was gained (ALGORITHMS 6.2), or the number of micro-batches if smaller.
    Raises as ``programs``; UnsupportedRequest for a plan with another schedule.
    """
    if file.plan.schedule.name != "advance-forward":
        raise UnsupportedRequest(
            f"schedule {file.plan.schedule.name} has no number of advance forwards to search",
            remedy="plan with planner avgpipe, or schedule advance-forward",
        )
    judgement = _judged(file)
    rungs: list[list[Program]] = []
    for orders in _rungs(judgement):
        rungs.append(_lowered(judgement, orders, 1, norm, transport, staleness))
    if not rungs:
        raise InvalidPlan(
            "even 1F1B does not fit into the memory of the plan's devices",
            remedy="run the plan without advance_forward",
        )
    return rungs


def _rungs(judgement: Judgement) -> Iterator[Orders]:
    """Yield the distinct orders with δ = 0, 1, … that fit in memory."""
    problem, allocation = judgement.problem, judgement.allocation
    assert allocation is not None
    before: tuple[int, ...] = ()
    for delta in range(max(len(pipeline.stages) for pipeline in allocation.pipelines)):
        orders = advance_forward(problem, allocation, delta=delta)
        timeline = simulate(
            *(problem, allocation, orders),
            overlap=judgement.plan.overlap_all_reduce,
            update_rule=judgement.plan.update_rule,
        )
        if orders.warmup == before or shortages(problem, allocation, timeline):
            break
        before = orders.warmup
        yield orders


def _judged(file: PlanFile) -> Judgement:
    judgement = judge(file)
    if judgement.faults:
        raise InvalidPlan(f"the plan does not verify: {judgement.faults[0]}", remedy="see `penstock verify`")
    return judgement


def _lowered(
    judgement: Judgement, schedule: Schedule, batches: int, norm: bool, transport: TransportChoice, staleness: int
) -> list[Program]:
    assert judgement.allocation is not None
    lowered = lower(
        *on_replicas(judgement.problem, judgement.allocation, schedule),
        update_rule=judgement.plan.update_rule,
        transport=transport,
        overlap=judgement.plan.overlap_all_reduce,
        batches=batches,
        norm=norm,
        staleness=staleness,
    )
    needs = _needs(judgement)
    return [replace(program, needs=needs.get(program.device)) for program in lowered]


def _needs(judgement: Judgement) -> dict[str, Needs]:
    """Return the kind and memory that the plan assumes of each device, by its name; of a group, for each GPU."""
    problem, timeline = judgement.problem, judgement.timeline
    real = problem if problem.real is None else problem.real
    needs_of: dict[str, Needs] = {}
    for device, use in ({} if timeline is None else timeline.uses).items():
        hardware = problem.devices[device]
        needs = Needs(hardware.kind, max(0, use.memory.total - context_bytes(problem, device)))
        gpus = (device,) if problem.real is None else problem.cells[device]
        needs_of |= {real.devices[gpu].name: needs for gpu in gpus}
    return needs_of

"""Each rank's part of a plan: a program without its instructions.

A rank is a device; under elastic averaging it is one pipeline's share of a device, so that a device has a rank for
each pipeline on it. Ranks are numbered by device, then by pipeline.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import SHARDINGS, WITHIN_PASSES, Program, RankStage, Sharding
from penstock.solvers.costs.ties import SUMMING_RULES, tied_stages
from penstock.solvers.lowering.channels import Rows, channels, slices
from penstock.solvers.lowering.groups import groups_of
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.update_rules import UpdateRule, micro_batches_per_update, weight_copies


def layouts(
    problem: Problem, allocation: Allocation, rule: UpdateRule = "synchronous", *, batches: int = 1, staleness: int = 0
) -> list[Program]:
    """Return one program per rank, without instructions. Versions of weight stashing are not counted yet.

    Raises InvalidPlan when a replica would get no row or no micro-batch, a device holds a stage twice, or updates do
    not end with the last global batch; UnsupportedRequest for ties of which the rule keeps several versions, and for
    more tags than 2^31.
    """
    _refuse(problem, allocation, rule, batches)
    _refuse_sharding(problem, allocation, rule)
    averaging = rule == "elastic_averaging"
    lanes = sorted(
        {
            (device, p if averaging else 0)
            for p, stage in zip(allocation.pipeline_of, allocation.stages, strict=True)
            for device in stage.devices
        }
    )
    rank_of = {lane: rank for rank, lane in enumerate(lanes)}
    ranks = tuple(
        tuple(rank_of[device, p if averaging else 0] for device in stage.devices)
        for p, stage in zip(allocation.pipeline_of, allocation.stages, strict=True)
    )
    classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
    sharding = _sharding(problem, allocation)
    grouping = groups_of(problem, allocation, ranks, averaging)
    stages: list[list[RankStage]] = [[] for _ in lanes]
    for s, replicas in enumerate(ranks):
        for replica, rank in enumerate(replicas):
            one = _stage(allocation, rule, s, replica, replicas, classes)
            stages[rank].append(replace(one, buckets=grouping.buckets.get((s, rank), ())))
    ends = channels(problem, allocation, ranks, classes, batches)
    return [
        Program(
            rank=rank,
            world_size=len(lanes),
            device=problem.devices[device].name,
            global_batch_size=problem.global_batch_size,
            num_micro_batches=allocation.num_micro_batches,
            row_classes=classes,
            stages=tuple(stages[rank]),
            channels=tuple(ends[rank]),
            prologue=(),
            update_rule=rule,
            batches=batches,
            groups=grouping.groups,
            shared=grouping.shared,
            pipelines=len(allocation.pipelines),
            shard_states=problem.memory.shard_states and sharding is None and _is_shared_out(problem, allocation),
            staleness=staleness,
            sharding=sharding,
        )
        for rank, (device, _) in enumerate(lanes)
    ]


def _is_shared_out(problem: Problem, allocation: Allocation) -> bool:
    """Return whether several ranks hold the same parameters."""
    return problem.copies is not None or any(stage.replicas > 1 for stage in allocation.stages)


def _sharding(problem: Problem, allocation: Allocation) -> Sharding | None:
    """Return the sharding of programs beyond states; None where no two ranks have the same parameters."""
    chosen = None if problem.choice is None else problem.choice.sharding
    return next((each for each in SHARDINGS if each == chosen and _is_shared_out(problem, allocation)), None)


def own_micro_batches(program: Program, stage: RankStage) -> range:
    """Return the micro-batches of a stage's replica, in all global batches of a program."""
    first, last = stage.micro_batches
    stop = (program.batches - 1) * program.num_micro_batches + last + 1
    step = len(stage.ranks) if stage.dispatch == "round_robin" else 1
    return range(first + (stage.replica - first) % step, stop, step)


def _stage(
    allocation: Allocation, rule: UpdateRule, number: int, replica: int, ranks: tuple[int, ...], classes: Rows
) -> RankStage:
    stage = allocation.stages[number]
    micro_batches = allocation.micro_batches(number)
    every = micro_batches_per_update(rule, stage, len(micro_batches))
    return RankStage(
        stage=number,
        first=stage.first,
        last=stage.last,
        replica=replica,
        ranks=ranks,
        dispatch=stage.dispatch,
        rows=slices(stage, replica, classes),
        recompute=stage.recompute,
        modules=stage.modules,
        previous=allocation.previous(number),
        next=allocation.next(number),
        micro_batches=(micro_batches.start, micro_batches.stop - 1),
        buckets=(),
        update_every=every,
        versions=weight_copies(rule, allocation, number, 0),
        pipeline=allocation.pipeline_of[number],
    )


def _refuse(problem: Problem, allocation: Allocation, rule: UpdateRule, batches: int) -> None:
    count, size = allocation.num_micro_batches, problem.global_batch_size
    if count > size:
        raise InvalidPlan(f"a global batch of {size} samples cannot fill {count} micro-batches")
    for s, stage in enumerate(allocation.stages):
        _refuse_stage(problem, allocation, s, stage, batches)
        every = micro_batches_per_update(rule, stage, count)
        if every > 1 and batches * count % every:
            raise InvalidPlan(
                f"stage {s} steps after every {every} micro-batches, but {batches} global batches have "
                f"{batches * count}, which is not a multiple of {every}",
                remedy=f"a number of global batches whose micro-batches, {count} each, are a multiple of {every}",
            )
    for name, layers, _ in problem.shared_parameters:
        users = tied_stages(allocation, layers)
        if any(len(stages) > 1 for stages in users) and rule not in SUMMING_RULES:
            raise UnsupportedRequest(
                f"parameter {name!r} is shared by layers {list(layers)}, which stages {users[0]} hold; under {rule} "
                "updates these stages have different versions of it",
                remedy="synchronous or double_buffered updates, or a plan whose cuts keep these layers together",
            )


def _refuse_sharding(problem: Problem, allocation: Allocation, rule: UpdateRule) -> None:
    """Raise UnsupportedRequest for plans that ranks do not train where they share out gradients or parameters."""
    sharding = _sharding(problem, allocation)
    if sharding is None:
        return
    if rule != "synchronous":
        raise UnsupportedRequest(
            f"ranks cannot train {rule} updates with sharding {sharding}, which does not shard versions of weights",
            remedy="plan with update_rules: [synchronous], or with --sharding none",
        )
    if sharding not in WITHIN_PASSES:
        return
    if len(allocation.stages) > 1:
        raise UnsupportedRequest(
            f"sharding {sharding} moves parameters or gradients in every micro-batch, which needs a plan of one stage; "
            f"this plan has {len(allocation.stages)}",
            remedy="plan with --sharding parameters_kept, or optimizer, which move them once a step",
        )
    if allocation.stages[0].dispatch == "round_robin":
        raise UnsupportedRequest(
            f"with sharding {sharding} all replicas work on each micro-batch together, but in this plan replicas take "
            "micro-batches in turn",
            remedy="plan with --sharding parameters_kept, or with replicas that share the rows of a micro-batch",
        )
    replicas = allocation.stages[0].replicas
    fewest = min(rows for rows, _count in row_classes(problem.global_batch_size, allocation.num_micro_batches))
    if fewest < replicas:
        raise UnsupportedRequest(
            f"with sharding {sharding} all {replicas} replicas work on each micro-batch together, but one of this "
            f"plan has rows for only {fewest}",
            remedy="plan with fewer micro-batches, or with --sharding parameters_kept",
        )


def _refuse_stage(problem: Problem, allocation: Allocation, number: int, stage: Stage, batches: int) -> None:
    if len(set(stage.devices)) < stage.replicas:
        names = [problem.devices[d].name for d in stage.devices]
        raise InvalidPlan(f"stage {number} names a device twice: {names}")
    count = (batches - 1) * allocation.num_micro_batches + len(allocation.micro_batches(number))
    if stage.dispatch == "round_robin" and stage.replicas > count:
        raise InvalidPlan(
            f"stage {number} has {stage.replicas} replicas that take turns, but only {count} micro-batches"
        )
    rows = problem.global_batch_size // allocation.num_micro_batches
    if stage.dispatch == "rows" and stage.replicas > rows:
        raise InvalidPlan(
            f"stage {number} has {stage.replicas} replicas for micro-batches of {rows} rows: some would get no row",
            remedy="larger micro-batches, or fewer replicas",
        )

"""What each rank holds and with whom it exchanges what: a program without its instructions.

Replicas i of a stage and j of the next exchange the rows that both hold (DAPPLE, section V-B2: split and concatenate);
under round-robin dispatch those of the micro-batches that are theirs. A direction in which a boundary has no bytes
has no channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.program import Channel, Held, Program
from penstock.solvers.allocation import Allocation, Stage
from penstock.solvers.batching import row_classes, slice_bounds
from penstock.solvers.costs import buckets
from penstock.solvers.problem import Problem

TENSORS_PER_CUT = 64
"""Tags of a channel leave room for so many tensors, or for those of the profile where they are more."""

Rows = tuple[tuple[int, int], ...]


def layouts(problem: Problem, allocation: Allocation) -> list[Program]:
    """One program per used device, without instructions; ranks number the used devices in the order of their index.

    Raises InvalidPlan when a replica would get no row or no micro-batch, or a device holds a stage twice;
    UnsupportedRequest for several pipelines, for tied weights across stages, and for more tags than 2^31.
    """
    _refuse(problem, allocation)
    devices = sorted({device for stage in allocation.stages for device in stage.devices})
    rank_of = {device: rank for rank, device in enumerate(devices)}
    classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
    held: list[list[Held]] = [[] for _ in devices]
    groups = tuple(
        tuple(sorted(rank_of[device] for device in stage.devices)) for stage in allocation.stages if stage.replicas > 1
    )
    for number, stage in enumerate(allocation.stages):
        for one in _replicas(problem, allocation, number, rank_of, classes):
            held[rank_of[stage.devices[one.replica]]].append(one)
    channels = _channels(problem, allocation, rank_of, classes)
    return [
        Program(
            rank=rank,
            world_size=len(devices),
            device=problem.devices[device].name,
            global_batch_size=problem.global_batch_size,
            num_micro_batches=allocation.num_micro_batches,
            row_classes=classes,
            stages=tuple(held[rank]),
            channels=tuple(channels[rank]),
            prologue=(),
            groups=groups,
        )
        for rank, device in enumerate(devices)
    ]


def _refuse(problem: Problem, allocation: Allocation) -> None:
    if len(allocation.pipelines) > 1:
        raise UnsupportedRequest(
            f"the plan has {len(allocation.pipelines)} pipelines; programs are made for one",
            remedy="a plan with one pipeline, whose stages may have replicas",
        )
    count, size = allocation.num_micro_batches, problem.global_batch_size
    if count > size:
        raise InvalidPlan(f"{count} micro-batches of a global batch of {size} samples: some would be empty")
    for name, layers, _ in problem.shared_parameters:
        users = sorted(
            {s for s, stage in enumerate(allocation.stages) for n in layers if stage.first <= n <= stage.last}
        )
        if len(users) > 1:
            raise UnsupportedRequest(
                f"parameter {name!r} is shared by layers {list(layers)}, which stages {users} hold; "
                "tied weights are trained only within one stage",
                remedy="a plan whose cuts keep these layers together, or a model without the tie",
            )
    for s, stage in enumerate(allocation.stages):
        _refuse_stage(problem, allocation, s, stage)


def _refuse_stage(problem: Problem, allocation: Allocation, number: int, stage: Stage) -> None:
    if len(set(stage.devices)) < stage.replicas:
        names = [problem.devices[d].name for d in stage.devices]
        raise InvalidPlan(f"stage {number} names a device twice: {names}")
    count, size = allocation.num_micro_batches, problem.global_batch_size
    if stage.dispatch == "round_robin" and stage.replicas > count:
        raise InvalidPlan(
            f"stage {number} has {stage.replicas} replicas in turn for {count} micro-batches: some would get none"
        )
    if stage.dispatch == "rows" and stage.replicas > size // count:
        raise InvalidPlan(
            f"stage {number} has {stage.replicas} replicas for micro-batches of {size // count} rows: "
            "some would get no row",
            remedy="larger micro-batches, or fewer replicas",
        )


def _replicas(
    problem: Problem, allocation: Allocation, number: int, rank_of: dict[int, int], classes: Rows
) -> Iterator[Held]:
    stage = allocation.stages[number]
    micro_batches = allocation.micro_batches(number)
    group = sum(earlier.replicas > 1 for earlier in allocation.stages[:number]) if stage.replicas > 1 else -1
    parts = tuple((first, last, group) for first, last in _bucket_layers(problem, stage, classes[-1][0]))
    ranks = tuple(rank_of[device] for device in stage.devices)
    for replica in range(stage.replicas):
        yield Held(
            stage=number,
            first=stage.first,
            last=stage.last,
            replica=replica,
            ranks=ranks,
            dispatch=stage.dispatch,
            rows=_slices(stage, replica, classes),
            recompute=stage.recompute,
            previous=allocation.previous(number),
            next=allocation.next(number),
            micro_batches=(micro_batches.start, micro_batches.stop - 1),
            buckets=parts,
            update_every=len(micro_batches),
        )


def _bucket_layers(problem: Problem, stage: Stage, rows: int) -> tuple[tuple[int, int], ...]:
    """The judge's buckets, but covering all layers: the model may have parameters where the profile has none."""
    parts = [(bucket.first, bucket.last) for bucket in buckets(problem, stage, rows)] or [(stage.first, stage.last)]
    parts[-1] = stage.first, parts[-1][1]
    return tuple(parts)


def _slices(stage: Stage, replica: int, classes: Rows) -> Rows:
    if stage.dispatch == "round_robin":
        return tuple((0, rows) for rows, _ in classes)
    return tuple(slice_bounds(rows, stage.replicas, replica) for rows, _ in classes)


def _channels(problem: Problem, allocation: Allocation, rank_of: dict[int, int], classes: Rows) -> list[list[Channel]]:
    """Channels of each rank, by edge, direction, replicas; both ends of an exchange within a rank are neighbours."""
    made: list[list[Channel]] = [[] for _ in rank_of]
    used: dict[tuple[int, int], int] = {}
    for low in range(len(allocation.stages)):
        high = allocation.next(low)
        if high is None:
            continue
        below, above = allocation.stages[low], allocation.stages[high]
        pairs = [
            (i, j, *rows) for i, j in _pairs(below, above, allocation) if (rows := _common(below, i, above, j, classes))
        ]
        for kind, sizes in (("F", problem.forward_bytes), ("B", problem.backward_bytes)):
            if sizes[below.last] == 0:
                continue
            tensors = max(TENSORS_PER_CUT, len(problem.boundary_tensors[below.last]))
            for i, j, rows_below, rows_above in pairs:
                a, b = rank_of[below.devices[i]], rank_of[above.devices[j]]
                ends = [(a, low, high, b, rows_below), (b, high, low, a, rows_above)]
                if kind == "B":
                    ends.reverse()
                key = (ends[0][0], ends[1][0])
                tag = _tag(used, key, allocation.num_micro_batches * tensors)
                for rank, stage, peer_stage, peer, mine in ends:
                    made[rank].append(Channel("F" if kind == "F" else "B", stage, peer_stage, peer, mine, tag))
    return made


def _tag(used: dict[tuple[int, int], int], pair: tuple[int, int], width: int) -> int:
    """The first tag of a channel: tags are unique among the messages from one rank to another; 0 stays free."""
    tag = used.get(pair, 1)
    used[pair] = tag + width
    if tag + width > 2**31:
        raise UnsupportedRequest(
            f"ranks {pair[0]} and {pair[1]} exchange more messages in a step than there are tags (2^31)",
            remedy="fewer micro-batches",
        )
    return tag


def _pairs(below: Stage, above: Stage, allocation: Allocation) -> list[tuple[int, int]]:
    """Replicas that may exchange something; in turn on both sides, those that some micro-batch brings together."""
    if below.dispatch == above.dispatch == "round_robin":
        turns = min(allocation.num_micro_batches, lcm(below.replicas, above.replicas))
        return sorted({(m % below.replicas, m % above.replicas) for m in range(turns)})
    return [(i, j) for i in range(below.replicas) for j in range(above.replicas)]


def _common(below: Stage, i: int, above: Stage, j: int, classes: Rows) -> tuple[Rows, Rows] | None:
    """The rows that replicas i and j both hold, counted within each one's slice; None when no class has any."""
    mine, theirs = [], []
    for (low, high), (other_low, other_high) in zip(
        _slices(below, i, classes), _slices(above, j, classes), strict=True
    ):
        start, end = max(low, other_low), min(high, other_high)
        mine.append((start - low, end - low) if start < end else (0, 0))
        theirs.append((start - other_low, end - other_low) if start < end else (0, 0))
    if not any(end for _, end in mine):
        return None
    return tuple(mine), tuple(theirs)

"""Communicators of a plan's ranks: their number on each device, and their memory.

A rank has one for each directed edge between two devices that messages pass, and one for each group whose collectives
it takes part in (EXECUTOR C.2): the devices that sum a run of layers, the devices that sum a tied parameter, and within
a cell the GPUs that share tensors, sequences or experts. Messages that NCCL cannot carry (``lowering.transports``) have
no communicator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from penstock.solvers.costs.memory import context_bytes
from penstock.solvers.costs.reductions import reduction_groups
from penstock.solvers.costs.ties import tied_stages
from penstock.solvers.costs.transfer import boundary_bytes, row_pairs
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import row_classes
from penstock.solvers.model.problem import Problem


def runtime_bytes(problem: Problem, allocation: Allocation, device: int) -> int:
    """Return the bytes of a device that its runtime and its communicators occupy, which training cannot allocate."""
    return context_bytes(problem, device) + communicator_bytes(problem, allocation).get(device, 0)


@lru_cache(maxsize=64)
def communicator_bytes(problem: Problem, allocation: Allocation) -> dict[int, int]:
    """Return the bytes of communicators by device of an allocation, where there are any; of a cell, one GPU's bytes."""
    used = {device for stage in allocation.stages for device in stage.devices}
    if not any(problem.devices[d].edge_bytes or problem.devices[d].group_bytes for d in used):
        return {}
    if any(any(stage.coded) for stage in allocation.stages):
        return {}
    edges = Counter(device for edge in set(_edges(problem, allocation)) for device in edge)
    groups = Counter(_in_groups(problem, allocation))
    inside = _inside_cells(problem)
    bytes_of = {}
    for d in used:
        device = problem.devices[d]
        bytes_of[d] = edges[d] * device.edge_bytes + (groups[d] + inside) * device.group_bytes
    return bytes_of


def _edges(problem: Problem, allocation: Allocation) -> Iterator[tuple[int, int]]:
    """Yield the (sending device, receiving device) of all messages."""
    classes = row_classes(problem.global_batch_size, allocation.num_micro_batches)
    for s, stage in enumerate(allocation.stages):
        following = allocation.next(s)
        if following is None:
            continue
        target = allocation.stages[following]
        for u, v in _pairs(stage, target, [rows for rows, _count in classes], allocation.micro_batches(s)):
            for direction, edge in ((0, (u, v)), (1, (v, u))):
                if u != v and boundary_bytes(problem, stage.last, 1, direction):
                    yield edge


def _pairs(source: Stage, target: Stage, sizes: list[int], batches: range) -> Iterator[tuple[int, int]]:
    """Yield the devices of two neighbouring stages that hold the same rows of some micro-batch."""
    in_turn = [stage.dispatch == "round_robin" for stage in (source, target)]
    if all(in_turn):
        for m in batches:
            yield source.devices[m % source.replicas], target.devices[m % target.replicas]
    elif any(in_turn):
        yield from ((u, v) for u in source.devices for v in target.devices)
    else:
        yield from ((u, v) for rows in sizes for u, v, _count in row_pairs(source, target, rows))


def _in_groups(problem: Problem, allocation: Allocation) -> Iterator[int]:
    """Yield a device for each group of several GPUs that it is in, other than those within its cell."""
    degrees, size = problem.degrees, len(problem.gpus(0))
    holders = [size // degrees.tensor]
    holders += [size // degrees.expert_group] if degrees.expert_group > 1 else []
    together = [set(group.devices) for group in reduction_groups(allocation)]
    inside = problem.copies is not None or (problem.choice is not None and problem.choice.in_one_stage)
    together = [devices for devices in together if len(devices) > 1 or inside]
    for _name, layers, _size in problem.shared_parameters:
        users = tied_stages(allocation, layers)
        if any(len(stages) > 1 for stages in users):
            together.append({d for stages in users for s in stages for d in allocation.stages[s].devices})
    for devices in together:
        for count in holders:
            if len(devices) * count > 1:
                yield from devices


def _inside_cells(problem: Problem) -> int:
    """Return the number of a GPU's groups within its cell: they share its tensors, its sequences and its experts."""
    degrees = problem.degrees
    return sum(degree > 1 for degree in (degrees.tensor, degrees.context, degrees.expert_group))

"""``spread``: one pipeline over thousands of devices, stages of any number of replicas along the network's tree.

A partition for what a device is worth takes a fraction of a second for a thousand layers, however many devices there
are (``partition.py``); those with the least estimates go to the judge first, under the usual warm-ups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import NamedTuple

from penstock.solvers.grid.block_partition import thinnest
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import Batch, candidates, dapple_replicas
from penstock.solvers.model.network import MAX_DENSE_DEVICES
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.many_devices.device_line import line_of
from penstock.solvers.planners.many_devices.partition import IDLE, Partitions
from penstock.solvers.planners.many_devices.stage_costs import Pieces, replica_choices
from penstock.solvers.planners.proposal import Proposal, under
from penstock.solvers.planners.setting import Setting

BATCHES = 6
"""Numbers of micro-batches that are looked into, the most promising first; a few seconds on thousands of devices."""
BETWEEN, MOST_CLOSE = 0.75, 256
"""A further share of idling, tried last, for more devices than that: memory that holds some of the stages in full."""


class _Found(NamedTuple):
    estimate_ns: int
    allocation: Allocation


def proposals(setting: Setting, _options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the first partition as soon as there is one, then the best of each share of idling, the second best, …

    Where nothing fits, the most stages and the smallest micro-batches, for the judge to say what is lacking.
    """
    problem = setting.problem
    line = line_of(problem)
    batches = sorted(_batches(problem), key=lambda batch: _promise(problem, batch))[:BATCHES]
    every: list[Partitions] = []
    found: dict[float, list[_Found]] = {idle: [] for idle in IDLE}
    first = True
    for batch in batches:
        partitions = Partitions(Pieces(problem, batch, line))
        every.append(partitions)
        for idle, own in found.items():
            known = len(own)
            for split in partitions.splits(idle):
                if setting.deadline.passed:
                    return
                own.append(_Found(split.estimate_ns, partitions.allocation(split)))
                if first:
                    yield _proposal(problem, own[0].allocation)
                    first = False
            if len(own) == known:
                break  # what memory cannot hold at one share it mostly cannot at another
    for turn in zip_longest(*(sorted(own, key=lambda each: each.estimate_ns) for own in found.values())):
        for one in filter(None, turn):
            yield _proposal(problem, one.allocation)
    if problem.num_devices > MOST_CLOSE:
        for partitions in every:
            for split in partitions.splits(BETWEEN):
                yield _proposal(problem, partitions.allocation(split))
    if first:
        yield from (_proposal(problem, allocation) for allocation in thinnest(problem)[:1])


def _proposal(problem: Problem, allocation: Allocation) -> Proposal:
    policy = "best" if problem.num_devices <= MAX_DENSE_DEVICES else "near"
    return under(problem, allocation, ("early-backward",), policy)


def _batches(problem: Problem) -> tuple[Batch, ...]:
    return tuple({*candidates(problem), *candidates(problem, dapple_replicas(problem))})


def _promise(problem: Problem, batch: Batch) -> tuple[int, int]:
    """The least work that slices leave, shared by all devices, and the way of a micro-batch in the smallest slices."""
    replicas = replica_choices(problem, batch)
    times = []
    for count in replicas.tolist():
        costs = problem.costs(problem.devices[0].kind, -(-batch.most_rows // count))
        times.append(int(costs.forward_ns[-1] + costs.backward_ns[-1]))
    work = min(count * time for count, time in zip(replicas.tolist(), times, strict=True))
    return work * batch.num_micro_batches // problem.num_devices + times[-1], batch.num_micro_batches

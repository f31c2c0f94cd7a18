"""``spread``: one pipeline over thousands of devices, stages of any number of replicas along the network's tree.

A partition at one price of a device takes a fraction of a second for a thousand layers, for any number of devices
(``partition.py``). The partitions with the least estimates are simulated first, under the usual warm-ups.
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
"""Number of micro-batch counts that are searched, the most promising first; a few seconds on thousands of devices."""
BETWEEN, MOST_CLOSE = 0.75, 256
"""A further share of idling, tried last, and the number of devices above which it is tried.

It is for memory that holds some of the stages in full.
"""


class _Candidate(NamedTuple):
    estimate_ns: int
    allocation: Allocation


def proposals(setting: Setting, _options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield the first partition as soon as it is there, then the best of each share of idling, the second best, …

    Where nothing fits, yield the plan with the most stages and the smallest micro-batches, so that the simulator
    reports what is lacking.
    """
    problem = setting.problem
    line = line_of(problem)
    batches = sorted(_batches(problem), key=lambda batch: _promise(problem, batch))[:BATCHES]
    every: list[Partitions] = []
    by_idle: dict[float, list[_Candidate]] = {idle: [] for idle in IDLE}
    first = True
    for batch in batches:
        partitions = Partitions(Pieces(problem, batch, line))
        every.append(partitions)
        for idle, of_share in by_idle.items():
            before = len(of_share)
            for split in partitions.splits(idle):
                if setting.deadline.passed:
                    return
                of_share.append(_Candidate(split.estimate_ns, partitions.allocation(split)))
                if first:
                    yield _proposal(problem, of_share[0].allocation)
                    first = False
            if len(of_share) == before:
                break  # what memory cannot hold at one share it mostly cannot at another
    for turn in zip_longest(*(sorted(of_share, key=lambda each: each.estimate_ns) for of_share in by_idle.values())):
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
    """Return a batch's sort key: the smaller, the more promising.

    It adds the least work under any number of replicas, shared by all devices, and the time of a micro-batch in the
    smallest slices.
    """
    replicas = replica_choices(problem, batch)
    times = []
    for count in replicas.tolist():
        costs = problem.costs(problem.devices[0].kind, -(-batch.most_rows // count))
        times.append(int(costs.forward_ns[-1] + costs.backward_ns[-1]))
    work = min(count * time for count, time in zip(replicas.tolist(), times, strict=True))
    return work * batch.num_micro_batches // problem.num_devices + times[-1], batch.num_micro_batches

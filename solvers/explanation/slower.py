"""GPUs of several kinds that run the same operations: the quicker ones wait for the slowest in each of them.

The simulator's operations last as long as on the slowest kind. A quicker kind waits for the difference between the two
kinds' computing times of a micro-batch, on each stage that its devices hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.solvers.costs.stage import slice_costs, stage_costs, stage_rows
from penstock.solvers.degrees.contract import replicas_apart
from penstock.solvers.explanation.run import JudgedRun
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.problem import Device, Problem


class Kind(NamedTuple):
    """The GPUs of one kind among some devices, and how long they wait for slower ones in each of a stage's passes.

    ``shares``: the waiting fraction of the time of a stage's operations, by the number of the stage.
    """

    devices: tuple[int, ...]
    gpus: tuple[Device, ...]
    shares: dict[int, float]


def kinds_of(run: JudgedRun, devices: Sequence[int]) -> list[Kind]:
    """Return the kinds of some devices that run the same rows, in the order of their first devices."""
    problem, alike = run.problem, set(devices)
    gpus = tuple(gpu for device in devices for gpu in problem.gpus(device))
    if len({gpu.kind for gpu in gpus}) == 1:
        return [Kind(tuple(devices), gpus, {})]
    stages = {s: stage for s, stage in enumerate(run.allocation.stages) if not alike.isdisjoint(stage.devices)}
    in_one_stage = problem.choice is not None and problem.choice.in_one_stage
    apart = replicas_apart(problem) if in_one_stage else problem
    members: dict[str, list[int]] = {}
    for member in range(apart.num_devices) if in_one_stage else devices:
        members.setdefault(apart.devices[member].kind, []).append(member)
    rows = most_rows(problem, run.allocation)
    shares = {s: _shares(problem, apart, stage, tuple(members), rows) for s, stage in stages.items()}
    return [
        Kind(
            tuple(devices) if in_one_stage else tuple(those),
            tuple(gpu for member in those for gpu in apart.gpus(member)),
            {s: share[kind] for s, share in shares.items()},
        )
        for kind, those in members.items()
    ]


def _shares(problem: Problem, apart: Problem, stage: Stage, kinds: Sequence[str], rows: int) -> dict[str, float]:
    """Return the part of a stage's passes in which each kind waits for the slowest one."""
    share = stage_rows(stage, rows)
    whole_ns = stage_costs(problem, stage, rows).passes_ns
    own_ns = {kind: slice_costs(apart, stage, kind, share).passes_ns for kind in kinds}
    slowest_ns = max(own_ns.values())
    return {kind: (slowest_ns - own_ns[kind]) / max(1, whole_ns, slowest_ns) for kind in kinds}

"""Devices that hold several parts of the model: in a loop (part c p + r on rank r), or in a V.

A *rank* is a group of devices that hold the same stages, here called its chunks; p ranks hold v chunks each. In a V
the model goes down the ranks and back up: rank r holds stages r and 2 p - 1 - r.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.schedule import Orders, Row


class Ranks(NamedTuple):
    """The ranks; ``stages[r]``: the stage numbers of rank r's chunks, ascending, on ``devices[r]``."""

    stages: tuple[tuple[int, ...], ...]
    devices: tuple[tuple[int, ...], ...]

    def orders(self, name: str, rows: Iterable[Sequence[Sequence[int]] | np.ndarray]) -> Orders:
        """Return the orders; ``rows[r]`` are rank r's operations: (kind, stage, micro-batch)."""
        operations = [np.asarray(row, dtype=np.int32).reshape(-1, 3) for row in rows]
        return Orders(name, tuple(Row(devices, row) for devices, row in zip(self.devices, operations, strict=True)))


def looped(allocation: Allocation, name: str, least: int = 1) -> Ranks:
    """Return the ranks of stages that lie in a loop, at least ``least`` chunks on each.

    Raises ``UnsupportedRequest`` for any other allocation; ``name`` is the schedule that needs the loop.
    """
    stages = allocation.stages
    ranks = len({stage.devices for stage in stages})
    chunks = len(stages) // ranks
    result = Ranks(
        tuple(tuple(range(r, len(stages), ranks)) for r in range(ranks)), tuple(s.devices for s in stages[:ranks])
    )
    if len(stages) % ranks or chunks < least or not _are_ranks(allocation, result):
        raise UnsupportedRequest(
            f"schedule {name!r} needs stages in a loop: stage c p + r on the devices of stage r, for p groups of "
            f"devices without a device in common, {least} or more stages on each, one pipeline, replicas that split "
            "each micro-batch",
            remedy="planner 'interleaved', which makes such plans",
        )
    return result


def in_line(allocation: Allocation, name: str) -> Ranks:
    """Return the ranks of stages on separate devices.

    Raises ``UnsupportedRequest`` for any other allocation; ``name`` is the schedule that needs the line.
    """
    stages = allocation.stages
    result = Ranks(tuple((s,) for s in range(len(stages))), tuple(stage.devices for stage in stages))
    if not _are_ranks(allocation, result):
        raise UnsupportedRequest(
            f"schedule {name!r} needs one pipeline of stages on separate devices, with replicas that split each "
            "micro-batch",
            remedy="planner 'zero-bubble', which makes such plans",
        )
    return result


def v_shaped(allocation: Allocation, name: str) -> Ranks:
    """Return the ranks of 2 p stages that lie in a V.

    Raises ``UnsupportedRequest`` for any other allocation; ``name`` is the schedule that needs the V.
    """
    stages = allocation.stages
    ranks, last = len(stages) // 2, len(stages) - 1
    result = Ranks(tuple((r, last - r) for r in range(ranks)), tuple(s.devices for s in stages[:ranks]))
    if len(stages) % 2 or not _are_ranks(allocation, result):
        raise UnsupportedRequest(
            f"schedule {name!r} needs stages in a V: 2 p of them, stage 2 p - 1 - r on the devices of stage r, for p "
            "groups of devices without a device in common, one pipeline, replicas that split each micro-batch",
            remedy="planner 'zero-bubble', which makes such plans",
        )
    return result


def ranks_of(allocation: Allocation) -> Ranks:
    """Return the ranks of one pipeline, in the order of their first stages.

    Raises ``UnsupportedRequest`` where devices share some of their stages only, and for stages in turn.
    """
    stages_on: dict[tuple[int, ...], list[int]] = {}
    for s, stage in enumerate(allocation.stages):
        stages_on.setdefault(stage.devices, []).append(s)
    result = Ranks(tuple(tuple(stages) for stages in stages_on.values()), tuple(stages_on))
    if not _are_ranks(allocation, result):
        raise UnsupportedRequest(
            "this schedule needs one pipeline, replicas that split each micro-batch, and devices that hold the same "
            "stages or no common stage",
            remedy="planner 'zero-bubble', which makes such plans",
        )
    return result


def _are_ranks(allocation: Allocation, ranks: Ranks) -> bool:
    used = [device for devices in ranks.devices for device in devices]
    apart = len(set(used)) == len(used) and len(allocation.pipelines) == 1
    return apart and all(
        allocation.stages[s].devices == devices and (allocation.stages[s].dispatch == "rows" or len(devices) == 1)
        for chunks, devices in zip(ranks.stages, ranks.devices, strict=True)
        for s in chunks
    )

"""Which devices hold several parts of the model, and how: in a loop (part c p + r on rank r), or in a V.

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
    """``stages[r]``: the stage numbers of rank r's chunks, ascending; ``devices[r]`` hold them."""

    stages: tuple[tuple[int, ...], ...]
    devices: tuple[tuple[int, ...], ...]

    def orders(self, name: str, rows: Iterable[Sequence[Sequence[int]] | np.ndarray]) -> Orders:
        """Return the orders; ``rows[r]`` are rank r's operations: (kind, stage, micro-batch)."""
        made = [np.asarray(row, dtype=np.int32).reshape(-1, 3) for row in rows]
        return Orders(name, tuple(Row(devices, row) for devices, row in zip(self.devices, made, strict=True)))


def looped(allocation: Allocation, name: str, least: int = 1) -> Ranks:
    """Return the ranks of stages that lie in a loop, at least ``least`` chunks on each.

    Raises ``UnsupportedRequest`` for any other allocation; ``name`` is the schedule that asks.
    """
    stages = allocation.stages
    ranks = len({stage.devices for stage in stages})
    chunks = len(stages) // ranks
    found = Ranks(
        tuple(tuple(range(r, len(stages), ranks)) for r in range(ranks)), tuple(s.devices for s in stages[:ranks])
    )
    if len(stages) % ranks or chunks < least or not _held(allocation, found):
        raise UnsupportedRequest(
            f"schedule {name!r} needs stages in a loop: stage c p + r on the devices of stage r, for p groups of "
            f"devices without a device in common, {least} or more stages on each, replicas sharing rows, one pipeline",
            remedy="planner 'interleaved', which makes such plans",
        )
    return found


def in_line(allocation: Allocation, name: str) -> Ranks:
    """Return the ranks of stages that have devices of their own.

    Raises ``UnsupportedRequest`` for any other allocation; ``name`` is the schedule that asks.
    """
    stages = allocation.stages
    found = Ranks(tuple((s,) for s in range(len(stages))), tuple(stage.devices for stage in stages))
    if not _held(allocation, found):
        raise UnsupportedRequest(
            f"schedule {name!r} needs stages with devices of their own, replicas sharing rows, one pipeline",
            remedy="planner 'zero-bubble', which makes such plans",
        )
    return found


def v_shaped(allocation: Allocation, name: str) -> Ranks:
    """Return the ranks of 2 p stages that lie in a V.

    Raises ``UnsupportedRequest`` for any other allocation; ``name`` is the schedule that asks.
    """
    stages = allocation.stages
    ranks, last = len(stages) // 2, len(stages) - 1
    found = Ranks(tuple((r, last - r) for r in range(ranks)), tuple(s.devices for s in stages[:ranks]))
    if len(stages) % 2 or not _held(allocation, found):
        raise UnsupportedRequest(
            f"schedule {name!r} needs stages in a V: 2 p of them, stage 2 p - 1 - r on the devices of stage r, for p "
            "groups of devices without a device in common, replicas sharing rows, one pipeline",
            remedy="planner 'zero-bubble', which makes such plans",
        )
    return found


def ranks_of(allocation: Allocation) -> Ranks:
    """Return the ranks of one pipeline, in the order of their first stages.

    Raises ``UnsupportedRequest`` where devices share some of their stages only, and for stages in turn.
    """
    held: dict[tuple[int, ...], list[int]] = {}
    for s, stage in enumerate(allocation.stages):
        held.setdefault(stage.devices, []).append(s)
    found = Ranks(tuple(tuple(stages) for stages in held.values()), tuple(held))
    if not _held(allocation, found):
        raise UnsupportedRequest(
            "this schedule needs devices that hold the same stages or none in common, replicas sharing rows, one "
            "pipeline",
            remedy="planner 'zero-bubble', which makes such plans",
        )
    return found


def _held(allocation: Allocation, ranks: Ranks) -> bool:
    used = [device for devices in ranks.devices for device in devices]
    apart = len(set(used)) == len(used) and len(allocation.pipelines) == 1
    return apart and all(
        allocation.stages[s].devices == devices and (allocation.stages[s].dispatch == "rows" or len(devices) == 1)
        for chunks, devices in zip(ranks.stages, ranks.devices, strict=True)
        for s in chunks
    )

"""``Orders``: the order in which each device runs its operations in one flushed step; ``Pattern``: a steady state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.schemas.program import KINDS

STEP = len(KINDS)
"""Kind of an optimizer step that stands in a row; its micro-batch is the last one of the round that it applies."""


@dataclass(frozen=True, eq=False)
class Row:
    """Devices that run the same operations in the same order.

    ``operations`` is int32 of shape (n, 3): kind (``schemas.program.KINDS`` index, or ``STEP``), stage number,
    micro-batch.
    """

    devices: tuple[int, ...]
    operations: np.ndarray


@dataclass(frozen=True, eq=False)
class Orders:
    """One step, flushed; each device that holds a stage is in exactly one row.

    Without ``update_every`` each stage steps once, after everything. With it (unrolled patterns only) stage s steps
    after every ``update_every[s]`` micro-batches, where its row says so.
    """

    name: str
    rows: tuple[Row, ...]
    warmup: tuple[int, ...] = ()
    update_every: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PatternOperation:
    """One operation of a period of q micro-batches: in period k it works on (k - shift) q + ``micro_batch``."""

    kind: int
    stage: int
    start_ns: int
    shift: int
    micro_batch: int = 0


@dataclass(frozen=True)
class Pattern:
    """A period, the micro-batches it takes in, and the start and shift of each operation.

    The starts determine the order of a device's operations (``unroll``); their actual times are simulated.
    """

    name: str
    period_ns: int
    micro_batches_per_period: int
    operations: tuple[PatternOperation, ...]


Schedule = Orders | Pattern


def kinds_of(schedule: Schedule) -> set[int]:
    """Return the kinds of operations that a schedule has."""
    if isinstance(schedule, Orders):
        return {kind for row in schedule.rows for kind in np.unique(row.operations[:, 0]).tolist()}
    return {operation.kind for operation in schedule.operations}

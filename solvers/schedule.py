"""``Orders``: in which order each device runs its operations in one flushed step; ``Pattern``: a steady state."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Row:
    """Devices that run the same operations in the same order.

    ``operations`` is int32 of shape (n, 3): kind (``schemas.program.KINDS`` index), stage number, micro-batch.
    """

    devices: tuple[int, ...]
    operations: np.ndarray


@dataclass(frozen=True, eq=False)
class Orders:
    """One step, flushed; each device that holds a stage is in exactly one row."""

    name: str
    rows: tuple[Row, ...]
    warmup: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PatternOperation:
    """One operation of a period; it works on the micro-batch that entered ``shift`` periods ago."""

    kind: int
    stage: int
    start_ns: int
    shift: int


@dataclass(frozen=True)
class Pattern:
    """A period, the micro-batches it takes in, and the start and shift of each operation."""

    name: str
    period_ns: int
    micro_batches_per_period: int
    operations: tuple[PatternOperation, ...]


Schedule = Orders | Pattern

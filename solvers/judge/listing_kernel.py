"""Ends of operations, rounds and transfers, from what the clock kernels return; micro-batches in flight."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, WEIGHT
from penstock.solvers.compiled.decorators import compiled
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.judge.operation_tables import DURATION, LINES
from penstock.solvers.model.schedule import STEP

never_negative(__name__)

KINDS = STEP + 1


@compiled
def operation_ends(row: np.ndarray, table: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return each operation's start plus its duration."""
    end = np.empty_like(start)
    for i in range(start.size):
        end[i] = start[i] + table[row[i], DURATION]
    return end


@compiled
def gradient_ends(lanes: Any, start: np.ndarray, batches: int, rounds: int) -> np.ndarray:
    """Return the latest end of a gradient operation of each global batch of ``batches`` micro-batches."""
    latest = np.zeros(rounds, dtype=np.int64)
    for i in range(start.size):
        kind, t = lanes.row[i] // 2 % KINDS, lanes.batch[i] // batches
        if kind in (BACKWARD, WEIGHT):
            latest[t] = max(latest[t], start[i] + lanes.table[lanes.row[i], DURATION])
    return latest


@compiled
def most_in_flight(lanes: Any) -> np.ndarray:
    """Return, by slot, the most micro-batches between their F and the end of their gradient, in the row's order."""
    now = np.zeros(lanes.slot_lane.size, dtype=np.int64)
    most = np.zeros_like(now)
    for i in range(lanes.row.size):
        slot, kind = lanes.row[i] // LINES, lanes.row[i] // 2 % KINDS
        if kind == FORWARD:
            now[slot] += 1
            most[slot] = max(most[slot], now[slot])
        elif kind in (BACKWARD, WEIGHT):
            now[slot] -= 1
    return most


@compiled
def transfer_list(flows: Any, sent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return stage, direction and end of every transfer, flow by flow in the order of sending."""
    stage = np.empty(sent.size, dtype=np.int32)
    direction = np.empty(sent.size, dtype=np.int8)
    end = np.empty_like(sent)
    for flow in range(flows.flow_ns.size):
        s, way, takes = flows.flow_stage[flow], flows.flow_direction[flow], flows.flow_ns[flow]
        for k in range(flows.flow_offset[flow], flows.flow_offset[flow + 1]):
            stage[k], direction[k], end[k] = s, way, sent[k] + takes
    return stage, direction, end

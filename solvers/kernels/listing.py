"""Ends of operations and the list of transfers, from what the clock kernels return."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.kernels.compiled import compiled


@compiled
def operation_ends(flows: Any, lanes: Any, start: np.ndarray) -> np.ndarray:
    """Each operation's start plus its duration."""
    end = np.empty_like(start)
    for lane in range(lanes.lane_start.size - 1):
        for i in range(lanes.lane_start[lane], lanes.lane_start[lane + 1]):
            slot = lanes.slot_of[lane, lanes.operations[i, 1]]
            c = 1 if lanes.operations[i, 2] >= flows.cut else 0
            end[i] = start[i] + lanes.duration_ns[(slot * 5 + lanes.operations[i, 0]) * 2 + c]
    return end


@compiled
def transfer_list(flows: Any, sent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(stage, direction, micro-batch, end) of every transfer, in the order of flows and micro-batches."""
    stage = np.empty(sent.size, dtype=np.int32)
    direction = np.empty(sent.size, dtype=np.int8)
    micro_batch = np.empty(sent.size, dtype=np.int32)
    end = np.empty_like(sent)
    for flow in range(flows.flow_ns.size):
        offset = flows.flow_offset[flow]
        for at in range(offset, flows.flow_offset[flow + 1]):
            stage[at] = flows.flow_stage[flow]
            direction[at] = flows.flow_direction[flow]
            micro_batch[at] = flows.flow_first[flow] + at - offset
            end[at] = sent[at] + flows.flow_ns[flow]
    return stage, direction, micro_batch, end

"""Ends of operations and the list of transfers, from what the clock kernels return."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.kernels.compiled import compiled


@compiled
def operation_ends(row: np.ndarray, table: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Each operation's start plus its duration (column 0)."""
    end = np.empty_like(start)
    for i in range(start.size):
        end[i] = start[i] + table[row[i], 0]
    return end


@compiled
def transfer_list(flows: Any, sent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(stage, direction, end) of every transfer, flow by flow in the order of sending."""
    stage = np.empty(sent.size, dtype=np.int32)
    direction = np.empty(sent.size, dtype=np.int8)
    end = np.empty_like(sent)
    for flow in range(flows.flow_ns.size):
        low, high = flows.flow_offset[flow], flows.flow_offset[flow + 1]
        stage[low:high] = flows.flow_stage[flow]
        direction[low:high] = flows.flow_direction[flow]
        end[low:high] = sent[low:high] + flows.flow_ns[flow]
    return stage, direction, end

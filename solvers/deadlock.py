"""Why lanes wait for ever, as a sentence."""

from __future__ import annotations

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from penstock.solvers.lanes import Lanes
from penstock.solvers.schedule import STEP
from penstock.solvers.tables import Tables


def deadlock(tables: Tables, lanes: Lanes, position: np.ndarray) -> str:
    """Follow who waits for whom from the first blocked lane into the circle, and name two lanes on it."""
    arrays = lanes.arrays
    lane = int(np.flatnonzero(position < arrays.lane_start[1:])[0])
    path: list[int] = []
    while lane not in path:
        path.append(lane)
        lane = _waits_for(tables, lanes, position, lane)
    first, second = lane, _waits_for(tables, lanes, position, lane)
    return (
        f"The schedule deadlocks: {_next_operation(tables, lanes, position, first)}, "
        f"while {_next_operation(tables, lanes, position, second)}."
    )


def _waits_for(tables: Tables, lanes: Lanes, position: np.ndarray, lane: int) -> int:
    """The lane that has not yet run the operation whose result the lane's next operation needs."""
    arrays = lanes.arrays
    kind, s, m = (int(v) for v in lanes.rows[lane][position[lane] - arrays.lane_start[lane]])
    source = s if kind == STEP else int(tables.flows.previous[s] if kind == FORWARD else tables.flows.next[s])
    kinds = {FORWARD: (FORWARD,), STEP: (BACKWARD, INPUT, WEIGHT)}.get(kind, (BACKWARD, INPUT))
    first = m - int(tables.chains.every[s]) + 1 if kind == STEP else m
    for slot in range(int(arrays.slot_start[source]), int(arrays.slot_start[source + 1])):
        other = int(arrays.slot_lane[slot])
        rest = lanes.rows[other][position[other] - arrays.lane_start[other] :]
        wanted = np.isin(rest[:, 0], kinds) & (rest[:, 1] == source) & (first <= rest[:, 2]) & (rest[:, 2] <= m)
        if wanted.any():
            return other
    raise AssertionError("a blocked lane waits for an operation that has run")


def _next_operation(tables: Tables, lanes: Lanes, position: np.ndarray, lane: int) -> str:
    kind, s, m = (int(v) for v in lanes.rows[lane][position[lane] - lanes.arrays.lane_start[lane]])
    name = tables.problem.devices[lanes.devices[lane][0]].name
    if kind == STEP:
        return f"{name} waits in the optimizer step of stage {s} for its reduction after micro-batch {m}"
    source = int(tables.flows.previous[s] if kind == FORWARD else tables.flows.next[s])
    return f"{name} waits in {KINDS[kind]}{m} of stage {s} for {KINDS[kind]}{m} of stage {source}"

"""A sentence that explains a deadlock of lanes."""

from __future__ import annotations

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, WEIGHT
from penstock.solvers.judge.lanes import Lanes
from penstock.solvers.judge.operation_tables import Tables
from penstock.solvers.model.schedule import STEP


def deadlock(tables: Tables, lanes: Lanes, position: np.ndarray) -> str:
    """Follow the wait-for relation from the first blocked lane into the cycle, and name two lanes on it."""
    blocked = _Blocked(tables, lanes, position)
    lane = int(np.flatnonzero(position < lanes.arrays.lane_start[1:])[0])
    path: list[int] = []
    while lane not in path:
        path.append(lane)
        lane = blocked.waits_for(lane)
    first, second = lane, blocked.waits_for(lane)
    return f"The schedule deadlocks: {blocked.next_operation(first)}, while {blocked.next_operation(second)}."


class _Blocked:
    """Lanes that are blocked at ``position``."""

    def __init__(self, tables: Tables, lanes: Lanes, position: np.ndarray) -> None:
        self.tables, self.lanes, self.position = tables, lanes, position

    def _rest(self, lane: int) -> np.ndarray:
        """Return the operations that a lane has not run; it waits at the first of them."""
        return self.lanes.rows[lane][self.position[lane] - self.lanes.arrays.lane_start[lane] :]

    def waits_for(self, lane: int) -> int:
        """Return the lane that has not run what this lane's next operation needs, or has not reached its tie."""
        kind, s, m = (int(v) for v in self._rest(lane)[0])
        blocker = self._producer(lane)
        if blocker is None and kind == STEP:
            blocker = self._missing_at_ties(lane, s, m)
        assert blocker is not None, "a blocked lane waits for an operation that has run"
        return blocker

    def _producer(self, lane: int) -> int | None:
        """Return the lane that has not yet run the operation whose result this lane's next operation needs."""
        arrays, flows = self.lanes.arrays, self.tables.flows
        kind, s, m = (int(v) for v in self._rest(lane)[0])
        source = s if kind == STEP else int(flows.previous[s] if kind == FORWARD else flows.next[s])
        kinds = {FORWARD: (FORWARD,), STEP: (BACKWARD, INPUT, WEIGHT)}.get(kind, (BACKWARD, INPUT))
        first = m - int(self.tables.chains.every[s]) + 1 if kind == STEP else m
        for slot in range(int(arrays.slot_start[source]), int(arrays.slot_start[source + 1])):
            other = int(arrays.slot_lane[slot])
            rest = self._rest(other)
            wanted = np.isin(rest[:, 0], kinds) & (rest[:, 1] == source) & (first <= rest[:, 2]) & (rest[:, 2] <= m)
            if wanted.any():
                return other
        return None

    def _missing_at_ties(self, lane: int, s: int, m: int) -> int | None:
        """Return a lane that has not reached a tie which the step of stage ``s`` after micro-batch ``m`` waits for.

        It is one whose step is not next; else one that waits there for its buckets, or for an earlier tie.
        """
        arrays, late = self.lanes.arrays, []
        slot = int(arrays.slot_of[lane, s])
        for k in arrays.halt_tie[arrays.halt_start[slot] : arrays.halt_start[slot + 1]].tolist():
            for other_slot in arrays.tie_halt[arrays.tie_start[k] : arrays.tie_start[k + 1]].tolist():
                other = int(arrays.slot_lane[other_slot])
                if other == lane:
                    continue
                place = self._place_of_step(other, self.lanes.slot_stage[other_slot], m)
                if place > 0:
                    return other
                if place == 0 and (
                    self._producer(other) is not None or arrays.halt_tie[arrays.halt_start[other_slot]] < k
                ):
                    late.append(other)
        return late[0] if late else None

    def _place_of_step(self, lane: int, stage: int, m: int) -> int:
        """Return the index, among a lane's remaining operations, of the step of micro-batch ``m``'s round; -1: done."""
        rest = self._rest(lane)
        matches = (rest[:, 0] == STEP) & (rest[:, 1] == stage) & (rest[:, 2] == m)
        return int(np.argmax(matches)) if matches.any() else -1

    def next_operation(self, lane: int) -> str:
        """Return where a lane waits, in words."""
        kind, s, m = (int(v) for v in self._rest(lane)[0])
        name = self.tables.problem.devices[self.lanes.devices[lane][0]].name
        if kind == STEP:
            what = "its reduction" if self._producer(lane) is not None else "the sum of a tied parameter"
            return f"{name} waits in the optimizer step of stage {s} for {what} after micro-batch {m}"
        source = int(self.tables.flows.previous[s] if kind == FORWARD else self.tables.flows.next[s])
        return f"{name} waits in {KINDS[kind]}{m} of stage {s} for {KINDS[kind]}{m} of stage {source}"

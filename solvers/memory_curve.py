"""What each device holds at every moment of a judged step, its peak, and when it communicates without computing.

ALGORITHMS 1.7 with the rules of ``simulate``: the curve is exact for the times that the judge found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.kernels.memory import NEVER, Rows, Streams, lane_communication, lane_memory
from penstock.solvers.lanes import Lanes, Times
from penstock.solvers.memory import Static
from penstock.solvers.tables import StageMemory, Tables
from penstock.solvers.timeline import Breakdown, Interval

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """Memory of every device of one judged step, computed when asked for."""

    tables: Tables
    lanes: Lanes
    times: Times
    updates: tuple[Interval, ...]
    operation_bytes: np.ndarray
    gradients: np.ndarray

    @classmethod
    def of(cls, tables: Tables, lanes: Lanes, times: Times, updates: tuple[Interval, ...]) -> MemoryProfile:
        """``updates`` by slot."""
        return cls(
            tables,
            lanes,
            times,
            updates,
            operation_bytes=_operation_bytes(tables, lanes),
            gradients=np.asarray(
                [
                    tables.static[s].gradients if first >= 0 else 0
                    for s, first in zip(lanes.slot_stage, lanes.arrays.first_gradient.tolist(), strict=True)
                ],
                dtype=np.int64,
            ),
        )

    def curve(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, bytes) of a device, int64: bytes from each time on, beginning at 0."""
        lane = self._lane(device)
        streams = self._streams(lane)
        length = 2 * self._length(lane) + len(self.lanes.slots[lane]) + 1 + int((streams.stop - streams.first).sum())
        curve = (np.empty(length, dtype=np.int64), np.empty(length, dtype=np.int64))
        written, _peak = self._run(lane, streams, curve)
        return curve[0][:written].copy(), curve[1][:written] + self.tables.problem.devices[device].context_bytes

    def peak(self, lane: int) -> Breakdown:
        """The first peak of a lane's devices, without their contexts."""
        _written, (gradients, kept, buffers, workspace) = self._run(lane, self._streams(lane), (_NOTHING, _NOTHING))
        held = self._static(lane)
        return Breakdown(
            parameters=sum(each.parameters for each in held),
            gradients=int(gradients),
            optimizer=sum(each.optimizer for each in held),
            versions=0,
            activations=int(kept),
            buffers=int(buffers),
            workspace=int(workspace),
            context=0,
        )

    def communication_ns(self, lane: int, reductions: Sequence[Interval], makespan_ns: int) -> int:
        """Time in which a lane does not compute while one of its transfers or reductions runs."""
        slots = self.lanes.slots[lane]
        stages = {self.lanes.slot_stage[slot] for slot in slots}
        own = sorted((r.start_ns, r.end_ns) for r in reductions if r.stage in stages)
        spans = sorted((self.updates[slot].start_ns, self.updates[slot].end_ns) for slot in slots)
        spans.append((makespan_ns, makespan_ns))
        begin, stop = self.lanes.bounds(lane)
        cut = self.tables.flows.cut
        rows, streams = self._rows(lane, []), self._streams(lane)
        return int(lane_communication(rows, streams, self.times, begin, stop, cut, _pairs(own), _pairs(spans)))

    def _run(self, lane: int, streams: Streams, curve: tuple[np.ndarray, np.ndarray]) -> tuple[int, np.ndarray]:
        slots = self.lanes.slots[lane]
        freed = sorted((self.updates[slot].end_ns, int(self.gradients[slot])) for slot in slots)
        static = sum(each.parameters + each.optimizer for each in self._static(lane))
        begin, stop = self.lanes.bounds(lane)
        cut = self.tables.flows.cut
        written, peak = lane_memory(
            self._rows(lane, [*freed, (NEVER, 0)]), streams, self.times, begin, stop, cut, static, curve
        )
        return int(written), peak

    def _length(self, lane: int) -> int:
        begin, stop = self.lanes.bounds(lane)
        return stop - begin

    def _rows(self, lane: int, steps: list[tuple[int, int]]) -> Rows:
        arrays = self.lanes.arrays
        return Rows(
            operations=arrays.operations,
            slot_of=arrays.slot_of[lane],
            duration=arrays.duration_ns,
            size=self.operation_bytes,
            first_gradient=arrays.first_gradient,
            gradients=self.gradients,
            steps=_pairs(steps),
        )

    def _static(self, lane: int) -> list[Static]:
        return [self.tables.static[self.lanes.slot_stage[slot]] for slot in self.lanes.slots[lane]]

    def _lane(self, device: int) -> int:
        return next(lane for lane, devices in enumerate(self.lanes.devices) if device in devices)

    def _streams(self, lane: int) -> Streams:
        """Receive buffers appear when a transfer starts, send buffers vanish when it ends."""
        flows, arrays = self.tables.flows, self.lanes.arrays
        found = []
        for slot in self.lanes.slots[lane]:
            s = self.lanes.slot_stage[slot]
            turn = (int(arrays.slot_replica[slot]), int(arrays.slot_replicas[slot]))
            for sender, direction in ((int(flows.previous[s]), 0), (int(flows.next[s]), 1), (s, 0), (s, 1)):
                if sender < 0:
                    continue
                for c, held in enumerate(self.tables.memory[s]):
                    flow = int(flows.flow_of[(sender * 2 + direction) * 2 + c])
                    if flow < 0:
                        continue
                    size, delay = (held.received_input, held.received_gradient)[direction], 0
                    if sender == s:
                        size, delay = -(held.sent_output, held.sent_gradient)[direction], int(flows.flow_ns[flow])
                    first, stop = int(flows.flow_offset[flow]), int(flows.flow_offset[flow + 1])
                    place = first - int(flows.flow_first[flow])
                    found.append((size, delay, int(flows.flow_ns[flow]), *turn, place, first, stop))
        columns = np.asarray(found, dtype=np.int64).reshape(-1, len(Streams._fields)).T
        return Streams(*(np.ascontiguousarray(column) for column in columns))


def _operation_bytes(tables: Tables, lanes: Lanes) -> np.ndarray:
    """(slots * 10, 4): what each operation adds and removes, by (slot, kind, row class)."""
    table = np.zeros((len(lanes.slot_stage), 5, 2, 4), dtype=np.int64)
    for slot, s in enumerate(lanes.slot_stage):
        for c in (0, 1):
            held = tables.memory[s][min(c, len(tables.memory[s]) - 1)]
            _fill_operations(table[slot, :, c], held, lanes.apart[slot])
    return table.reshape(-1, 4)


def _fill_operations(table: np.ndarray, held: StageMemory, apart: bool) -> None:
    received = held.received_input + held.received_gradient
    inside = 0 if apart else held.rebuilt_inside
    again = held.rebuilt_whole
    table[FORWARD] = (held.stash, 0, held.sent_output, held.workspace)
    table[BACKWARD] = (0, -held.stash - (again if apart else 0), held.sent_gradient - received, held.workspace + inside)
    table[INPUT] = (0 if apart else again, 0, held.sent_gradient, held.workspace)
    table[WEIGHT] = (0, -held.stash - again, -received, held.workspace)
    table[RECOMPUTE] = (again, 0, 0, held.workspace)


def _pairs(values: list[tuple[int, int]]) -> np.ndarray:
    return np.asarray(values, dtype=np.int64).reshape(-1, 2)

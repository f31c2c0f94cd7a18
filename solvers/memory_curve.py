"""What each device holds at every moment of a judged step, its peak, and when it communicates without computing.

ALGORITHMS 1.7 with the rules of ``simulate``: the curve is exact for the times that the judge found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.kernels.memory import NEVER, Costs, Streams, all_peaks, lane_curve
from penstock.solvers.lanes import Lanes, Times
from penstock.solvers.tables import StageMemory, Tables
from penstock.solvers.timeline import Breakdown, Interval


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """Memory of every device of one judged step; curves are computed when asked for."""

    tables: Tables
    lanes: Lanes
    times: Times
    streams: Streams
    costs: Costs

    @classmethod
    def of(
        cls,
        tables: Tables,
        lanes: Lanes,
        times: Times,
        updates: Sequence[Interval],
        reductions: Sequence[Interval],
    ) -> MemoryProfile:
        """``updates`` by slot."""
        return cls(tables, lanes, times, _streams(tables, lanes), _costs(tables, lanes, updates, reductions))

    def curve(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, bytes) of a device, int64: bytes from each time on, beginning at 0."""
        lane = next(lane for lane, devices in enumerate(self.lanes.devices) if device in devices)
        times, size = lane_curve(self.tables.flows, self.lanes.arrays, self.streams, self.costs, self.times, lane)
        return times, size + self.tables.problem.devices[device].context_bytes

    def peaks(self) -> tuple[list[Breakdown], list[int]]:
        """Each lane's first peak without its devices' contexts, and its time of communication alone in ns."""
        peaks, alone = all_peaks(self.tables.flows, self.lanes.arrays, self.streams, self.costs, self.times)
        found = []
        for slots, (gradients, kept, buffers, workspace) in zip(self.lanes.slots, peaks.tolist(), strict=True):
            held = [self.tables.static[self.lanes.slot_stage[slot]] for slot in slots]
            found.append(
                Breakdown(
                    parameters=sum(each.parameters for each in held),
                    gradients=gradients,
                    optimizer=sum(each.optimizer for each in held),
                    versions=0,
                    activations=kept,
                    buffers=buffers,
                    workspace=workspace,
                    context=0,
                )
            )
        return found, alone.tolist()


def _streams(tables: Tables, lanes: Lanes) -> Streams:
    """Receive buffers appear when a transfer starts, send buffers vanish when it ends."""
    flows, arrays = tables.flows, lanes.arrays
    flow_of, duration = flows.flow_of.tolist(), flows.flow_ns.tolist()
    offset, origin = flows.flow_offset.tolist(), flows.flow_first.tolist()
    previous, following = flows.previous.tolist(), flows.next.tolist()
    turns = list(zip(arrays.slot_replica.tolist(), arrays.slot_replicas.tolist(), strict=True))
    found, begin = [], [0]
    for slots in lanes.slots:
        for slot in slots:
            s = lanes.slot_stage[slot]
            for sender, direction in ((previous[s], 0), (following[s], 1), (s, 0), (s, 1)):
                for c, held in enumerate(tables.memory[s]):
                    flow = flow_of[(sender * 2 + direction) * 2 + c] if sender >= 0 else -1
                    if flow < 0:
                        continue
                    size, delay = (held.received_input, held.received_gradient)[direction], 0
                    if sender == s:
                        size, delay = -(held.sent_output, held.sent_gradient)[direction], duration[flow]
                    place = offset[flow] - origin[flow]
                    found.append((size, delay, duration[flow], *turns[slot], place, offset[flow], offset[flow + 1]))
        begin.append(len(found))
    columns = np.asarray(found, dtype=np.int64).reshape(-1, len(Streams._fields) - 1).T
    return Streams(np.asarray(begin, dtype=np.int64), *(np.ascontiguousarray(column) for column in columns))


def _costs(tables: Tables, lanes: Lanes, updates: Sequence[Interval], reductions: Sequence[Interval]) -> Costs:
    first = lanes.arrays.first_gradient.tolist()
    gradients = [tables.static[s].gradients if first[k] >= 0 else 0 for k, s in enumerate(lanes.slot_stage)]
    of_stage: dict[int, list[tuple[int, int]]] = {}
    for each in reductions:
        of_stage.setdefault(each.stage, []).append((each.start_ns, each.end_ns))
    static, steps, reduced, step_begin, reduction_begin = [], [], [], [0], [0]
    for slots in lanes.slots:
        held = [tables.static[lanes.slot_stage[slot]] for slot in slots]
        static.append(sum(each.parameters + each.optimizer for each in held))
        steps += sorted((updates[slot].start_ns, updates[slot].end_ns, gradients[slot]) for slot in slots)
        steps.append((NEVER, NEVER, 0))
        reduced += sorted(pair for slot in slots for pair in of_stage.get(lanes.slot_stage[slot], []))
        reduced.append((NEVER, NEVER))
        step_begin.append(len(steps))
        reduction_begin.append(len(reduced))
    return Costs(
        size=_operation_bytes(tables, lanes),
        gradients=np.asarray(gradients, dtype=np.int64),
        static=np.asarray(static, dtype=np.int64),
        step_begin=np.asarray(step_begin, dtype=np.int64),
        steps=np.asarray(steps, dtype=np.int64),
        reduction_begin=np.asarray(reduction_begin, dtype=np.int64),
        reductions=np.asarray(reduced, dtype=np.int64),
    )


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

"""What each device holds at every moment of a judged step, its peak, and when it communicates without computing.

ALGORITHMS 1.7 with the rules of ``simulate``: the curve is exact for the times that the judge found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.kernels.memory import NEVER, Costs, Streams, all_peaks, lane_curve
from penstock.solvers.lanes import Lanes, Times
from penstock.solvers.tables import StageMemory, Tables
from penstock.solvers.timeline import Breakdown, Interval

Pairs = list[tuple[int, int]]


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
        return cls(tables, lanes, times, _streams(tables, lanes), _costs(tables, lanes, times, updates, reductions))

    def curve(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """(times, bytes) of a device, int64: bytes from each time on, beginning at 0."""
        lane = next(lane for lane, devices in enumerate(self.lanes.devices) if device in devices)
        times, size = lane_curve(self.lanes.arrays, self.streams, self.costs, self.times, lane)
        return times, size + self.tables.problem.devices[device].context_bytes

    def uses(self) -> tuple[list[Breakdown], list[tuple[int, int]]]:
        """Each lane's first peak without its devices' contexts; its busy time and communication without it in ns."""
        peaks, spent = all_peaks(self.lanes.arrays, self.streams, self.costs, self.times)
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
        return found, [(busy, alone) for busy, alone in spent.tolist()]


def _streams(tables: Tables, lanes: Lanes) -> Streams:
    """Receive buffers appear when a transfer starts, send buffers vanish when it ends."""
    flows, arrays = tables.flows, lanes.arrays
    flow_of, duration = flows.flow_of.tolist(), flows.flow_ns.tolist()
    offset = flows.flow_offset.tolist()
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
                    found.append((size, delay, duration[flow], *turns[slot], offset[flow], offset[flow + 1]))
        begin.append(len(found))
    columns = np.asarray(found, dtype=np.int64).reshape(-1, len(Streams._fields) - 1).T
    return Streams(np.asarray(begin, dtype=np.int64), *(np.ascontiguousarray(column) for column in columns))


def _costs(
    tables: Tables, lanes: Lanes, times: Times, updates: Sequence[Interval], reductions: Sequence[Interval]
) -> Costs:
    first = lanes.arrays.first_gradient.tolist()
    of_stage: dict[int, Pairs] = {}
    for each in reductions:
        of_stage.setdefault(each.stage, []).append((each.start_ns, each.end_ns))
    static: list[int] = []
    changes: list[Pairs] = []
    steps: list[Pairs] = []
    reduced: list[Pairs] = []
    for slots in lanes.slots:
        held = {slot: tables.static[lanes.slot_stage[slot]] for slot in slots}
        static.append(sum(each.parameters + each.optimizer for each in held.values()))
        used = [slot for slot in slots if first[slot] >= 0]
        begun = [(int(times.start[first[slot]]), held[slot].gradients) for slot in used]
        changes.append(sorted(begun + [(updates[slot].end_ns, -held[slot].gradients) for slot in used]))
        steps.append(sorted((updates[slot].start_ns, updates[slot].end_ns) for slot in slots))
        reduced.append(sorted(pair for slot in slots for pair in of_stage.get(lanes.slot_stage[slot], [])))
    return Costs(
        _operation_bytes(tables, lanes),
        np.asarray(static, dtype=np.int64),
        *_lists(changes),
        *_lists(steps),
        *_lists(reduced),
    )


def _lists(lists: list[Pairs]) -> tuple[np.ndarray, np.ndarray]:
    """Where each list begins, and all of them, each with an entry behind it that never comes."""
    begin = np.concatenate(([0], np.cumsum([len(each) + 1 for each in lists]))).astype(np.int64)
    return begin, np.asarray([pair for each in lists for pair in (*each, (NEVER, NEVER))], dtype=np.int64)


def _operation_bytes(tables: Tables, lanes: Lanes) -> np.ndarray:
    """(slots * 20, 3): what each operation's start and end add, by (slot, kind, row class, start or end)."""
    together, apart = _stage_bytes(tables)
    table = together[list(lanes.slot_stage)]
    for slot, s in enumerate(lanes.slot_stage):
        if lanes.apart[slot]:
            table[slot] = apart[s]
    return table.reshape(-1, 3)


@lru_cache(maxsize=32)
def _stage_bytes(tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    """(stages, 5, 2, 2, 3) without and with recomputations as operations of their own."""
    found = np.zeros((2, len(tables.memory), 5, 2, 2, 3), dtype=np.int64)
    for s, classes in enumerate(tables.memory):
        for c in (0, 1):
            for apart in (0, 1):
                _fill_operations(found[apart, s, :, c], classes[min(c, len(classes) - 1)], bool(apart))
    return found[0], found[1]


def _fill_operations(table: np.ndarray, held: StageMemory, apart: bool) -> None:
    received = held.received_input + held.received_gradient
    inside = 0 if apart else held.rebuilt_inside
    again = held.rebuilt_whole
    table[FORWARD] = ((held.stash, 0, held.workspace), (0, held.sent_output, 0))
    freed = held.stash + (again if apart else 0)
    table[BACKWARD] = ((0, 0, held.workspace + inside), (-freed, held.sent_gradient - received, 0))
    table[INPUT] = ((0 if apart else again, 0, held.workspace), (0, held.sent_gradient, 0))
    table[WEIGHT] = ((0, 0, held.workspace), (-held.stash - again, -received, 0))
    table[RECOMPUTE] = ((again, 0, held.workspace), (0, 0, 0))

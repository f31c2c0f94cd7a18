"""Memory of each device over a simulated run, its peak, and the time that it communicates without computing.

ALGORITHMS 1.7 with the rules of ``simulate``: the curve is exact for the simulated times.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.communicators import runtime_bytes
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.tables.step_graph import StageMemory
from penstock.solvers.judge.lanes import Lanes, Starts
from penstock.solvers.judge.memory_kernel import WORKSPACE, Costs, Streams, all_peaks, lane_curve
from penstock.solvers.judge.operation_tables import Tables
from penstock.solvers.judge.posting_kernel import Posted, post_receives
from penstock.solvers.model.problem import prefix_sums
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Breakdown


class Spans(NamedTuple):
    """Starts and ends of optimizer steps or of reductions.

    ``place``: a step's slot and round as in ``LaneTables.first_gradient``; a reduction's chain.
    """

    place: np.ndarray
    start: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """Memory of every device of one judged run; curves are computed on demand. ``versions``: bytes by slot."""

    tables: Tables
    lanes: Lanes
    times: Starts
    versions: tuple[int, ...]
    streams: Streams
    costs: Costs
    posted: Posted

    @classmethod
    def of(
        cls,
        tables: Tables,
        lanes: Lanes,
        times: Starts,
        steps: Spans,
        reduced: tuple[Spans, Spans],
        versions: tuple[int, ...],
    ) -> MemoryProfile:
        """Build the profile of a run.

        ``steps``: by slot and round. ``reduced``: buckets by chain and round, then ties by number and round.
        """
        costs = _costs(tables, lanes, times, steps, reduced, versions)
        received = _received(tables, lanes)
        posted = post_receives(tables.flows, lanes.arrays, times, received)
        return cls(tables, lanes, times, versions, _streams(tables, lanes), costs, posted)

    def curve(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (times, bytes) of a device, int64: bytes from each time on, beginning at 0."""
        key = self._lane_of[device], runtime_bytes(self.tables.problem, self.tables.allocation, device)
        if key not in self._curves:
            times, size = lane_curve(self.lanes.arrays, self.streams, self.costs, self.posted, self.times, key[0])
            self._curves[key] = times, size + key[1]
        return self._curves[key]

    @cached_property
    def _lane_of(self) -> dict[int, int]:
        """Return the first lane of each device."""
        lanes = enumerate(self.lanes.devices)
        return {device: lane for lane, devices in reversed(list(lanes)) for device in devices}

    @cached_property
    def _curves(self) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
        """Return an empty table: curves by lane and bytes of the runtime; devices that are alike share one."""
        return {}

    def activations(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (times, bytes) of a device's activations alone."""
        lane = self._lane_of[device]
        nothing = self.posted._replace(size=np.zeros_like(self.posted.size), first=np.zeros_like(self.posted.first))
        times, size = lane_curve(self.lanes.arrays, self._no_streams, self._kept_alone, nothing, self.times, lane)
        return times, size

    @cached_property
    def _kept_alone(self) -> Costs:
        """Return the bytes of activations alone."""
        size = self.costs.size.copy()
        size[:, 1:] = 0
        changes = self.costs.changes.copy()
        changes[changes[:, 0] != NEVER_NS, 1:] = 0
        return self.costs._replace(size=size, static=np.zeros_like(self.costs.static), changes=changes)

    @cached_property
    def _no_streams(self) -> Streams:
        """Return empty flows: nothing received, nothing sent."""
        nothing = Streams(*(column[:0] for column in self.streams))
        return nothing._replace(begin=np.zeros_like(self.streams.begin), received=np.zeros_like(self.streams.received))

    def uses(self, begin_ns: int, end_ns: int) -> tuple[list[Breakdown], list[tuple[int, int]]]:
        """Return each lane's first peak without contexts; its busy time, and its communication outside of it, in ns.

        Times between ``begin_ns`` and ``end_ns`` count.
        """
        peaks, spent = all_peaks(self.lanes.arrays, self.streams, self.costs, self.posted, self.times, begin_ns, end_ns)
        breakdowns = []
        for slots, (gradients, kept, buffers, workspace) in zip(self.lanes.slots, peaks.tolist(), strict=True):
            static = [self.tables.graph.static[self.lanes.slot_stage[slot]] for slot in slots]
            breakdowns.append(
                Breakdown(
                    parameters=sum(each.parameters for each in static),
                    gradients=gradients,
                    optimizer=sum(each.optimizer for each in static),
                    versions=sum(self.versions[slot] for slot in slots),
                    activations=kept,
                    buffers=buffers,
                    workspace=workspace,
                    context=0,
                )
            )
        return breakdowns, [(busy, alone) for busy, alone in spent.tolist()]


def _streams(tables: Tables, lanes: Lanes) -> Streams:
    """Return each lane's flows: first the flows that it sends, with their buffers, then the flows that it receives."""
    flows, arrays = tables.flows, lanes.arrays
    flow_of, duration = flows.flow_of.tolist(), flows.flow_ns.tolist()
    offset = flows.flow_offset.tolist()
    previous, following = flows.previous.tolist(), flows.next.tolist()
    turns = list(zip(arrays.slot_replica.tolist(), arrays.slot_replicas.tolist(), strict=True))
    lines: list[tuple[int, ...]] = []
    begin: list[int] = [0]
    received: list[int] = []
    for slots in lanes.slots:
        for sends in (True, False):
            for slot in slots:
                s = lanes.slot_stage[slot]
                for direction, sender in enumerate((s, s) if sends else (previous[s], following[s])):
                    for c, memory in enumerate(tables.graph.memory[s]):
                        flow = flow_of[(sender * 2 + direction) * 2 + c] if sender >= 0 else -1
                        if flow >= 0:
                            size = (memory.sent_output, memory.sent_gradient)[direction] if sends else 0
                            lines.append((size, duration[flow], *turns[slot], offset[flow], offset[flow + 1]))
            (received if sends else begin).append(len(lines))
    columns = np.asarray(lines, dtype=np.int64).reshape(-1, len(Streams._fields) - 2).T
    bounds = np.asarray(begin, dtype=np.int64), np.asarray(received, dtype=np.int64)
    return Streams(*bounds, *(np.ascontiguousarray(column) for column in columns))


def _received(tables: Tables, lanes: Lanes) -> np.ndarray:
    """Return the bytes that each operation reads from messages, by its line in the lanes' table."""
    return _stage_messages(tables)[list(lanes.slot_stage)].reshape(-1)


@lru_cache(maxsize=32)
def _stage_messages(tables: Tables) -> np.ndarray:
    """Return (stages, 6, 2): the bytes that each kind of operation reads from messages, by row class."""
    table = np.zeros((len(tables.graph.memory), STEP + 1, 2), dtype=np.int64)
    for s, classes in enumerate(tables.graph.memory):
        for c in (0, 1):
            table[s, FORWARD, c] = classes[-c].received_input
            table[s, [BACKWARD, INPUT], c] = classes[-c].received_gradient
    return table


def _costs(
    tables: Tables, lanes: Lanes, times: Starts, steps: Spans, reduced: tuple[Spans, Spans], versions: tuple[int, ...]
) -> Costs:
    arrays = lanes.arrays
    of_slot = [tables.graph.static[s] for s in lanes.slot_stage]
    static = np.zeros(len(lanes.slots), dtype=np.int64)
    always = [each.parameters + each.optimizer + more for each, more in zip(of_slot, versions, strict=True)]
    np.add.at(static, arrays.slot_lane, np.asarray(always, dtype=np.int64))
    slot_of_place = np.repeat(np.arange(len(of_slot)), np.diff(arrays.round_start))
    lane_of_place = arrays.slot_lane[slot_of_place]
    gradients = np.asarray([each.gradients for each in of_slot], dtype=np.int64)[slot_of_place]
    used = arrays.first_gradient >= 0
    freed = used[steps.place]
    after = Spans(*(column[:0] for column in steps)) if tables.periodic else steps
    stepped = lane_of_place[after.place]
    needed = np.asarray(tables.graph.step_bytes)[list(lanes.slot_stage)][slot_of_place][after.place]
    some = needed > 0
    lane = lane_of_place[used], lane_of_place[steps.place[freed]], stepped[some], stepped[some]
    time = times.start[arrays.first_gradient[used]], steps.end[freed], after.start[some], after.end[some]
    size = np.concatenate((gradients[used], -gradients[steps.place[freed]], needed[some], -needed[some]))
    of_steps = np.repeat([False, True], [len(size) - 2 * some.sum(), 2 * some.sum()])
    changes = _lists(len(static), np.concatenate(lane), np.concatenate(time), size * ~of_steps, size * of_steps)
    apart = _lists(len(static), stepped, after.start, after.end)
    return Costs(_operation_bytes(tables, lanes), static, *changes, *apart, *_reduced_by_lane(tables, lanes, *reduced))


def _reduced_by_lane(tables: Tables, lanes: Lanes, reduced: Spans, tied: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return the reductions of each lane's groups, and its ties."""
    chains = tables.chains
    lane, chosen = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    if len(reduced.place):
        for slot, s in enumerate(lanes.slot_stage):
            for g in chains.member_group[chains.member_start[s] : chains.member_start[s + 1]]:
                runs = np.arange(chains.run_start[g], chains.run_start[g + 1])
                chosen.append(runs)
                lane.append(np.full(len(runs), lanes.arrays.slot_lane[slot]))
    which = np.concatenate(chosen)
    starts, ends = [reduced.start[which]], [reduced.end[which]]
    for k, tie in enumerate(tables.sums):
        is_tie = tied.place == k
        for number, devices in enumerate(lanes.devices):
            if devices[0] in tie.devices:
                lane.append(np.full(int(is_tie.sum()), number))
                starts.append(tied.start[is_tie])
                ends.append(tied.end[is_tie])
    return _lists(len(lanes.slots), np.concatenate(lane), np.concatenate(starts), np.concatenate(ends))


def _lists(count: int, lane: np.ndarray, time: np.ndarray, *values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each lane's list begins, and all (time, …) by lane and time, each list ended by NEVER_NS."""
    lane = np.concatenate((lane, np.arange(count)))
    lines = np.full((len(lane), 1 + len(values)), NEVER_NS, dtype=np.int64)
    lines[:-count] = np.column_stack((time, *values))
    order = np.lexsort((lines[:, 0], lane))
    begin = prefix_sums(np.bincount(lane, minlength=count))
    return begin, lines[order]


def _operation_bytes(tables: Tables, lanes: Lanes) -> np.ndarray:
    """Return (slots * 24, 3): bytes that each operation's start and end add, by (slot, kind, row class, start/end)."""
    together, apart = _stage_bytes(tables)
    table = together[list(lanes.slot_stage)]
    for slot, s in enumerate(lanes.slot_stage):
        if lanes.apart[slot]:
            table[slot] = apart[s]
    return table.reshape(-1, 3)


@lru_cache(maxsize=32)
def _stage_bytes(tables: Tables) -> tuple[np.ndarray, np.ndarray]:
    """Return (stages, 6, 2, 2, 3) bytes, without and with recomputations as separate operations."""
    table = np.zeros((2, len(tables.graph.memory), STEP + 1, 2, 2, 3), dtype=np.int64)
    for s, classes in enumerate(tables.graph.memory):
        for c in (0, 1):
            for apart in (0, 1):
                _fill_operations(table[apart, s, :, c], classes[-c], bool(apart))
    table[:, :, STEP, :, 0, WORKSPACE] = np.asarray(tables.graph.step_bytes)[:, None]
    return table[0], table[1]


def _fill_operations(table: np.ndarray, memory: StageMemory, apart: bool) -> None:
    received = memory.received_input + memory.received_gradient
    inside = 0 if apart else memory.rebuilt_inside
    again = memory.rebuilt_whole
    table[FORWARD] = ((memory.stash, 0, memory.workspace), (0, memory.sent_output, 0))
    freed = memory.stash + (again if apart else 0)
    table[BACKWARD] = ((0, 0, memory.workspace + inside), (-freed, memory.sent_gradient - received, 0))
    table[INPUT] = ((0 if apart else again, 0, memory.workspace), (0, memory.sent_gradient, 0))
    table[WEIGHT] = ((0, 0, memory.workspace), (-memory.stash - again, -received, 0))
    table[RECOMPUTE] = ((again, 0, memory.workspace), (0, 0, 0))

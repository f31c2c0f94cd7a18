"""The time in which a device does not compute: the bubble, split by what the device waits for.

A gap before an operation belongs to its input's transfer from when the input was produced, and before that to the
stages that produce it. But while another operation of the row is ready, the gap belongs to the order, or to memory if
that operation is a forward whose activations would not fit on top of the device's peak. A gap before an update belongs
to the all-reduces. The time before a device's first work fills the pipeline, the time after its last work drains it.
While operations run, GPUs of a quicker kind wait for the slowest one (``slower``). Every nanosecond is in one part:
with ``busy_ns`` the parts add up to the whole time.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, RECOMPUTE, WEIGHT
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.memory import activation_bytes, spare_bytes
from penstock.solvers.explanation.run import JudgedRun
from penstock.solvers.explanation.slower import Kind, kinds_of
from penstock.solvers.model.problem import Device
from penstock.solvers.model.schedule import STEP

OWN_INPUTS = ((FORWARD, (BACKWARD, INPUT, RECOMPUTE)), (INPUT, (WEIGHT,)), (RECOMPUTE, (BACKWARD, INPUT)))
"""Kinds of operations, each with the kinds that need its result on the same row and micro-batch."""


class Idle(NamedTuple):
    """Devices of one kind that run the same rows, and their time in the run or, of a periodic plan, in its window.

    ``gpus``: all GPUs of these devices, or, where a device has GPUs of several kinds, the GPUs of one kind.
    """

    devices: tuple[int, ...]
    gpus: tuple[Device, ...]
    busy_ns: int
    slower_ns: int
    fill_ns: int
    drain_ns: int
    transfer_ns: int
    all_reduce_ns: int
    other_stages_ns: int
    order_ns: int
    memory_ns: int

    @property
    def idle_ns(self) -> int:
        """Return all of the time except computing."""
        return self.slower_ns + sum(self[4:])


class _Later(NamedTuple):
    """The earliest ready time of the operations after each one in its row, and the operation that has it.

    ``place``: the index of each operation's entry, by the operation's number.
    """

    place: dict[int, int]
    least_ns: np.ndarray
    which: np.ndarray

    @classmethod
    def of(cls, run: JudgedRun, lanes: list[int], ready: np.ndarray) -> _Later:
        """Return the tables for the operations of some rows."""
        place: dict[int, int] = {}
        least_ns, which, size = [], [], 0
        for lane in lanes:
            low, high = int(run.lane_start[lane]), int(run.lane_start[lane + 1])
            times = np.concatenate((ready[low:high], [NEVER_NS]))
            least = np.minimum.accumulate(times[::-1])[::-1]
            first = np.where(times == least, np.arange(len(times)), len(times))
            place.update(zip(range(low, high), range(size + 1, size + 1 + high - low), strict=True))
            least_ns.append(least)
            which.append(low + np.minimum.accumulate(first[::-1])[::-1])
            size += len(times)
        return cls(place, np.concatenate(least_ns), np.concatenate(which))


class Piece(NamedTuple):
    """A piece of idle time; ``part`` is the field of ``Idle`` that it belongs to."""

    part: str
    start_ns: int
    end_ns: int


def idle_split(run: JudgedRun, pieces_of: dict[tuple[int, ...], list[Piece]] | None = None) -> tuple[Idle, ...]:
    """Return one entry for each kind of devices of a row (where pipelines share devices: of all their rows).

    ``pieces_of``: the run's ``idle_pieces``, if they are computed already.
    """
    first, last = run.timeline.window_ns
    entries = []
    for devices, pieces in (idle_pieces(run) if pieces_of is None else pieces_of).items():
        parts = dict.fromkeys(Idle._fields[4:], 0)
        for piece in pieces:
            parts[piece.part] += max(0, min(piece.end_ns, last) - max(piece.start_ns, first))
        busy_ns = last - first - sum(parts.values())
        for kind in kinds_of(run, devices):
            slower_ns = min(busy_ns, _slower_ns(run, devices, kind))
            entries.append(Idle(kind.devices, kind.gpus, busy_ns - slower_ns, slower_ns, **parts))
    return tuple(entries)


def _slower_ns(run: JudgedRun, devices: tuple[int, ...], kind: Kind) -> int:
    """Return how long a kind waits for slower ones in the operations of its rows, in the run's window."""
    if not any(kind.shares.values()):
        return 0
    first, last = run.timeline.window_ns
    lasts = np.maximum(0, np.minimum(run.end, last) - np.maximum(run.start, first))
    waited = 0.0
    for lane in [lane for lane, holders in enumerate(run.lane_devices) if holders == devices]:
        row = slice(int(run.lane_start[lane]), int(run.lane_start[lane + 1]))
        passes = run.kind[row] != STEP
        for s, share in kind.shares.items():
            waited += share * int(lasts[row][passes & (run.stage_of[row] == s)].sum())
    return int(waited)


def idle_pieces(run: JudgedRun) -> dict[tuple[int, ...], list[Piece]]:
    """Return each row's devices with the pieces of their idle time in chronological order, without empty pieces."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for lane, devices in enumerate(run.lane_devices):
        rows.setdefault(devices, []).append(lane)
    ready, produced = _ready_ns(run)
    spare = spare_bytes(run.problem, run.timeline)
    split = {
        devices: _pieces(run, min(spare[d] for d in devices), lanes, ready, produced) for devices, lanes in rows.items()
    }
    return {devices: [piece for piece in pieces if piece.end_ns > piece.start_ns] for devices, pieces in split.items()}


def _pieces(run: JudgedRun, spare: int, lanes: list[int], ready: np.ndarray, produced: np.ndarray) -> list[Piece]:
    nodes = [np.arange(run.lane_start[lane], run.lane_start[lane + 1]) for lane in lanes]
    updates = [u for u in range(run.first_update, run.count) if run.lane(u) in lanes]
    work = np.concatenate([*nodes, np.asarray(updates, dtype=np.int64)])
    work = work[np.lexsort((work, run.end[work], run.start[work]))]
    reached = np.concatenate(([0], np.maximum.accumulate(run.end[work])))
    gaps = np.flatnonzero(run.start[work] > reached[:-1])
    pieces: list[Piece] = []
    later = _Later.of(run, lanes, ready)
    for g in gaps.tolist():
        node, low, high = int(work[g]), int(reached[g]), int(run.start[work[g]])
        pieces += [Piece("fill_ns", low, high)] if g == 0 else _parts(run, spare, node, low, produced, later)
    pieces.append(Piece("drain_ns", int(reached[-1]), run.timeline.window_ns[1]))
    return pieces


def _parts(run: JudgedRun, spare: int, node: int, low: int, produced: np.ndarray, later: _Later) -> list[Piece]:
    """Return the gap from ``low`` until ``node`` begins, in pieces with their names."""
    high = int(run.start[node])
    if node >= run.first_update or run.kind[node] == STEP:
        return [Piece("all_reduce_ns", low, high)]
    available = min(high, max(low, int(produced[node])))
    place = later.place[node]
    turn = min(available, max(low, int(later.least_ns[place])))
    name = "memory_ns" if turn < available and _is_too_large(run, spare, int(later.which[place])) else "order_ns"
    return [Piece("other_stages_ns", low, turn), Piece(name, turn, available), Piece("transfer_ns", available, high)]


def _is_too_large(run: JudgedRun, spare: int, node: int) -> bool:
    """Return whether ``node`` is a forward whose activations are more than is left at the devices' peak."""
    if run.kind[node] != FORWARD:
        return False
    stage = run.allocation.stages[run.stage_of[node]]
    return spare < activation_bytes(run.problem, stage, run.graph.classes[-1][0])


def _ready_ns(run: JudgedRun) -> tuple[np.ndarray, np.ndarray]:
    """Return when each operation was ready except for its device, and when its input was produced.

    An input without a transfer counts as being produced until it arrives, and so does an input from no other stage.
    """
    count, number = len(run.allocation.stages), run.allocation.num_micro_batches
    kind, stage, batch = run.kind, run.stage_of, run.batch
    end = run.end[: run.first_transfer]
    arrival = np.zeros((2, count, number), dtype=np.int64)
    source = np.full((2, count, number), NEVER_NS)
    completed = np.zeros((2, count, number), dtype=np.int64)
    for way, kinds in ((0, (FORWARD,)), (1, (BACKWARD, INPUT))):
        which = np.isin(kind, kinds)
        np.maximum.at(completed[way], (stage[which], batch[which]), end[which])
        for s in range(count):
            before = run.allocation.previous(s) if way == 0 else run.allocation.next(s)
            if before is not None:
                arrival[way, s] = completed[way, before]
    moved = run.timeline.transfers
    for way in (0, 1):
        of_way = moved.direction == way
        sender, m = moved.stage[of_way], moved.micro_batch[of_way]
        arrival[way, sender + 1 - 2 * way, m] = moved.end_ns[of_way]
        source[way, sender + 1 - 2 * way, m] = completed[way, sender, m]
    ready, produced = np.zeros(len(kind), dtype=np.int64), np.full(len(kind), NEVER_NS)
    for way, kinds in ((0, (FORWARD,)), (1, (BACKWARD, INPUT))):
        which = np.isin(kind, kinds)
        ready[which] = arrival[way, stage[which], batch[which]]
        produced[which] = source[way, stage[which], batch[which]]
    for low, high in pairwise(run.lane_start.tolist()):
        row = slice(low, high)
        for needed, those in OWN_INPUTS:
            result_ns = np.zeros((count, number), dtype=np.int64)
            gives = kind[row] == needed
            result_ns[stage[row][gives], batch[row][gives]] = end[row][gives]
            takes = np.isin(kind[row], those)
            ready[row][takes] = np.maximum(ready[row][takes], result_ns[stage[row][takes], batch[row][takes]])
    ready[kind == STEP] = NEVER_NS
    return ready, produced

"""A step as a picture: per device its blocks, communication and memory, from a judged plan or from a trace.

The HTML page, the SVG and the terminal all draw a ``Picture``; none of them reads the simulator's arrays itself.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.calibration.comparing import is_comparable
from penstock.schemas.amounts import duration
from penstock.schemas.plan import Plan
from penstock.schemas.program import KINDS
from penstock.schemas.trace import RankTrace, Trace
from penstock.solvers.costs.reductions import group_buckets, reduction_groups
from penstock.solvers.costs.ties import tied_sums
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Timeline, Track

TIED = -2
"""The number of an all-reduce that sums a tied parameter; -1 means no number."""
LETTERS = "".join(KINDS) + "U"
"""One letter per kind of block; U is the optimizer's update, as the kind of a step within a row."""
UPDATE = STEP
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "backward, inputs",
    "W": "backward, weights",
    "R": "recompute",
    "U": "update",
    "f": "activations sent",
    "b": "gradients sent",
    "a": "all-reduce",
    "<": "pipeline fills",
    ">": "pipeline drains",
    "t": "waits for a transfer",
    "g": "waits for an all-reduce",
    "s": "waits for another stage",
    "o": "waits by its order",
    "m": "waits for memory",
}
"""Kinds of blocks: computing, communication, and why a device idles."""
_COMMUNICATION = "fba"
_IDLE = {
    "fill_ns": "<",
    "drain_ns": ">",
    "transfer_ns": "t",
    "all_reduce_ns": "g",
    "other_stages_ns": "s",
    "order_ns": "o",
    "memory_ns": "m",
}
CONSTANT_PARTS = ("parameters", "optimizer", "versions", "context")
"""The parts of a device's memory that are constant."""
_TRACED = re.compile(r"(\d+)([A-Z_]+?)(\d*)(?:@\d+)?")
_TRACED_COMMUNICATION = {
    **dict.fromkeys(("RECV_F", "SEND_F"), 0),
    **dict.fromkeys(("RECV_B", "SEND_B"), 1),
    **dict.fromkeys(("REDUCE", "WAIT_REDUCE", "REDUCE_SHARED", "NORM", "WAIT_NORM", "AVG_PUSH", "AVG_PULL"), 2),
}


@dataclass(frozen=True, eq=False)
class Blocks:
    """Intervals in the order of their start; int64 arrays of one length. ``kind`` indexes ``letters``."""

    letters: str
    kind: np.ndarray
    stage: np.ndarray
    number: np.ndarray
    start_ns: np.ndarray
    end_ns: np.ndarray

    def __len__(self) -> int:
        return len(self.start_ns)

    @classmethod
    def from_rows(cls, letters: str, rows: np.ndarray) -> Blocks:
        """Return blocks from an (n, 5) array of kind, stage, number, start, end; sorted, without empty intervals."""
        rows = rows.reshape(-1, 5).astype(np.int64)
        rows = rows[rows[:, 4] > rows[:, 3]]
        rows = rows[np.lexsort((rows[:, 4], rows[:, 3]))]
        return cls(letters, *(np.ascontiguousarray(rows[:, column]) for column in range(5)))

    @classmethod
    def none(cls, letters: str) -> Blocks:
        """Return an empty set of blocks."""
        return cls.from_rows(letters, np.zeros((0, 5), dtype=np.int64))

    def where(self, chosen: np.ndarray) -> Blocks:
        """Return the blocks that a mask selects."""
        columns = (self.kind, self.stage, self.number, self.start_ns, self.end_ns)
        return Blocks(self.letters, *(column[chosen] for column in columns))


class Strip(NamedTuple):
    """The work of devices with the same order: computation, communication, and the reasons for idle time."""

    compute: Blocks
    communication: Blocks
    idle: Blocks = Blocks.none("".join(_IDLE.values()))

    @classmethod
    def nothing(cls) -> Strip:
        """Return a strip without blocks."""
        return cls(Blocks.none(LETTERS), Blocks.none(_COMMUNICATION))


Piece = tuple[str, int, int]
"""An interval of idle time: the field of ``Idle`` that it belongs to, its start and its end."""


@dataclass(frozen=True, eq=False)
class Lane:
    """One device. ``strip`` indexes ``Picture.strips``; the curves hold bytes from each time on.

    ``parts``: the parts of its memory at its peak; ``activations_bytes``: those at each time, if they are known.
    """

    device: str
    strip: int
    stages: tuple[int, ...]
    times_ns: np.ndarray
    memory_bytes: np.ndarray
    capacity_bytes: int | None
    activations_bytes: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    parts: Mapping[str, int] = field(default_factory=dict)
    node: str = ""


class Window(NamedTuple):
    """The steady-state window of a periodic plan's run: ``rounds`` of its ``of_rounds`` global batches."""

    start_ns: int
    end_ns: int
    rounds: int
    of_rounds: int

    def __str__(self) -> str:
        batches = f"{self.rounds} of the {self.of_rounds} global batches"
        return f"steady state: {batches}, from {duration(self.start_ns)} to {duration(self.end_ns)}"


@dataclass(frozen=True, eq=False)
class Picture:
    """One global batch, or a run of several, on all participating devices.

    ``firsts``: the first stage of each pipeline, then the number of all stages. ``together``: how many devices, which
    do the same at the same time, each lane represents. ``is_comparable``: whether its times are of the plan's hardware.
    """

    end_ns: int
    num_micro_batches: int
    strips: tuple[Strip, ...]
    lanes: tuple[Lane, ...]
    window: Window | None = None
    firsts: tuple[int, ...] = (0,)
    together: int = 1
    is_comparable: bool = True

    @cached_property
    def num_sent(self) -> int:
        """Return the number of blocks of all strips, however many lanes share them."""
        return sum(len(strip.compute) + len(strip.communication) for strip in self.strips)

    @cached_property
    def num_blocks(self) -> int:
        """Return the number of blocks to draw, counted on every lane."""
        counts = [len(strip.compute) + len(strip.communication) for strip in self.strips]
        return sum(counts[lane.strip] for lane in self.lanes)


def picture_of_timeline(
    problem: Problem,
    timeline: Timeline,
    allocation: Allocation | None = None,
    idle: Mapping[tuple[int, ...], Sequence[Piece]] | None = None,
) -> Picture:
    """Return the picture of a simulated timeline; devices that hold no stage are left out.

    ``allocation`` gives the stages that reduce together where there are several pipelines; ``idle`` why devices wait.
    """
    reduced = _reduced(timeline, _members(problem, allocation), _copies(problem, allocation))
    strips, lanes, transfers = [], [], _Moved.of(timeline)
    for track in timeline.tracks:
        operations = np.asarray(track.operations, dtype=np.int64)
        stages = tuple(np.unique(operations[:, 1]).tolist())
        strip = _strip(track, operations, stages, timeline, transfers, reduced)
        strips.append(strip._replace(idle=_idle((idle or {}).get(track.devices, ()))))
        kept = _Kept(*timeline.activations_curve(track.devices[0]))
        lanes += [(stages, d, _lane(problem, timeline, d, kept, len(strips) - 1, stages)) for d in track.devices]
    lanes.sort(key=lambda entry: entry[:2])
    count = 1 + max((int(track.operations[:, 2].max(initial=0)) for track in timeline.tracks), default=0)
    window = None
    if timeline.window_rounds < timeline.rounds:
        window = Window(*timeline.window_ns, timeline.window_rounds, timeline.rounds)
    return Picture(
        _end_ns(timeline), count, tuple(strips), tuple(lane for _, _, lane in lanes), window, _firsts(lanes, allocation)
    )


def _firsts(lanes: Sequence[tuple[tuple[int, ...], int, Lane]], allocation: Allocation | None) -> tuple[int, ...]:
    if allocation is None:
        return (0, 1 + max(max(stages) for stages, _device, _lane in lanes))
    return tuple(np.cumsum([0, *(len(pipeline.stages) for pipeline in allocation.pipelines)]).tolist())


class _Kept:
    """The activations of a track's devices, as a curve that is read at the times of other curves."""

    def __init__(self, times_ns: np.ndarray, size: np.ndarray) -> None:
        self._times_ns, self._size = times_ns, size
        self._last: tuple[np.ndarray, np.ndarray] | None = None

    def at(self, times_ns: np.ndarray) -> np.ndarray:
        """Return the bytes at each time; devices that are alike ask at the same array again."""
        if self._last is None or self._last[0] is not times_ns:
            self._last = times_ns, self._size[np.searchsorted(self._times_ns, times_ns, side="right") - 1]
        return self._last[1]


def _lane(
    problem: Problem,
    timeline: Timeline,
    device: int,
    kept: _Kept,
    strip: int,
    stages: tuple[int, ...],
) -> Lane:
    about = problem.devices[device]
    times, memory = timeline.memory_curve(device)
    return Lane(
        about.name,
        strip,
        stages,
        times,
        memory,
        about.memory_bytes,
        kept.at(times),
        timeline.uses[device].memory._asdict(),
        problem.network.node_names[about.node],
    )


def _idle(pieces: Sequence[Piece]) -> Blocks:
    letters = "".join(_IDLE.values())
    rows = [(letters.index(_IDLE[name]), -1, -1, low, high) for name, low, high in pieces]
    return Blocks.from_rows(letters, np.array(rows, dtype=np.int64))


def _end_ns(timeline: Timeline) -> int:
    """Return the time at which everything has ended."""
    arrays = [timeline.transfers.end_ns, *(track.end_ns for track in timeline.tracks)]
    ends = [int(array.max()) for array in arrays if array.size]
    ends += [each.end_ns for each in (*timeline.reductions, *timeline.ties, *timeline.updates)]
    return max([*ends, timeline.time_per_global_batch_ns])


Members = dict[tuple[int, int], tuple[int, ...]]
"""The stages that take part in a reduction, by its stage and bucket; absent where it is that stage alone."""


def _members(problem: Problem, allocation: Allocation | None) -> Members:
    """Return the stages of each bucket of all-reduces that several pipelines take part in."""
    members: Members = {}
    if allocation is None or len(allocation.pipelines) == 1:
        return members
    counted: Counter[int] = Counter()
    for group in reduction_groups(allocation):
        for _bucket in group_buckets(problem, group):
            members[group.stages[0], counted[group.stages[0]]] = group.stages
            counted[group.stages[0]] += 1
    return members


def _copies(problem: Problem, allocation: Allocation | None) -> tuple[tuple[int, ...], ...]:
    """Return the stages with a copy of each parameter tied across stages."""
    return () if allocation is None else tuple(tie.stages for tie in tied_sums(problem, allocation))


def picture_of_trace(trace: Trace, plan: Plan) -> Picture:
    """Return the picture of the last traced step, as the ranks measured it; memory curves are not measured."""
    strips, lanes = [], []
    end = 0
    for number, rank in enumerate(last_traces(trace)):
        strips.append(_traced_strip(rank))
        stages = tuple(np.unique(strips[-1].compute.stage).tolist())
        lanes.append(Lane(rank.device, number, stages, np.zeros(0, np.int64), np.zeros(0, np.int64), None))
        end = max([end, *(event.end_ns for event in rank.events)])
    firsts = np.cumsum([0, *(len(pipeline.stages) for pipeline in plan.pipelines)]).tolist()
    return Picture(
        max(end, 1),
        plan.num_micro_batches,
        tuple(strips),
        tuple(lanes),
        firsts=tuple(firsts),
        is_comparable=is_comparable([rank.hardware for rank in trace.ranks if rank.hardware is not None]),
    )


def last_traces(trace: Trace) -> list[RankTrace]:
    """Return the last trace of each rank, by rank."""
    last: dict[int, RankTrace] = {}
    for rank in trace.ranks:
        if rank.rank not in last or rank.step >= last[rank.rank].step:
            last[rank.rank] = rank
    return [last[number] for number in sorted(last)]


def rows_in_words(picture: Picture) -> str | None:
    """Return how many devices a row of the picture shows; None where that is one."""
    if picture.together < 2:
        return None
    return f"A row shows {picture.together:,} devices that do the same at the same time, under the name of the first."


def stage_devices(plan: Plan) -> list[tuple[str, ...]]:
    """Return the devices of each stage number; numbers continue through the pipelines."""
    return [stage.devices for pipeline in plan.pipelines for stage in pipeline.stages]


def _strip(
    track: Track,
    operations: np.ndarray,
    stages: tuple[int, ...],
    timeline: Timeline,
    transfers: _Moved,
    reduced: Mapping[int, Mapping[int, tuple[int, ...]]],
) -> Strip:
    rows = np.column_stack((operations, track.start_ns, track.end_ns))
    rows[operations[:, 0] == STEP, 2] = -1
    updates: list[tuple[int, ...]] = []
    if not (operations[:, 0] == STEP).any():
        updates = [(UPDATE, i.stage, i.bucket, i.start_ns, i.end_ns) for i in timeline.updates if i.stage in stages]
    messages = {number: row for s in stages for number, row in reduced.get(s, {}).items()}
    moved = _transfers(operations[operations[:, 0] != STEP], transfers)
    return Strip(
        Blocks.from_rows(LETTERS, np.vstack((rows, np.array(updates, dtype=np.int64).reshape(-1, 5)))),
        Blocks.from_rows(
            _COMMUNICATION,
            np.vstack((moved, np.array([messages[n] for n in sorted(messages)], dtype=np.int64).reshape(-1, 5))),
        ),
    )


def _reduced(
    timeline: Timeline, members: Members, copies: Sequence[Sequence[int]]
) -> dict[int, dict[int, tuple[int, ...]]]:
    """Return the all-reduces that each stage takes part in, as rows of blocks by their place in the timeline."""
    reductions: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
    for number, i in enumerate(timeline.reductions):
        for s in members.get((i.stage, i.bucket), (i.stage,)):
            reductions[s][number] = (2, i.stage, i.bucket, i.start_ns, i.end_ns)
    for number, i in enumerate(timeline.ties, len(timeline.reductions)):
        for s in copies[i.bucket] if i.bucket < len(copies) else ():
            reductions[s][number] = (2, i.stage, TIED, i.start_ns, i.end_ns)
    return reductions


class _Moved(NamedTuple):
    """All transfers as ``rows`` of an (n, 5) array: direction, stage, micro-batch, start, end.

    The rows of stage s are at ``by_stage[begin[s] : begin[s + 1]]``.
    """

    rows: np.ndarray
    by_stage: np.ndarray
    begin: np.ndarray

    @classmethod
    def of(cls, timeline: Timeline) -> _Moved:
        moved = timeline.transfers
        columns = (moved.direction, moved.stage, moved.micro_batch, moved.start_ns, moved.end_ns)
        rows = np.column_stack([np.asarray(column, dtype=np.int64) for column in columns])
        order = np.argsort(rows[:, 1], kind="stable")
        stages = 1 + int(rows[:, 1].max(initial=-1))
        return cls(rows, order, np.searchsorted(rows[order, 1], np.arange(stages + 1)))

    def sent_by(self, stages: Iterable[int]) -> np.ndarray:
        """Return the transfers that some of the stages send, in their order in ``rows``."""
        rows = [self.by_stage[self.begin[s] : self.begin[s + 1]] for s in stages if 0 <= s < len(self.begin) - 1]
        return self.rows[np.sort(np.concatenate(rows))] if rows else self.rows[:0]


def _transfers(operations: np.ndarray, moved: _Moved) -> np.ndarray:
    """Return the transfers whose sender's or receiver's operation is one of ``operations``."""
    stages = np.unique(operations[:, 1])
    rows = moved.sent_by({s + near for s in stages.tolist() for near in (-1, 0, 1)})
    peer = rows[:, 1] + np.where(rows[:, 0] == 0, 1, -1)
    width = 1 + max(int(operations[:, 2].max(initial=0)), int(rows[:, 2].max(initial=0)))
    ours = operations[:, 1] * width + operations[:, 2]
    return rows[np.isin(rows[:, 1] * width + rows[:, 2], ours) | np.isin(peer * width + rows[:, 2], ours)]


def _traced_strip(rank: RankTrace) -> Strip:
    rows: dict[str, list[tuple[int, int, int, int, int]]] = defaultdict(list)
    for event in rank.events:
        match = _TRACED.fullmatch(event.instruction)
        if match is None:
            continue
        stage, word, number = int(match[1]), match[2], int(match[3] or -1)
        number = TIED if word == "REDUCE_SHARED" else number
        if word in KINDS or word == "STEP":
            kind = UPDATE if word == "STEP" else LETTERS.index(word)
            rows["compute"].append((kind, stage, number, event.start_ns, event.end_ns))
        elif word in _TRACED_COMMUNICATION:
            rows["communication"].append((_TRACED_COMMUNICATION[word], stage, number, event.start_ns, event.end_ns))
    return Strip(
        Blocks.from_rows(LETTERS, np.array(rows["compute"], dtype=np.int64)),
        Blocks.from_rows(_COMMUNICATION, np.array(rows["communication"], dtype=np.int64)),
    )

"""Orders as PyTorch's compute-only schedule CSV, and back: the common subset of both (EXECUTOR A.1 and G.2).

One line per rank, one cell per operation (``2F0``: stage 2, forward, micro-batch 0; kinds F, B, I, W); an empty cell is
an idle step. torchtitan takes such a file as ``parallelism.pipeline_parallel_schedule_csv``,
``_PipelineScheduleRuntime`` by ``_load_csv``. Each pipeline rank has one line, which all its replicas run, and the
model itself decides what it recomputes. Neither is in the file, and ``remarks`` has sentences on both. PyTorch reads
the last stage's losses in the order in which its forwards run, so these have to be in ascending order.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, RECOMPUTE, WEIGHT
from penstock.solvers.model.allocation import Allocation, single_pipeline
from penstock.solvers.model.schedule import Orders, Row

NAME = "torch-csv"
"""The name of an imported schedule."""
_CELL = re.compile(r"(0|[1-9][0-9]{0,8})([FBIW])(0|[1-9][0-9]{0,8})")
_TORCH_ONLY = re.compile(r"\(.*\)OVERLAP_F_B|[0-9]+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)[0-9]*")


def to_csv(allocation: Allocation, orders: Orders) -> str:
    """Write one line per rank, ranks in the order of the devices' indices; replicas share the first one's line.

    Raises UnsupportedRequest where PyTorch's runtime would not train this plan, or would train something else.
    """
    _refuse(allocation)
    last = len(allocation.stages) - 1
    lines: dict[int, list[str]] = {}
    for row in orders.rows:
        operations = [each for each in row.operations.tolist() if each[0] != RECOMPUTE]
        losses = [m for kind, stage, m in operations if kind == FORWARD and stage == last]
        if losses != sorted(losses):
            raise UnsupportedRequest(
                f"the last stage runs its forwards in the order {_some(losses)}; PyTorch reads losses in ascending "
                "order and would silently train with wrong gradients",
                remedy="a schedule whose last stage runs forwards in ascending order",
            )
        lines[min(row.devices)] = [f"{stage}{KINDS[kind]}{m}" for kind, stage, m in operations]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines[device] for device in sorted(lines))
    return text.getvalue()


def _refuse(allocation: Allocation) -> None:
    if len(allocation.pipelines) > 1:
        raise UnsupportedRequest(f"a PyTorch schedule has one pipeline; the plan has {len(allocation.pipelines)}")
    groups = {stage.devices for stage in allocation.stages}
    for number, stage in enumerate(allocation.stages):
        if stage.dispatch == "round_robin" and stage.replicas > 1:
            raise UnsupportedRequest(
                f"in a PyTorch schedule replicas split each micro-batch; the replicas of stage {number} take whole "
                "micro-batches in turn",
                remedy="a plan whose replicas split each micro-batch",
            )
        shared = next((d for d in stage.devices if any(d in group for group in groups - {stage.devices})), None)
        if shared is not None:
            raise UnsupportedRequest(
                f"in a PyTorch schedule a device belongs to one group of replicas; a device of stage {number} belongs "
                "to two",
                remedy="a plan whose stages share all devices or none",
            )


def remarks(allocation: Allocation, orders: Orders) -> tuple[str, ...]:
    """Return sentences on parts of the plan that a schedule of PyTorch has no place for: replicas and recomputation."""
    sentences = []
    counts = [stage.replicas for stage in allocation.stages]
    if len(set(counts)) > 1:
        listed = ", ".join(f"{count} of stage {s}" for s, count in enumerate(counts))
        sentences.append(
            f"a line is of all replicas of its rank, and these differ in number ({listed}): PyTorch's meshes replicate "
            "every stage equally, so these replicas need groups and transfers of one's own"
        )
    elif counts[0] > 1:
        sentences.append(
            f"each line is of {counts[0]} replicas, which share a micro-batch by rows: the mesh next to the pipeline "
            "(data parallelism) has them, and sums their gradients"
        )
    recomputing = [
        f"stage {s} layers {_ranges(stage.recompute)}" for s, stage in enumerate(allocation.stages) if stage.recompute
    ]
    if recomputing:
        sentences.append(
            f"recomputed are {'; '.join(recomputing)}: torch.utils.checkpoint around these layers in the model"
        )
    if any((row.operations[:, 0] == RECOMPUTE).any() for row in orders.rows):
        sentences.append("the plan recomputes ahead of its backwards (R); PyTorch recomputes within them")
    return tuple(sentences)


def _ranges(segments: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{first}–{last}" if first < last else f"{first}" for first, last in segments[:8])
    return shown + (", …" if len(segments) > 8 else "")


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")


def onto(text: str, allocation: Allocation) -> tuple[Allocation, Orders]:
    """Return the schedule on the devices that hold its stages, and the allocation with its number of micro-batches.

    Replicas of a stage all run its rank's row. Raises InvalidDocument, naming line, column and operation, where a cell
    is no whole operation, operations are missing, doubled, out of order or wait for each other in a circle, a stage is
    on two ranks, and where ranks and devices do not hold the same stages. Raises UnsupportedRequest for cells that only
    PyTorch's lowered schedules have, and for several pipelines.
    """
    if len(allocation.pipelines) > 1:
        raise UnsupportedRequest(f"a PyTorch schedule has one pipeline; the plan has {len(allocation.pipelines)}")
    ranks = [rank for rank in _read(text) if len(rank.operations)]
    _check(ranks)
    number = int(max(rank.operations[:, 2].max() for rank in ranks)) + 1
    rows = tuple(Row(_devices(allocation, rank), rank.operations) for rank in ranks)
    if left := sorted(
        set(range(len(allocation.stages))) - {s for rank in ranks for s in rank.operations[:, 1].tolist()}
    ):
        raise InvalidDocument(
            f"the schedule has no stage {left[0]}; the plan has {len(allocation.stages)} stages",
            remedy="a plan with the schedule's number of stages",
        )
    return single_pipeline(allocation.stages, number), Orders(NAME, rows)


class _Rank(NamedTuple):
    """A line's operations, (n, 3) int32, and their columns; both count from 0."""

    line: int
    operations: np.ndarray
    columns: tuple[int, ...]

    def cell(self, at: int) -> str:
        """Return the place of an operation."""
        return f"line {self.line + 1}, column {self.columns[at] + 1}"


def _read(text: str) -> list[_Rank]:
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise InvalidDocument(f"the schedule is not CSV: {error}") from None
    ranks = []
    for line, cells in enumerate(lines):
        used = [(column, cell.strip()) for column, cell in enumerate(cells) if cell.strip()]
        operations = [_operation(cell, line, column) for column, cell in used]
        rows = np.array(operations, dtype=np.int32).reshape(-1, 3)
        ranks.append(_Rank(line, rows, tuple(column for column, _cell in used)))
    if not any(len(rank.operations) for rank in ranks):
        raise InvalidDocument(
            "the schedule is empty; expected a line per rank with an operation in each cell",
            remedy="0F0,0F1,0B0,0B1 is a rank that runs two micro-batches through stage 0",
        )
    return ranks


def _operation(cell: str, line: int, column: int) -> tuple[int, int, int]:
    match = _CELL.fullmatch(cell)
    if match is not None:
        return KINDS.index(match[2]), int(match[1]), int(match[3])
    where = f"line {line + 1}, column {column + 1}"
    if _TORCH_ONLY.fullmatch(cell):
        raise UnsupportedRequest(
            f"{where}: {cell!r} belongs to a schedule that PyTorch has lowered; only F, B, I and W are read",
            remedy='the compute-only form (`format="compute_only"`)',
        )
    raise InvalidDocument(
        f"{where}: {cell!r} is not an operation; expected stage, F, B, I or W, and micro-batch, such as 2F0",
        faults=(Fault(f"/{line}/{column}", cell),),
    )


Place = tuple[_Rank, int]
"""A rank, and the place of an operation in its line."""


def _check(ranks: list[_Rank]) -> None:
    """Check that every micro-batch passes every stage once, each stage on one rank, in an order that can run."""
    rank_of: dict[int, _Rank] = {}
    places: dict[tuple[int, int, int], Place] = {}
    for rank in ranks:
        for at, operation in enumerate(map(tuple, rank.operations.tolist())):
            holder = rank_of.setdefault(operation[1], rank)
            if holder is not rank:
                raise InvalidDocument(
                    f"stage {operation[1]} is on lines {holder.line + 1} and {rank.line + 1}; a stage belongs to one "
                    "rank"
                )
            if operation in places:
                first = places[operation][0].cell(places[operation][1])
                raise InvalidDocument(f"{rank.cell(at)}: {_named(operation)} occurs twice, first at {first}")
            places[operation] = rank, at
    _check_complete(rank_of, places)
    _check_order(places)
    _check_circles(ranks, places, len(rank_of))


def _named(operation: tuple[int, int, int]) -> str:
    kind, stage, m = operation
    return f"{stage}{KINDS[kind]}{m}"


def _check_complete(rank_of: dict[int, _Rank], places: dict[tuple[int, int, int], Place]) -> None:
    stages = max(rank_of) + 1
    if len(rank_of) < stages:
        missing = next(stage for stage in range(stages) if stage not in rank_of)
        raise InvalidDocument(
            f"stage {missing} is on no line, but stage {stages - 1} is",
            remedy=f"every stage from 0 to {stages - 1} on one line",
        )
    number = max(m for _kind, _stage, m in places) + 1
    for stage, m in ((stage, m) for stage in range(stages) for m in range(number)):
        line = f"line {rank_of[stage].line + 1}"
        whole, split = (BACKWARD, stage, m) in places, [(kind, stage, m) in places for kind in (INPUT, WEIGHT)]
        if (FORWARD, stage, m) not in places:
            raise InvalidDocument(
                f"{line}: {stage}F{m} is missing, but other operations of micro-batch {m} are present"
            )
        if whole and any(split):
            raise InvalidDocument(f"{line}: {stage}B{m} is a whole backward, but a part of it is present too")
        if not whole and not all(split):
            absent = f"{stage}B{m}" if not any(split) else f"{stage}{KINDS[WEIGHT if split[0] else INPUT]}{m}"
            raise InvalidDocument(f"{line}: {absent} is missing, but {stage}F{m} is present")


def _check_order(places: dict[tuple[int, int, int], Place]) -> None:
    """Check that F comes before B or I, and I before W."""
    for operation, (rank, at) in places.items():
        kind, stage, m = operation
        before = (INPUT if kind == WEIGHT else FORWARD, stage, m)
        if kind != FORWARD and places[before][1] > at:
            raise InvalidDocument(
                f"{rank.cell(at)}: {_named(operation)} stands before {_named(before)} at {rank.cell(places[before][1])}"
            )


def _check_circles(ranks: list[_Rank], places: dict[tuple[int, int, int], Place], stages: int) -> None:
    """Run all operations that can run; where ranks are left, raise the circle in which they wait."""
    done: set[tuple[int, int, int]] = set()
    reached = dict.fromkeys((rank.line for rank in ranks), 0)
    waiting = {rank.line: rank for rank in ranks}
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            while reached[rank.line] < len(rank.operations):
                operation = _at(rank, reached[rank.line])
                needed = _needed(operation, places, stages)
                if needed is not None and needed not in done:
                    break
                done.add(operation)
                reached[rank.line] += 1
                moved = True
    stuck = [line for line, rank in waiting.items() if reached[line] < len(rank.operations)]
    if stuck:
        raise _circle(waiting, reached, places, stages, stuck[0])


def _circle(
    ranks: dict[int, _Rank],
    reached: dict[int, int],
    places: dict[tuple[int, int, int], Place],
    stages: int,
    line: int,
) -> InvalidDocument:
    path: list[int] = []
    waits: dict[int, str] = {}
    while line not in path:
        path.append(line)
        rank = ranks[line]
        operation = _at(rank, reached[line])
        needed = _needed(operation, places, stages)
        assert needed is not None
        other, at = places[needed]
        here = rank.cell(reached[line])
        waits[line] = f"{here}: {_named(operation)} waits for {_named(needed)} at {other.cell(at)}"
        line = other.line
    around = path[path.index(line) :]
    return InvalidDocument(
        "the schedule can never end: its ranks wait for each other in a circle",
        faults=tuple(Fault(f"/{each}/{ranks[each].columns[reached[each]]}", waits[each]) for each in around),
        remedy="move one of these operations after what it waits for",
    )


def _at(rank: _Rank, at: int) -> tuple[int, int, int]:
    kind, stage, m = rank.operations[at].tolist()
    return kind, stage, m


def _needed(
    operation: tuple[int, int, int], places: dict[tuple[int, int, int], Place], stages: int
) -> tuple[int, int, int] | None:
    """Return the operation that has to run first; None for a first stage's forward and for weight gradients."""
    kind, stage, m = operation
    if kind == FORWARD:
        return (FORWARD, stage - 1, m) if stage > 0 else None
    if kind == WEIGHT or stage == stages - 1:
        return None
    return (BACKWARD if (BACKWARD, stage + 1, m) in places else INPUT, stage + 1, m)


def _devices(allocation: Allocation, rank: _Rank) -> tuple[int, ...]:
    """Return the devices that hold exactly the stages of a rank."""
    stages = sorted(set(rank.operations[:, 1].tolist()))
    count = len(allocation.stages)
    if stages[-1] >= count:
        raise InvalidDocument(
            f"line {rank.line + 1} runs stage {stages[-1]}, but the plan has {count} stages",
            remedy="a plan with the schedule's number of stages",
        )
    devices: tuple[int, ...] = allocation.stages[stages[0]].devices
    on_devices = [s for s, stage in enumerate(allocation.stages) if set(stage.devices) & set(devices)]
    if stages != on_devices or any(allocation.stages[s].devices != devices for s in stages):
        raise InvalidDocument(
            f"line {rank.line + 1} runs stages {stages}, but the devices of stage {stages[0]} hold stages {on_devices}",
            remedy="a plan whose devices hold the stages as the ranks of the schedule do",
        )
    return devices

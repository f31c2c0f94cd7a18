"""Chimera: pipelines in opposite directions over the same devices (Li and Hoefler, SC 2021; ALGORITHMS 7.7).

Symbols: D is the number of groups of devices, one per stage; N is the number of micro-batches. f is half the number of
pipelines: f of them go down the groups and f go up. Each micro-batch goes through one of the pipelines.

The order is laid out at unit times, F = B = 1: whenever a device is free it starts a ready operation, backward before
forward, then of the highest stage, then of the first pipeline; micro-batches of a stage in turn. A forward on stage s
starts only while fewer than D - s of its pipeline, and than D / 2f, are in flight there. The paper gives figures
instead of such a rule. This rule has their spans, 2 N + D / f - 2 units wherever D divides N: bubbles of D / f - 2, for
N > D too, where the paper lets a basic unit of D micro-batches begin in the bubbles of the one before. At most D
micro-batches are in flight on a device, for f = 1 from D / 2 + 1 on the last ones.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row


class _Line(NamedTuple):
    """The forwards or the backwards of a stage; micro-batches from ``first`` on, ``number`` of them."""

    kind: int
    stage: int
    place: int
    pipeline: int
    first: int
    number: int
    most: int


def chimera(problem: Problem, allocation: Allocation) -> Orders:
    """Return the order of every group of devices.

    Raises ``UnsupportedRequest`` for pipelines that do not all lie once on each of the same groups of devices, and
    where replicas take turns.
    """
    groups = _groups(allocation)
    lines = _lines(allocation)
    of_group: list[list[int]] = [[] for _ in groups]
    for number, line in enumerate(lines):
        of_group[groups[allocation.stages[line.stage].devices]].append(number)
    for numbers in of_group:
        numbers.sort(key=lambda k: (lines[k].kind == FORWARD, -lines[k].place, lines[k].pipeline))
    ready = [line.number if line.kind == FORWARD and line.place == 0 else 0 for line in lines]
    done = [0] * len(lines)
    rows: list[list[tuple[int, int, int]]] = [[] for _ in groups]
    while any(done[k] < line.number for k, line in enumerate(lines)):
        chosen = [next((k for k in numbers if _starts(lines, ready, done, k)), None) for numbers in of_group]
        started = [(g, k) for g, k in enumerate(chosen) if k is not None]
        for g, k in started:
            line = lines[k]
            rows[g].append((line.kind, line.stage, line.first + done[k]))
            done[k] += 1
        for _g, k in started:
            if (after := _after(allocation, lines[k])) is not None:
                ready[after] += 1
    operations = (np.asarray(row, dtype=np.int32).reshape(-1, 3) for row in rows)
    return Orders("chimera", tuple(Row(devices, row) for devices, row in zip(groups, operations, strict=True)))


def _groups(allocation: Allocation) -> dict[tuple[int, ...], int]:
    """Return the groups of devices with their numbers, in the order of the first pipeline's stages."""
    groups = {stage.devices: g for g, stage in enumerate(allocation.pipelines[0].stages)}
    by_pipeline = [[stage.devices for stage in pipeline.stages] for pipeline in allocation.pipelines]
    devices = [device for group in groups for device in group]
    turns = any(stage.dispatch != "rows" and stage.replicas > 1 for stage in allocation.stages)
    same = all(len(each) == len(groups) and set(each) == set(groups) for each in by_pipeline)
    if len(by_pipeline) < 2 or turns or not same or len(set(devices)) < len(devices):
        raise UnsupportedRequest(
            "schedule 'chimera' needs two pipelines or more, each with one stage on every one of the same groups of "
            "devices, and replicas that split each micro-batch",
            remedy="planner 'chimera', which makes such plans",
        )
    return groups


def _lines(allocation: Allocation) -> list[_Line]:
    """Return the lines; the line of stage s and a kind has the number 2 s + kind."""
    depth, count = len(allocation.pipelines[0].stages), len(allocation.pipelines)
    lines = []
    for s, q in enumerate(allocation.pipeline_of):
        batches, place = allocation.micro_batches(s), s - q * depth
        most = max(1, min(depth - place, depth // count))
        lines += [_Line(kind, s, place, q, batches.start, len(batches), most) for kind in (FORWARD, BACKWARD)]
    return lines


def _starts(lines: list[_Line], ready: list[int], done: list[int], k: int) -> bool:
    """Return whether a line's next micro-batch has arrived and may start."""
    return done[k] < ready[k] and (lines[k].kind == BACKWARD or done[k] - done[k + 1] < lines[k].most)


def _after(allocation: Allocation, line: _Line) -> int | None:
    """Return the line in which a micro-batch is ready one unit later."""
    if line.kind == BACKWARD:
        before = allocation.previous(line.stage)
        return None if before is None else 2 * before + BACKWARD
    after = allocation.next(line.stage)
    return 2 * line.stage + BACKWARD if after is None else 2 * after + FORWARD

"""Extract observations from traces: times of operations and optimizer steps per stage, and of messages.

An operation's time is the median over micro-batches and ranks of the same device kind with the same number of rows. The
time of issuing, loading and releasing messages counts to the operation before it: the device is busy meanwhile, and a
plan has no other place for it. Waiting does not count: an operation starts once its messages have arrived.

A message was in transit from the start of its send to the start of the operation that waited for it. Where no operation
waited, its arrival was not observed and the message is left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import NamedTuple

from penstock.schemas.errors import InvalidPlan
from penstock.schemas.trace import RankTrace, Trace, TraceEvent
from penstock.solvers.costs.transfer import boundary_bytes, row_pairs
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.micro_batches import micro_batch_rows, slice_bounds
from penstock.solvers.model.problem import Problem

WAITED_NS = 30_000
"""Idle time before an operation, in ns, above which the rank is taken to have waited for its message."""

_INSTRUCTION = re.compile(r"(\d+)([A-Z_]+?)(\d*)(?:@\d+)?")
_OPERATIONS = frozenset("FBIWR")
_ISSUED = frozenset({"SEND_F", "SEND_B", "RECV_F", "RECV_B", "LOCAL_F", "LOCAL_B", "LOAD", "FREE", "VERSION"})


class StageTime(NamedTuple):
    """An operation of layers ``first`` to ``last`` on a number of rows; ``again``: the ranges that it recomputes."""

    device_kind: str
    rows: int
    letter: str
    first: int
    last: int
    again: tuple[tuple[int, int], ...]
    time_ns: float


class StepTime(NamedTuple):
    """The optimizer's step over a range of layers, of which each of ``sharers`` replicas steps its part."""

    first: int
    last: int
    sharers: int
    time_ns: float


class MessageTime(NamedTuple):
    """A message between two devices (indices of the problem)."""

    source: int
    target: int
    bytes: int
    time_ns: int


class Observations(NamedTuple):
    """The observations of one trace."""

    stages: tuple[StageTime, ...]
    steps: tuple[StepTime, ...]
    messages: tuple[MessageTime, ...]
    issue_ns: float


Event = tuple[int, str, int, TraceEvent]
"""Stage, instruction word, micro-batch (-1: none), and times."""


class _Step(NamedTuple):
    """One rank's step, instruction by instruction; ``recomputed``: where recomputation is a separate instruction."""

    trace: RankTrace
    device: int
    events: tuple[Event, ...]
    recomputed: frozenset[tuple[int, int]]


def observe(trace: Trace, problem: Problem, allocation: Allocation) -> Observations:
    """Read a trace of this allocation. Raises InvalidPlan for a rank whose device or stages are not in the plan."""
    steps = [_read(one, problem, allocation) for one in trace.ranks]
    busy: dict[StageTime, list[float]] = defaultdict(list)
    updates: dict[StepTime, list[float]] = defaultdict(list)
    issued: list[float] = []
    for step in steps:
        for event, extra_ns in _with_issues(step.events):
            stage, timed = allocation.stages[event[0]], event[3]
            time_ns = timed.end_ns - timed.start_ns
            if event[1] == "STEP":
                sharers = stage.replicas if problem.memory.shard_states else 1
                updates[StepTime(stage.first, stage.last, sharers, 0)].append(time_ns)
                continue
            key = _operation(step, event, problem, allocation)
            if key.rows:
                busy[key].append(time_ns + extra_ns)
                issued.append(extra_ns)
    return Observations(
        tuple(key._replace(time_ns=median(times)) for key, times in busy.items()),
        tuple(key._replace(time_ns=median(times)) for key, times in updates.items()),
        tuple(_messages(steps, problem, allocation)),
        median(issued) if issued else 0.0,
    )


def _read(trace: RankTrace, problem: Problem, allocation: Allocation) -> _Step:
    names = [device.name for device in problem.devices]
    events = []
    for event in trace.events:
        match = _INSTRUCTION.fullmatch(event.instruction)
        if match is not None:
            events.append((int(match[1]), match[2], int(match[3] or -1), event))
    unknown = [one[0] for one in events if one[0] >= len(allocation.stages)]
    if trace.device not in names or unknown:
        what = f"stage {unknown[0]}" if unknown else f"device {trace.device!r}"
        raise InvalidPlan(
            f"rank {trace.rank} of the trace names {what}, which the plan of the trace does not have",
            remedy="calibrate from a trace together with the plan that was run",
        )
    again = frozenset((stage, micro_batch) for stage, word, micro_batch, _ in events if word == "R")
    return _Step(trace, names.index(trace.device), tuple(events), again)


def _with_issues(events: Iterable[Event]) -> Iterator[tuple[Event, float]]:
    """Return operations and optimizer steps, each with the time of messages issued after it (or before the first)."""
    current: Event | None = None
    extra = 0.0
    for event in events:
        word, timed = event[1], event[3]
        if word in _OPERATIONS or word == "STEP":
            if current is not None:
                yield current, extra
                extra = 0.0
            current = event
        elif word in _ISSUED:
            extra += timed.end_ns - timed.start_ns
    if current is not None:
        yield current, extra


def _operation(step: _Step, event: Event, problem: Problem, allocation: Allocation) -> StageTime:
    number, letter, micro_batch, _ = event
    stage = allocation.stages[number]
    again: tuple[tuple[int, int], ...] = ()
    if letter == "R" or (letter in "BI" and (number, micro_batch) not in step.recomputed):
        again = stage.recompute
    rows = _rows(step.device, stage, micro_batch, problem, allocation)
    return StageTime(problem.devices[step.device].kind, rows, letter, stage.first, stage.last, again, 0)


def _rows(device: int, stage: Stage, micro_batch: int, problem: Problem, allocation: Allocation) -> int:
    """Return the number of rows of a micro-batch that a device of the stage computes."""
    count = allocation.num_micro_batches
    rows = micro_batch_rows(problem.global_batch_size, count, micro_batch % count)
    if stage.dispatch == "round_robin":
        return rows
    low, high = slice_bounds(rows, stage.replicas, stage.devices.index(device))
    return high - low


def _messages(steps: list[_Step], problem: Problem, allocation: Allocation) -> Iterator[MessageTime]:
    """Return the messages that an operation waited for, between ranks whose clocks agree well enough."""
    arrivals: dict[tuple[int, int, str, int], list[tuple[_Step, int]]] = defaultdict(list)
    for step in steps:
        free_ns = 0
        for stage, word, micro_batch, timed in step.events:
            if word in ("F", "B", "I") and timed.start_ns - free_ns > WAITED_NS:
                way = "F" if word == "F" else "B"
                arrivals[step.trace.step, stage, way, micro_batch].append((step, timed.start_ns))
            free_ns = timed.end_ns
    for step in steps:
        for stage, word, micro_batch, timed in step.events:
            if word not in ("SEND_F", "SEND_B"):
                continue
            other = allocation.next(stage) if word == "SEND_F" else allocation.previous(stage)
            if other is None:
                continue
            for reader, at_ns in arrivals[step.trace.step, other, word[-1], micro_batch]:
                transit_ns = at_ns - timed.start_ns
                unsure = step.trace.clock_error_ns + reader.trace.clock_error_ns
                size = _bytes(step.device, reader.device, (stage, other), micro_batch, problem, allocation)
                if size and transit_ns > 4 * unsure:
                    yield MessageTime(step.device, reader.device, size, transit_ns)


def _bytes(
    source: int, target: int, stages: tuple[int, int], micro_batch: int, problem: Problem, allocation: Allocation
) -> int:
    """Return the bytes that one device sends to another for a micro-batch; 0 when they share no rows."""
    sender, receiver = (allocation.stages[s] for s in stages)
    count = allocation.num_micro_batches
    rows = micro_batch_rows(problem.global_batch_size, count, micro_batch % count)
    shared = rows
    if sender.dispatch == receiver.dispatch == "rows":
        shared = sum(n for u, v, n in row_pairs(sender, receiver, rows) if (u, v) == (source, target))
    elif sender.replicas > 1 and receiver.replicas > 1:
        return 0
    ahead = sender.last < receiver.first
    return boundary_bytes(problem, sender.last if ahead else receiver.last, shared, 0 if ahead else 1)

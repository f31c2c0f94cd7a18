"""Random stage lines, and an independent checker of periodic patterns (ALGORITHMS A.3)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from penstock.schemas.program import FORWARD
from penstock.solvers.model.schedule import Pattern
from penstock.solvers.schedules.support.stage_line import StageLine


def make_line(
    stages: Sequence[tuple[int, int]],
    hops: Sequence[tuple[int, int]] | None = None,
    processor: Sequence[int] | None = None,
    kept_bytes: Sequence[int] | None = None,
    available_bytes: int = 10**9,
    fixed_bytes: Sequence[int] | None = None,
    most_in_flight: int = 10**6,
) -> StageLine:
    """Build a line from stages (F, B) and hops (forward, backward); by default each stage has its own processor."""
    count = len(stages)
    hops = hops or [(0, 0)] * (count - 1)
    places = tuple(processor or range(count))
    return StageLine(
        forward_ns=tuple(f for f, _ in stages),
        backward_ns=tuple(b for _, b in stages),
        hop_forward_ns=tuple(f for f, _ in hops),
        hop_backward_ns=tuple(b for _, b in hops),
        processor=places,
        fixed_bytes=tuple(fixed_bytes or [0] * count),
        kept_bytes=tuple(kept_bytes or [1] * count),
        work_bytes=(0,) * count,
        available_bytes=(available_bytes,) * (max(places) + 1),
        most_in_flight=most_in_flight,
    )


def random_line(draw: random.Random, most_stages: int = 7, shared: bool = False) -> StageLine:
    """Draw a line with positive durations; with ``shared``, processor 0 holds several stages, never two in a row."""
    count = draw.randint(1, most_stages)
    stages = [(draw.randint(1, 200), draw.randint(1, 300)) for _ in range(count)]
    hops = [(draw.randint(0, 80), draw.randint(0, 80)) for _ in range(count - 1)]
    places = list(range(count))
    if shared:
        places, next_own = [], 1
        for s in range(count):
            if draw.random() < 0.4 and (s == 0 or places[-1] != 0):
                places.append(0)
            else:
                places.append(next_own)
                next_own += 1
        numbers = {p: i for i, p in enumerate(dict.fromkeys(places))}
        places = [numbers[p] for p in places]
    return make_line(stages, hops, places, [draw.randint(1, 9) for _ in range(count)])


def with_memory(line: StageLine, available_bytes: int) -> StageLine:
    """Return the same line on processors with another memory size."""
    return replace(line, available_bytes=(available_bytes,) * len(line.available_bytes))


def faults(line: StageLine, pattern: Pattern, rounds: int = 12) -> list[str]:
    """List the faults of a pattern that is written out over some periods: dependencies, overlaps, memory."""
    period, messages = pattern.period_ns, []
    start = {
        (o.kind == FORWARD, o.stage): o.start_ns + o.shift * period for o in pattern.operations
    }  # of micro-batch 0
    last = line.size - 1
    busy: dict[object, list[tuple[int, int]]] = {}
    for s in range(line.size):
        for forward, duration in ((True, line.forward_ns[s]), (False, line.backward_ns[s])):
            busy.setdefault(line.processor[s], []).append((start[forward, s], duration))
    for s in range(last):
        gap = start[True, s + 1] - start[True, s] - line.forward_ns[s]
        back = start[False, s] - start[False, s + 1] - line.backward_ns[s + 1]
        moved = line.processor[s] != line.processor[s + 1]
        if gap < (line.hop_forward_ns[s] if moved else 0) or back < (line.hop_backward_ns[s] if moved else 0):
            messages.append(f"stage {s} and {s + 1} are too close")
    if start[False, last] < start[True, last] + line.forward_ns[last]:
        messages.append("the last backward comes too early")
    for resource, operations in busy.items():
        times = sorted((t + i * period, t + i * period + d) for t, d in operations for i in range(rounds) if d)
        if any(a[1] > b[0] for a, b in pairwise(times)):
            messages.append(f"processor {resource} is taken twice")
    for number, available in enumerate(line.available_bytes):
        if peak_bytes(line, pattern, number) > available:
            messages.append(f"processor {number} holds more than it has")
    return messages


def in_flight(line: StageLine, pattern: Pattern) -> list[int]:
    """Return the most micro-batches that each stage keeps, counted by a sweep over a written-out run."""
    return [max(level for level in _levels(line, pattern, [s], [1])) for s in range(line.size)]


def peak_bytes(line: StageLine, pattern: Pattern, processor: int) -> int:
    """Return the peak memory of a processor in bytes, by a sweep over a written-out run."""
    stages = [s for s in range(line.size) if line.processor[s] == processor]
    fixed = sum(line.fixed_bytes[s] for s in stages) + max(line.work_bytes[s] for s in stages)
    return fixed + max(_levels(line, pattern, stages, [line.kept_bytes[s] for s in stages]))


def _levels(line: StageLine, pattern: Pattern, stages: Sequence[int], size: Sequence[int]) -> list[int]:
    period = pattern.period_ns
    start = {(o.kind == FORWARD, o.stage): o.start_ns + o.shift * period for o in pattern.operations}
    rounds = 3 * max(o.shift for o in pattern.operations) + 4
    events = []
    for s, each in zip(stages, size, strict=True):
        for i in range(rounds):
            events.append((start[True, s] + i * period, 1, each))
            events.append((start[False, s] + line.backward_ns[s] + i * period, 0, -each))
    level, levels = 0, []
    for _time, _order, change in sorted(events):
        level += change
        levels.append(level)
    return levels

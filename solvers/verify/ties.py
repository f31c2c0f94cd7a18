"""Checks of tied sums for ``verify``: each once a round, when all copies are ready, and before the steps."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.collectives import ring_resources
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.ties import trained_ties
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Interval, Track
from penstock.solvers.verify.clock import Clock
from penstock.solvers.verify.reduction_times import reduction_ns


class Copies(NamedTuple):
    """A parameter that several stages of a pipeline hold: ``stages`` of all pipelines, and all their ``devices``.

    ``bytes``: one GPU's part of the parameter, where the GPUs of a model-parallel group hold it alike.
    """

    name: str
    bytes: int
    stages: tuple[int, ...]
    devices: tuple[int, ...]


@lru_cache(maxsize=32)
def copies_of(problem: Problem, allocation: Allocation) -> tuple[Copies, ...]:
    """Return the trainable tied parameters, in the order of the profile."""
    ties = []
    alike = 1 if problem.copies is None else problem.copies.holders
    for name, layers, size in trained_ties(problem):
        spans = [range(stage.first, stage.last + 1) for stage in allocation.stages]
        stages = tuple(s for s, span in enumerate(spans) if any(layer in span for layer in layers))
        apart = any(layer not in spans[s] for s in stages for layer in layers)
        if apart:
            devices = tuple(sorted({device for s in stages for device in allocation.stages[s].devices}))
            ties.append(Copies(name, ceil(Fraction(size, alike)), stages, devices))
    return tuple(ties)


def _expected(clock: Clock) -> tuple[Copies, ...]:
    return copies_of(clock.problem, clock.allocation) if clock.sums_ties else ()


def unreachable_copies(clock: Clock) -> list[str]:
    """Return a sentence for each tie whose devices are not connected."""
    return [
        f"Nothing connects the copies of the tied parameter {each.name!r}."
        for each in _expected(clock)
        if reduction_ns(clock.problem, 1, each.devices) >= NEVER_NS
    ]


def summed_in(clock: Clock) -> Iterator[tuple[tuple[int, ...], np.ndarray, np.ndarray]]:
    """Yield for each tie the resources of its ring, and the starts and ends of its sums."""
    for number, each in enumerate(_expected(clock)):
        times = [(one.start_ns, one.end_ns) for one in clock.timeline.ties if one.bucket == number]
        start, end = np.asarray(times, dtype=np.int64).reshape(-1, 2).T
        yield ring_resources(clock.problem, each.devices), start, end


def check_ties(clock: Clock, reduced: list[np.ndarray]) -> list[str]:
    """Check the sums of ties; ``reduced``: when the buckets of each stage have been added up, by round."""
    expected = _expected(clock)
    stated: list[list[Interval]] = [
        [one for one in clock.timeline.ties if one.bucket == k] for k in range(len(expected))
    ]
    counts = [clock.num_rounds(each.stages[0]) for each in expected]
    if [len(sums) for sums in stated] != counts or len(clock.timeline.ties) != sum(counts):
        return [f"The timeline has {len(clock.timeline.ties)} sums of tied parameters instead of {sum(counts)}."]
    faults = []
    for number, (each, sums) in enumerate(zip(expected, stated, strict=True)):
        takes = reduction_ns(clock.problem, each.bytes, each.devices)
        wrong = [one for one in sums if one.end_ns - one.start_ns != takes or one.stage != each.stages[0]]
        if wrong:
            faults.append(f"The sum of {each.name!r} takes {wrong[0].end_ns - wrong[0].start_ns} ns, not {takes} ns.")
        for track in clock.timeline.tracks:
            if not set(clock.stages_on(track)) & set(each.stages):
                continue
            ahead = [stated[k] for k in range(number) if set(clock.stages_on(track)) & set(expected[k].stages)]
            faults += _check_track(clock, track, (each, sums), ahead, reduced)
    return faults


def _check_track(
    clock: Clock,
    track: Track,
    tie: tuple[Copies, list[Interval]],
    ahead: list[list[Interval]],
    reduced: list[np.ndarray],
) -> list[str]:
    """Check that a tie's sums come after all earlier work of the track, and the track's steps after the sums."""
    each, sums = tie
    waits = f"The sum of {each.name!r} starts before {clock.name(track)} is there."
    goes_on = f"An optimizer step of {clock.name(track)} starts before {each.name!r} is summed."
    stages = clock.stages_on(track)
    if not clock.every:
        came = max([int(track.end_ns[-1]) if track.end_ns.size else 0, *(int(reduced[s].max()) for s in stages)])
        came = max([came, *(before[0].end_ns for before in ahead)])
        steps = _steps_of(clock, track)
        early = min(steps, default=sums[0].end_ns) < sums[0].end_ns
        return [waits] * (sums[0].start_ns < came) + [goes_on] * early
    lowest = min(s for s in stages if s in each.stages)
    places = np.flatnonzero((track.operations[:, 0] == STEP) & (track.operations[:, 1] == lowest))
    faults = []
    for at in places.tolist():
        number = int(track.operations[at, 2]) // clock.round_size(lowest)
        came = max(int(track.end_ns[at - 1]) if at else 0, int(reduced[lowest][number]))
        faults += [waits] * (sums[number].start_ns < came) + [goes_on] * int(track.start_ns[at] < sums[number].end_ns)
    return faults[:1]


def _steps_of(clock: Clock, track: Track) -> list[int]:
    """Return when the steps of a track that are in no row start."""
    starts = []
    for s in clock.stages_on(track):
        turn = [other.devices for other, _at in clock.of_stage[s]].index(track.devices)
        starts += [each.start_ns for each in clock.updates_of.get(s, [])[turn : turn + 1]]
    return starts

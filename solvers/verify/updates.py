"""Checks of reductions and optimizer steps for ``verify``: groups, when buckets are ready, and the steps after them.

A *reduction group* is neighbouring layers that the same stages hold, one of each pipeline: its gradients are summed
over all devices of those stages, bucket by bucket from its last layer down. With one pipeline the groups are the
stages. Buckets are numbered over all groups of the lowest stage from its last layer down, and on through the rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import BACKWARD, WEIGHT
from penstock.solvers.costs.buckets import Bucket, buckets
from penstock.solvers.costs.stage import stage_rows, update_ns
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Interval, Track
from penstock.solvers.verify.clock import Clock
from penstock.solvers.verify.reduction_times import reduction_ns
from penstock.solvers.verify.ties import check_ties


class LayerGroup(NamedTuple):
    """Layers ``first`` to ``last`` that ``stages``, one of each pipeline, hold on ``devices``."""

    first: int
    last: int
    stages: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def name(self) -> str:
        """The group's name in sentences."""
        if len(self.stages) == 1:
            return f"stage {self.stages[0]}"
        return f"layers {self.first} to {self.last} of stages {', '.join(map(str, self.stages))}"


@lru_cache(maxsize=32)
def groups_of(allocation: Allocation) -> tuple[LayerGroup, ...]:
    """Return the reduction groups, from the first layer on."""
    firsts = [[stage.first for stage in pipeline.stages] for pipeline in allocation.pipelines]
    offsets = [allocation.pipeline_of.index(p) for p in range(len(firsts))]
    edges = sorted({first for each in firsts for first in each})
    groups = []
    for low, high in pairwise([*edges, allocation.stages[-1].last + 1]):
        stages = tuple(offset + bisect_right(each, low) - 1 for each, offset in zip(firsts, offsets, strict=True))
        devices = tuple(dict.fromkeys(d for s in stages for d in allocation.stages[s].devices))
        groups.append(LayerGroup(low, high - 1, stages, devices))
    return tuple(groups)


class BucketRow(NamedTuple):
    """A group's buckets; ``place``: the number of the first, among the ``width`` of its lowest stage in a round."""

    group: LayerGroup
    buckets: tuple[Bucket, ...]
    place: int
    width: int


@lru_cache(maxsize=32)
def _chains(problem: Problem, allocation: Allocation) -> tuple[BucketRow, ...]:
    """Return the chain of each group that has gradients."""
    chains = [(group, buckets(problem, _whole(group))) for group in groups_of(allocation)]
    width: dict[int, int] = {}
    places = {}
    for group, chain in reversed(chains):
        places[group] = width.get(group.stages[0], 0)
        width[group.stages[0]] = places[group] + len(chain)
    return tuple(BucketRow(group, chain, places[group], width[group.stages[0]]) for group, chain in chains if chain)


def _whole(group: LayerGroup) -> Stage:
    return Stage(group.first, group.last, group.devices)


def _intervals(clock: Clock) -> dict[int, list[Interval]]:
    by_stage: dict[int, list[Interval]] = {}
    for each in sorted(clock.timeline.reductions):
        by_stage.setdefault(each.stage, []).append(each)
    return by_stage


def reduced_in(clock: Clock) -> Iterator[tuple[LayerGroup, np.ndarray, np.ndarray]]:
    """Yield the starts and ends of the reductions of each group."""
    stated = _intervals(clock)
    for chain in _chains(clock.problem, clock.allocation):
        stage, count = chain.group.stages[0], len(chain.buckets)
        intervals = [each for each in stated.get(stage, []) if 0 <= each.bucket % chain.width - chain.place < count]
        yield (
            chain.group,
            np.asarray([each.start_ns for each in intervals], dtype=np.int64),
            np.asarray([each.end_ns for each in intervals], dtype=np.int64),
        )


def check_updates(clock: Clock) -> list[str]:
    """Check that buckets follow their gradients, in a chain, and steps follow the buckets and the lane's operations."""
    if faults := _check_numbers(clock):
        return faults
    faults = []
    reduced = [np.zeros(clock.num_rounds(s), dtype=np.int64) for s in range(len(clock.allocation.stages))]
    stated = _intervals(clock)
    for chain in _chains(clock.problem, clock.allocation):
        intervals = stated.get(chain.group.stages[0], [])
        times = np.asarray([(each.start_ns, each.end_ns) for each in intervals], dtype=np.int64).reshape(
            -1, chain.width, 2
        )
        times = times[:, chain.place : chain.place + len(chain.buckets)]
        faults += _check_chain(clock, chain, times)
        for s in chain.group.stages:
            np.maximum(reduced[s], times[:, -1, 1], out=reduced[s])
    faults += check_ties(clock, reduced)
    return faults + (_check_steps(clock, reduced) if clock.every else _check_last_steps(clock, reduced))


def _check_numbers(clock: Clock) -> list[str]:
    """Check that every stage reduces its buckets once in every round."""
    expected = dict.fromkeys(range(len(clock.allocation.stages)), 0)
    for chain in _chains(clock.problem, clock.allocation):
        expected[chain.group.stages[0]] = chain.width * clock.num_rounds(chain.group.stages[0])
    stated = _intervals(clock)
    faults = []
    for s, count in expected.items():
        numbers = [each.bucket for each in stated.get(s, [])]
        if numbers != list(range(count)):
            shown = numbers if len(numbers) < 10 else f"[{numbers[0]}, {numbers[1]}, …, {numbers[-1]}]"
            faults.append(f"Stage {s} reduces buckets {shown} instead of {count}.")
    return faults


def _check_chain(clock: Clock, chain: BucketRow, times: np.ndarray) -> list[str]:
    """Check each bucket's duration, and that it starts when ready and after the one before.

    ``times``: (rounds, buckets, 2).
    """
    faults = []
    start, end = times[..., 0], times[..., 1]
    durations = np.asarray(_durations(clock.problem, chain), dtype=np.int64)
    wrong = np.argwhere(end - start != durations)
    if wrong.size:
        t, b = wrong[0]
        took = int(end[t, b] - start[t, b])
        faults.append(f"{_named(clock, chain, t, b)} takes {took} ns, not {int(durations[b])} ns.")
    before = np.concatenate(([0], end.ravel()[:-1])).reshape(end.shape)
    early = np.argwhere(start < np.maximum(before, _ready(clock, chain)))
    if early.size:
        t, b = early[0]
        faults.append(f"{_named(clock, chain, t, b)} starts at {int(start[t, b])} ns, before it is ready.")
    return faults


def _durations(problem: Problem, chain: BucketRow) -> list[int]:
    """Return the time of each bucket: pieces of the same layers share the time of all their bytes, to the ns."""
    inside = np.zeros(problem.num_layers + 1) if problem.copies is None else problem.copies.reduce_ns
    result = []
    for (first, last), same in groupby(chain.buckets, key=lambda bucket: (bucket.first, bucket.last)):
        sizes = [bucket.bytes for bucket in same]
        whole = int(inside[last + 1] - inside[first]) + reduction_ns(problem, sum(sizes), chain.group.devices)
        result += [high - low for low, high in pairwise(whole * k // len(sizes) for k in range(len(sizes) + 1))]
    return result


def _named(clock: Clock, chain: BucketRow, t: int, b: int) -> str:
    of_round = f" of round {t}" if clock.every else ""
    return f"Bucket {chain.place + b}{of_round} of stage {chain.group.stages[0]}"


def _ready(clock: Clock, chain: BucketRow) -> np.ndarray:
    """Return (rounds, buckets): when the round's last gradient has passed the bucket's layers on all lanes."""
    ready = np.zeros((clock.num_rounds(chain.group.stages[0]), len(chain.buckets)), dtype=np.int64)
    lows = [bucket.first for bucket in chain.buckets]
    for s in chain.group.stages:
        stage = clock.allocation.stages[s]
        kind = clock.problem.devices[stage.devices[0]].kind
        for track, at in clock.of_stage[s]:
            for t, i in _last_gradients(clock, s, track, at):
                costs = clock.problem.costs(kind, stage_rows(stage, int(clock.rows[track.operations[i, 2]])))
                sums = costs.weight_ns if track.operations[i, 0] == WEIGHT else costs.backward_ns
                lead = sums[lows] - sums[stage.first] if clock.early else 0
                np.maximum(ready[t], track.end_ns[i] - lead, out=ready[t])
    return ready


def _last_gradients(clock: Clock, s: int, track: Track, at: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (round, place in the track) of the last gradient operation of each complete round of a lane."""
    operations = track.operations[at]
    is_gradient = (operations[:, 0] == BACKWARD) | (operations[:, 0] == WEIGHT)
    number = operations[is_gradient, 2] // clock.round_size(s)
    last = np.full(clock.num_rounds(s) + 1, -1, dtype=np.int64)
    last[np.minimum(number, clock.num_rounds(s))] = at[is_gradient]
    yield from ((t, int(i)) for t, i in enumerate(last[:-1].tolist()) if i >= 0)


def _check_last_steps(clock: Clock, reduced: list[np.ndarray]) -> list[str]:
    """Check a flushed step: each stage steps once on each row, after the row's operations and the stage's buckets."""
    faults: list[str] = []
    steps = clock.updates_of
    for s, stage in enumerate(clock.allocation.stages):
        tracks = [track for track, _at in clock.of_stage[s]]
        intervals = steps.get(s, [])
        if len(intervals) != len(tracks):
            faults.append(f"Stage {s} has {len(intervals)} optimizer steps on {len(tracks)} rows.")
            continue
        for track, step in zip(tracks, intervals, strict=True):
            done = int(track.end_ns[-1]) if track.end_ns.size else 0
            if step.start_ns < max(done, int(reduced[s].max())):
                faults.append(f"The optimizer step of stage {s} on {clock.name(track)} starts too early.")
            if step.end_ns - step.start_ns != update_ns(clock.problem, stage):
                faults.append(f"The optimizer step of stage {s} on {clock.name(track)} has a wrong duration.")
    return faults + _check_steps_apart(clock, steps)


def _check_steps_apart(clock: Clock, steps: dict[int, list[Interval]]) -> list[str]:
    faults = []
    place = dict.fromkeys(steps, 0)
    for track in clock.timeline.tracks:
        intervals = []
        for s in clock.stages_on(track):
            if place.get(s, 0) < len(steps.get(s, [])):
                intervals.append(steps[s][place[s]])
                place[s] += 1
        times = sorted((each.start_ns, each.end_ns) for each in intervals)
        if any(b[0] < a[1] for a, b in pairwise(times)):
            faults.append(f"Two optimizer steps run at once on {clock.name(track)}.")
    return faults


def _check_steps(clock: Clock, reduced: list[np.ndarray]) -> list[str]:
    """Check the steps within rows: each follows its round's last bucket, and the updates list it as it runs."""
    faults = []
    listed = clock.updates_of
    for s in range(len(clock.allocation.stages)):
        ran: list[tuple[int, int]] = []
        for track, at in clock.of_stage[s]:
            places = at[track.operations[at, 0] == STEP]
            number = track.operations[places, 2] // clock.round_size(s)
            early = np.flatnonzero(track.start_ns[places] < reduced[s][number])
            if early.size:
                faults.append(
                    f"The optimizer step of round {int(number[early[0]])} of stage {s} on {clock.name(track)} starts "
                    "before the round's gradients are reduced."
                )
            ran += zip(track.start_ns[places].tolist(), track.end_ns[places].tolist(), strict=True)
        if sorted(ran) != sorted((each.start_ns, each.end_ns) for each in listed.get(s, [])):
            faults.append(f"The updates listed for stage {s} are not the optimizer steps of its rows.")
    return faults

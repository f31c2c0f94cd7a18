"""Checks of a timeline's times for ``verify``: durations, dependencies, one at a time, reductions, updates."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, RECOMPUTE, WEIGHT
from penstock.solvers.allocation import Allocation
from penstock.solvers.batching import micro_batch_rows
from penstock.solvers.costs import (
    UNREACHABLE_NS,
    Bucket,
    Transfer,
    all_reduce_ns,
    buckets,
    ring_resources,
    stage_costs,
    stage_rows,
    transfer,
    update_ns,
)
from penstock.solvers.problem import Problem
from penstock.solvers.timeline import Interval, Timeline, Track


@dataclass(frozen=True)
class Clock:
    """A timeline with what its times have to be checked against; ``early``: buckets may overlap the backward."""

    problem: Problem
    allocation: Allocation
    timeline: Timeline
    early: bool

    @cached_property
    def rows(self) -> np.ndarray:
        """Samples of each micro-batch, (M,)."""
        count = self.allocation.num_micro_batches
        return np.asarray([micro_batch_rows(self.problem.global_batch_size, count, m) for m in range(count)])

    @cached_property
    def completed(self) -> np.ndarray:
        """(2, S, M): when all lanes have run the forward, or the gradient of the input, of a micro-batch."""
        found = np.full((2, len(self.allocation.stages), self.allocation.num_micro_batches), -1, dtype=np.int64)
        for track in self.timeline.tracks:
            kinds, stages, batches = track.operations.T
            for way, mask in ((0, kinds == FORWARD), (1, (kinds == BACKWARD) | (kinds == INPUT))):
                np.maximum.at(found[way], (stages[mask], batches[mask]), track.end_ns[mask])
        return found

    def other(self, s: int, way: int) -> int | None:
        """The stage that a stage sends to in a direction."""
        return self.allocation.next(s) if way == 0 else self.allocation.previous(s)

    def sizes(self) -> list[int]:
        """The distinct row counts of micro-batches."""
        return [int(size) for size in np.unique(self.rows)]

    @cached_property
    def updates_of(self) -> dict[int, list[Interval]]:
        """The optimizer steps of each stage, in the order of its tracks."""
        found: dict[int, list[Interval]] = {}
        for each in self.timeline.updates:
            found.setdefault(each.stage, []).append(each)
        return found

    @cached_property
    def of_stage(self) -> list[list[tuple[Track, np.ndarray]]]:
        """For each stage its tracks, with the indices of its operations in them."""
        found: list[list[tuple[Track, np.ndarray]]] = [[] for _ in self.allocation.stages]
        for track in self.timeline.tracks:
            for s in self.held(track):
                found[s].append((track, np.flatnonzero(track.operations[:, 1] == s)))
        return found

    def parts(self) -> Iterator[tuple[Track, int, np.ndarray]]:
        """Each (track, stage, indices of the stage's operations in the track)."""
        for s, own in enumerate(self.of_stage):
            for track, at in own:
                yield track, s, at

    @cached_property
    def _stages_of(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for s, stage in enumerate(self.allocation.stages):
            for device in stage.devices:
                found.setdefault(device, []).append(s)
        return found

    def held(self, track: Track) -> list[int]:
        """The stages of a track's devices."""
        return self._stages_of[track.devices[0]]

    @cached_property
    def _transfers_of(self) -> dict[tuple[int, int], np.ndarray]:
        sent = self.timeline.transfers
        if not sent.stage.size:
            return {}
        order = np.lexsort((sent.direction, sent.stage))
        keys = np.stack([sent.stage[order], sent.direction[order]], axis=1)
        new = np.flatnonzero((keys[1:] != keys[:-1]).any(axis=1)) + 1
        groups = np.split(order, new)
        return {(int(sent.stage[group[0]]), int(sent.direction[group[0]])): group for group in groups}

    def sent_by(self, s: int, way: int) -> np.ndarray:
        """The places of the transfers that a stage sends in a direction."""
        return self._transfers_of.get((s, way), np.empty(0, dtype=np.int64))

    def name(self, track: Track) -> str:
        """The track's first device."""
        return self.problem.devices[track.devices[0]].name


def check_operations(clock: Clock) -> list[str]:
    """Durations, one operation at a time on a lane, and the order of a micro-batch's operations within a stage."""
    faults = []
    for track in clock.timeline.tracks:
        late = np.flatnonzero(track.start_ns[1:] < track.end_ns[:-1])
        if late.size:
            faults.append(
                f"{clock.name(track)} starts {_named(track, int(late[0]) + 1)} at "
                f"{int(track.start_ns[late[0] + 1])} ns, before {_named(track, int(late[0]))} ends."
            )
        if track.start_ns.size and int(track.start_ns.min()) < 0:
            faults.append(f"{clock.name(track)} starts an operation before time 0.")
    for track, s, at in clock.parts():
        faults += _check_durations(clock, track, s, at) + _check_within(clock, track, s, at)
    return faults


def _named(track: Track, i: int) -> str:
    kind, s, m = (int(v) for v in track.operations[i])
    return f"{KINDS[kind]}{m} of stage {s}"


def _check_durations(clock: Clock, track: Track, s: int, at: np.ndarray) -> list[str]:
    operations = track.operations[at]
    apart = bool((operations[:, 0] == RECOMPUTE).any())
    expected = np.zeros(len(at), dtype=np.int64)
    for size in clock.sizes():
        cost = stage_costs(clock.problem, clock.allocation.stages[s], size)
        again = 0 if apart else cost.recompute_ns
        by_kind = np.zeros(5, dtype=np.int64)
        by_kind[[FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE]] = (
            cost.forward_ns,
            cost.backward_ns + again,
            cost.backward_ns - cost.weight_ns + again,
            cost.weight_ns,
            cost.recompute_ns,
        )
        mask = clock.rows[operations[:, 2]] == size
        expected[mask] = by_kind[operations[mask, 0]]
    wrong = np.flatnonzero(track.end_ns[at] - track.start_ns[at] != expected)
    if not wrong.size:
        return []
    i = int(at[wrong[0]])
    took = int(track.end_ns[i] - track.start_ns[i])
    return [f"{_named(track, i)} on {clock.name(track)} takes {took} ns instead of {int(expected[wrong[0]])} ns."]


def _check_within(clock: Clock, track: Track, s: int, at: np.ndarray) -> list[str]:
    """Forward before backward, input gradient before weight gradient, recomputation between, on one lane."""
    starts = np.full((5, clock.allocation.num_micro_batches), -1, dtype=np.int64)
    ends = starts.copy()
    operations = track.operations[at]
    starts[operations[:, 0], operations[:, 2]] = track.start_ns[at]
    ends[operations[:, 0], operations[:, 2]] = track.end_ns[at]
    needs = [(FORWARD, BACKWARD), (FORWARD, INPUT), (INPUT, WEIGHT), (FORWARD, RECOMPUTE)]
    needs += [(RECOMPUTE, BACKWARD), (RECOMPUTE, INPUT)]
    faults = []
    for before, after in needs:
        early = np.flatnonzero((starts[after] >= 0) & (starts[before] >= 0) & (starts[after] < ends[before]))
        if early.size:
            m = int(early[0])
            faults.append(
                f"{KINDS[after]}{m} of stage {s} on {clock.name(track)} starts before its {KINDS[before]}{m} ends."
            )
    return faults


def check_network(clock: Clock) -> list[str]:
    """Every transfer once, after its producer, before its consumer; channels and links carry one at a time."""
    moves = {
        (s, way, size): transfer(clock.problem, clock.allocation, s, size, way)
        for s in range(len(clock.allocation.stages))
        for way in (0, 1)
        for size in clock.sizes()
    }
    if faults := _check_reachable(clock, moves):
        return faults
    sent = clock.timeline.transfers
    shape = clock.completed.shape
    seen = np.zeros(shape, dtype=np.int64)
    keys = (sent.direction, sent.stage, sent.micro_batch)
    np.add.at(seen, keys, 1)
    arrival = np.full(shape, -1, dtype=np.int64)
    start, end = arrival.copy(), arrival.copy()
    start[keys], end[keys] = sent.start_ns, sent.end_ns
    faults = []
    for (s, way, size), move in moves.items():
        batches = np.asarray(clock.allocation.micro_batches(s))
        batches = batches[clock.rows[batches] == size]
        faults += _check_edge(clock, (s, way), batches, move, (seen[way, s], start[way, s], end[way, s]))
        other = clock.other(s, way)
        if other is not None:
            arrival[way, other, batches] = (clock.completed if move is None else end)[way, s, batches]
    return faults + _check_inputs(clock, arrival) + _check_resources(clock, moves)


Moves = dict[tuple[int, int, int], Transfer | None]


def _check_reachable(clock: Clock, moves: Moves) -> list[str]:
    faults = []
    for (s, way, _size), move in moves.items():
        if move is not None and move.duration_ns >= UNREACHABLE_NS:
            faults.append(f"Nothing connects the devices of stage {s} with those of stage {clock.other(s, way)}.")
    for s, stage in enumerate(clock.allocation.stages):
        if all_reduce_ns(clock.problem, 1, stage.devices) >= UNREACHABLE_NS:
            faults.append(f"Nothing connects the replicas of stage {s}.")
    return sorted(set(faults))


def _check_edge(
    clock: Clock,
    edge: tuple[int, int],
    batches: np.ndarray,
    move: Transfer | None,
    known: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> list[str]:
    s, way = edge
    what = f"{('activation', 'gradient')[way]} that stage {s} sends"
    seen, start, end = (each[batches] for each in known)
    expected = 0 if move is None else 1
    if wrong := batches[seen != expected].tolist():
        return [f"The {what} travels {int(known[0][wrong[0]])} times for micro-batch {wrong[0]}, not {expected} times."]
    if move is None:
        return []
    faults = []
    if wrong := batches[end - start != move.duration_ns].tolist():
        took = int(known[2][wrong[0]] - known[1][wrong[0]])
        faults.append(f"The {what} for micro-batch {wrong[0]} takes {took} ns instead of {move.duration_ns} ns.")
    if wrong := batches[start < clock.completed[way, s, batches]].tolist():
        faults.append(f"The {what} for micro-batch {wrong[0]} leaves before it has been computed.")
    return faults


def _check_inputs(clock: Clock, arrival: np.ndarray) -> list[str]:
    faults = []
    for track, s, at in clock.parts():
        kinds, _own, batches = track.operations[at].T
        for way, mask in ((0, kinds == FORWARD), (1, (kinds == BACKWARD) | (kinds == INPUT))):
            early = np.flatnonzero(mask & (track.start_ns[at] < arrival[way, s, batches]))
            if early.size:
                i = int(at[early[0]])
                faults.append(f"{_named(track, i)} on {clock.name(track)} starts before its input has arrived.")
    return faults


def _check_resources(clock: Clock, moves: Moves) -> list[str]:
    """No two transfers or reductions at once on a resource; private channels carry transfers only."""
    used: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    sent, rules = clock.timeline.transfers, clock.problem.rules
    for (s, way, size), move in moves.items():
        if move is None:
            continue
        places = clock.sent_by(s, way)
        places = places[clock.rows[sent.micro_batch[places]] == size]
        edge = f"the channel of stages {min(s, s - 1 + 2 * (1 - way))} and {max(s, s - 1 + 2 * (1 - way))}"
        names = [edge] if rules.channel == "half" else [f"{edge}, direction {way}"] if rules.channel == "full" else []
        if rules.shared:
            names = [clock.problem.network.resources[r].name for r in move.resources]
        for name in names:
            used.setdefault(name, []).append((sent.start_ns[places], sent.end_ns[places]))
    if rules.shared:
        for each in clock.timeline.reductions:
            for r in ring_resources(clock.problem, clock.allocation.stages[each.stage].devices):
                name = clock.problem.network.resources[r].name
                used.setdefault(name, []).append((np.asarray([each.start_ns]), np.asarray([each.end_ns])))
    faults = []
    for name, intervals in sorted(used.items()):
        start = np.concatenate([low for low, _high in intervals])
        end = np.concatenate([high for _low, high in intervals])
        order = np.lexsort((end, start))
        twice = np.flatnonzero(start[order][1:] < end[order][:-1])
        if twice.size:
            faults.append(f"Two transfers use {name} at {int(start[order][twice[0] + 1])} ns.")
    return faults


def check_updates(clock: Clock) -> list[str]:
    """Buckets in a chain after their gradients, optimizer steps after the buckets and the lane's operations."""
    timeline = clock.timeline
    faults: list[str] = []
    reduced = np.zeros(len(clock.allocation.stages), dtype=np.int64)
    chains: dict[int, list[Interval]] = {}
    for each in sorted(timeline.reductions):
        chains.setdefault(each.stage, []).append(each)
    for s in range(len(clock.allocation.stages)):
        own = chains.get(s, [])
        faults += _check_chain(clock, s, own)
        reduced[s] = max((each.end_ns for each in own), default=0)
    steps = clock.updates_of
    for s, stage in enumerate(clock.allocation.stages):
        tracks = [track for track, _at in clock.of_stage[s]]
        own = steps.get(s, [])
        if len(own) != len(tracks):
            faults.append(f"Stage {s} has {len(own)} optimizer steps on {len(tracks)} rows.")
            continue
        for track, step in zip(tracks, own, strict=True):
            done = int(track.end_ns[-1]) if track.end_ns.size else 0
            if step.start_ns < max(done, int(reduced[s])):
                faults.append(f"The optimizer step of stage {s} on {clock.name(track)} starts too early.")
            if step.end_ns - step.start_ns != update_ns(clock.problem, stage):
                faults.append(f"The optimizer step of stage {s} on {clock.name(track)} has a wrong duration.")
    return faults + _check_steps_apart(clock, steps)


def _check_steps_apart(clock: Clock, steps: dict[int, list[Interval]]) -> list[str]:
    faults = []
    place = dict.fromkeys(steps, 0)
    for track in clock.timeline.tracks:
        own = []
        for s in clock.held(track):
            if place.get(s, 0) < len(steps.get(s, [])):
                own.append(steps[s][place[s]])
                place[s] += 1
        times = sorted((each.start_ns, each.end_ns) for each in own)
        if any(b[0] < a[1] for a, b in pairwise(times)):
            faults.append(f"Two optimizer steps run at once on {clock.name(track)}.")
    return faults


def _check_chain(clock: Clock, s: int, own: list[Interval]) -> list[str]:
    stage = clock.allocation.stages[s]
    rules = replace(clock.problem.rules, overlap_all_reduce=clock.early)
    problem = replace(clock.problem, rules=rules)
    expected: tuple[Bucket, ...] = buckets(problem, stage, clock.sizes()[-1])
    if [each.bucket for each in own] != list(range(len(expected))):
        return [f"Stage {s} reduces buckets {[each.bucket for each in own]} instead of {len(expected)}."]
    faults = []
    reached = 0
    for each, bucket in zip(own, expected, strict=True):
        if each.end_ns - each.start_ns != bucket.duration_ns:
            faults.append(
                f"Bucket {each.bucket} of stage {s} takes {each.end_ns - each.start_ns} ns, "
                f"not {bucket.duration_ns} ns."
            )
        if each.start_ns < max(reached, _bucket_ready(clock, problem, s, bucket)):
            faults.append(f"Bucket {each.bucket} of stage {s} starts at {each.start_ns} ns, before it is ready.")
        reached = each.end_ns
    return faults


def _bucket_ready(clock: Clock, problem: Problem, s: int, bucket: Bucket) -> int:
    """When every lane's last backward has passed the bucket's layers."""
    ready = 0
    stage = clock.allocation.stages[s]
    kind = problem.devices[stage.devices[0]].kind
    for track, at in clock.of_stage[s]:
        operations = track.operations[at]
        last = np.flatnonzero((operations[:, 0] == BACKWARD) | (operations[:, 0] == WEIGHT))
        if not last.size:
            continue
        i = int(last[-1])
        costs = problem.costs(kind, stage_rows(stage, int(clock.rows[operations[i, 2]])))
        sums = costs.weight_ns if operations[i, 0] == WEIGHT else costs.backward_ns
        lead = int(sums[bucket.first] - sums[stage.first]) if clock.early else 0
        ready = max(ready, int(track.end_ns[at[i]]) - lead)
    return ready

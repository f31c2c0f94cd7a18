"""Checks of a timeline's times for ``verify``: durations, dependencies, transfers, and one user of each resource."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD, INPUT, KINDS, RECOMPUTE, WEIGHT
from penstock.solvers.costs.collectives import ring_resources
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.stage import stage_costs, update_ns
from penstock.solvers.costs.transfer import Transfer, transfer
from penstock.solvers.model.schedule import STEP
from penstock.solvers.model.timeline import Track
from penstock.solvers.verify.clock import Clock
from penstock.solvers.verify.reduction_times import reduction_ns
from penstock.solvers.verify.ties import summed_in, unreachable_copies
from penstock.solvers.verify.updates import groups_of, reduced_in


def check_operations(clock: Clock) -> list[str]:
    """Check durations, that a lane runs one operation at a time, and a micro-batch's order within a stage."""
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
    return f"{KINDS[kind]}{m} of stage {s}" if kind < STEP else f"the optimizer step after micro-batch {m} of stage {s}"


def _check_durations(clock: Clock, track: Track, s: int, at: np.ndarray) -> list[str]:
    operations = track.operations[at]
    apart = bool((operations[:, 0] == RECOMPUTE).any())
    expected = np.zeros(len(at), dtype=np.int64)
    for size in clock.sizes():
        cost = stage_costs(clock.problem, clock.allocation.stages[s], size)
        again = 0 if apart else cost.recompute_ns
        by_kind = np.zeros(STEP + 1, dtype=np.int64)
        by_kind[[FORWARD, BACKWARD, INPUT, WEIGHT, RECOMPUTE, STEP]] = (
            cost.forward_ns,
            cost.backward_ns + again,
            cost.backward_ns - cost.weight_ns + again,
            cost.weight_ns,
            cost.recompute_ns,
            update_ns(clock.problem, clock.allocation.stages[s]),
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
    """Check, on one lane, forward before backward, input before weight gradient, and recomputation between."""
    starts = np.full((STEP + 1, clock.allocation.num_micro_batches), -1, dtype=np.int64)
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
    """Check that every transfer runs once, between producer and consumer, and one at a time on each resource."""
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
        if move is not None and move.duration_ns >= NEVER_NS:
            faults.append(f"Nothing connects the devices of stage {s} with those of stage {clock.other(s, way)}.")
    for group in groups_of(clock.allocation):
        if reduction_ns(clock.problem, 1, group.devices) >= NEVER_NS:
            faults.append(f"Nothing connects the replicas of {group.name}.")
    return sorted({*faults, *unreachable_copies(clock)})


def _check_edge(
    clock: Clock,
    edge: tuple[int, int],
    batches: np.ndarray,
    move: Transfer | None,
    table: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> list[str]:
    s, way = edge
    what = f"{('activation', 'gradient')[way]} that stage {s} sends"
    seen, start, end = (each[batches] for each in table)
    expected = 0 if move is None else 1
    if wrong := batches[seen != expected].tolist():
        return [f"The {what} travels {int(table[0][wrong[0]])} times for micro-batch {wrong[0]}, not {expected} times."]
    if move is None:
        return []
    faults = []
    if wrong := batches[end - start != move.duration_ns].tolist():
        took = int(table[2][wrong[0]] - table[1][wrong[0]])
        faults.append(f"The {what} for micro-batch {wrong[0]} takes {took} ns instead of {move.duration_ns} ns.")
    if wrong := batches[start < clock.completed[way, s, batches]].tolist():
        faults.append(f"The {what} for micro-batch {wrong[0]} leaves before it has been computed.")
    return faults


def _check_inputs(clock: Clock, arrival: np.ndarray) -> list[str]:
    faults = []
    for track, s, at in clock.parts():
        kinds, _stages, batches = track.operations[at].T
        for way, mask in ((0, kinds == FORWARD), (1, (kinds == BACKWARD) | (kinds == INPUT))):
            early = np.flatnonzero(mask & (track.start_ns[at] < arrival[way, s, batches]))
            if early.size:
                i = int(at[early[0]])
                faults.append(f"{_named(track, i)} on {clock.name(track)} starts before its input has arrived.")
    return faults


def _check_resources(clock: Clock, moves: Moves) -> list[str]:
    """Check that no resource has two transfers or reductions at once; private channels carry transfers only."""
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
        times = sent.start_ns[places], sent.end_ns[places]
        for name in names:
            used.setdefault(name, []).append(times)
    if rules.shared:
        for group, start, end in reduced_in(clock):
            for r in ring_resources(clock.problem, group.devices):
                used.setdefault(clock.problem.network.resources[r].name, []).append((start, end))
        for resources, start, end in summed_in(clock):
            for r in resources:
                used.setdefault(clock.problem.network.resources[r].name, []).append((start, end))
    first_overlap: dict[tuple[int, ...], int | None] = {}  # for each set of arrays: resources often share their times
    faults = []
    for name, intervals in sorted(used.items()):
        same = tuple(id(array) for pair in intervals for array in pair)
        if same not in first_overlap:
            first_overlap[same] = _first_twice(intervals)
        if (at_ns := first_overlap[same]) is not None:
            faults.append(f"Two transfers use {name} at {at_ns} ns.")
    return faults


def _first_twice(intervals: Sequence[tuple[np.ndarray, np.ndarray]]) -> int | None:
    """Return the start of the first interval that overlaps the interval before it; None without an overlap."""
    start = np.concatenate([low for low, _high in intervals])
    end = np.concatenate([high for _low, high in intervals])
    order = np.lexsort((end, start))
    twice = np.flatnonzero(start[order][1:] < end[order][:-1])
    return int(start[order][twice[0] + 1]) if twice.size else None

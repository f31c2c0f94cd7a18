"""Pins: layers that only some devices may hold. Every planner's allocations are re-placed to keep them.

First devices are exchanged (a bipartite matching that changes as little as it can); where stages themselves break a
pin, they lose replicas, or are cut between layers that no device may hold together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Problem, per_problem
from penstock.solvers.model.schedule import Orders, Row, Schedule

Devices = frozenset[int]
MOST_COUNTED = 62
"""Most pins that are counted, one to a bit."""


def allowed_devices(problem: Problem, first: int, last: int) -> Devices:
    """Return the devices that may hold all of the layers ``first`` to ``last``."""
    allowed = frozenset(range(problem.num_devices))
    for pin in problem.pins:
        if pin.first <= last and first <= pin.last:
            allowed &= pin.devices
    return allowed


@per_problem
def devices_allowed(problem: Problem) -> np.ndarray:
    """Return (L + 1, L + 1): how many devices may hold all layers [i, j) by the first ``MOST_COUNTED`` pins."""
    first, stop = np.ogrid[: problem.num_layers + 1, : problem.num_layers + 1]
    named = np.zeros((problem.num_layers + 1, problem.num_layers + 1), dtype=np.int64)
    for number, pin in enumerate(problem.pins[:MOST_COUNTED]):
        named |= np.where((pin.first < stop) & (first <= pin.last), 1 << number, 0)
    marks, where = np.unique(named, return_inverse=True)
    counts = []
    for mark in marks.tolist():
        device_sets = [pin.devices for number, pin in enumerate(problem.pins[:MOST_COUNTED]) if mark >> number & 1]
        counts.append(len(frozenset(range(problem.num_devices)).intersection(*device_sets)))
    return np.asarray(counts)[where].reshape(named.shape)


def last_ends(problem: Problem, devices: Sequence[int]) -> np.ndarray:
    """Return (L + 1,): for each layer the last end of a stage that begins there and may be held by all of the devices.

    The entry is the layer itself where they may not hold it.
    """
    layers = np.arange(problem.num_layers + 1)
    broken = layers == problem.num_layers
    for pin in problem.pins:
        if not pin.devices.issuperset(devices):
            broken = broken | ((pin.first <= layers) & (layers <= pin.last))
    return np.asarray(np.minimum.accumulate(np.where(broken, layers, problem.num_layers)[::-1])[::-1])


def by_layers(problem: Problem, devices: Sequence[int]) -> tuple[int, ...]:
    """Return the devices in the order of the layers that pins let them hold (a stable sort)."""
    return tuple(sorted(devices, key=lambda device: centre(problem, device)))


def centre(problem: Problem, device: int) -> Fraction:
    """Return twice the middle of the layers that pins let a device hold; of all layers if no pin names it."""
    named = [pin.first + pin.last for pin in problem.pins if device in pin.devices]
    return Fraction(sum(named), len(named)) if named else Fraction(problem.num_layers - 1)


def broken_pin(problem: Problem, allocation: Allocation) -> str | None:
    """Return a sentence about the first stage that breaks a pin; None when all are kept."""
    for stage in allocation.stages:
        for pin in problem.pins:
            outside = [d for d in stage.devices if d not in pin.devices]
            if outside and pin.first <= stage.last and stage.first <= pin.last:
                name = problem.devices[outside[0]].name
                return (
                    f"layers {max(pin.first, stage.first)}–{min(pin.last, stage.last)} are pinned to "
                    f"{', '.join(sorted(problem.devices[d].name for d in pin.devices))}, but are held by {name}"
                )
    return None


def unkeepable_pin(problem: Problem) -> str | None:
    """Return why no plan at all can keep the pins; None where that is not certain."""
    if fewest_pieces(problem) is not None:
        return None
    for layer in range(problem.num_layers):
        if not allowed_devices(problem, layer, layer):
            return f"layer {layer} ({problem.layer_names[layer]}) is pinned twice, to devices that have none in common"
    return (
        "the pins keep layers apart that the profile does not allow to be cut: no cuttable position lies between them"
    )


def fewest_pieces(problem: Problem) -> list[tuple[int, int]] | None:
    """Return all layers in the fewest pieces that keep the pins; None where the allowed cuts make that impossible.

    A device that may hold a whole piece may hold any part of it, so greedily choosing the longest pieces is optimal.
    """
    whole = 0, problem.num_layers - 1
    return _segments(problem, *whole) if problem.pins else [whole]


def keep_pins(problem: Problem, allocation: Allocation) -> Allocation | None:
    """Return the allocation, changed as little as needed to keep the pins; None if no such change is found."""
    if broken_pin(problem, allocation) is None:
        return allocation
    exchanged_plan = moved(problem, allocation)
    if exchanged_plan is not None:
        return exchanged_plan
    split = _split(problem, allocation)
    return None if split is None else moved(problem, split)


def keep_pins_of_schedule(
    problem: Problem, allocation: Allocation, schedule: Schedule
) -> tuple[Allocation, Schedule] | None:
    """Return an allocation that keeps the pins by exchanging devices only, so that its schedule still fits."""
    if broken_pin(problem, allocation) is None:
        return allocation, schedule
    places = _places(problem, allocation, lambda stage: allowed_devices(problem, stage.first, stage.last))
    if places is None:
        return None
    if isinstance(schedule, Orders):
        rows = tuple(Row(tuple(places[d] for d in row.devices), row.operations) for row in schedule.rows)
        schedule = replace(schedule, rows=rows)
    return allocation.on(places), schedule


def moved(problem: Problem, allocation: Allocation) -> Allocation | None:
    """Return the allocation with devices exchanged so that it keeps the pins; None if that is impossible."""
    if broken_pin(problem, allocation) is None:
        return allocation
    return exchanged(problem, allocation, lambda stage: allowed_devices(problem, stage.first, stage.last))


def exchanged(problem: Problem, allocation: Allocation, allowed: Callable[[Stage], Devices]) -> Allocation | None:
    """Return the allocation on devices that each of their stages allows, few of them changed; None if impossible."""
    places = _places(problem, allocation, allowed)
    return None if places is None else allocation.on(places)


def _places(problem: Problem, allocation: Allocation, allowed_by: Callable[[Stage], Devices]) -> dict[int, int] | None:
    """Return the replacement of each used device; it prefers the device itself, then its node, then its kind."""
    used = sorted({d for stage in allocation.stages for d in stage.devices})
    wanted: dict[int, list[int]] = {}
    for device in used:
        allowed = frozenset(range(problem.num_devices))
        for stage in allocation.stages:
            if device in stage.devices:
                allowed &= allowed_by(stage)
        here = problem.devices[device]
        wanted[device] = sorted(
            allowed,
            key=lambda d, here=here, device=device: (  # type: ignore[misc]
                d != device,
                problem.devices[d].kind != here.kind,
                problem.devices[d].node != here.node,
                d,
            ),
        )
    return matching(wanted)


def matching(wanted: dict[int, list[int]]) -> dict[int, int] | None:
    """Return one distinct value for each key, by augmenting paths, keys with fewest values first."""
    holder: dict[int, int] = {}
    for key in sorted(wanted, key=lambda k: (len(wanted[k]), k)):
        path = _augmenting(key, wanted, holder)
        if path is None:
            return None
        for value, owner in path:
            holder[value] = owner
    return {owner: value for value, owner in holder.items()}


def _augmenting(key: int, wanted: dict[int, list[int]], holder: dict[int, int]) -> list[tuple[int, int]] | None:
    """Return the (value, new owner) pairs of a shortest path from ``key`` to a free value."""
    came_from: dict[int, int] = {}
    queue = deque([key])
    while queue:
        owner = queue.popleft()
        for value in wanted[owner]:
            if value in came_from:
                continue
            came_from[value] = owner
            if value not in holder:
                return _path(value, key, came_from, holder)
            queue.append(holder[value])
    return None


def _path(value: int, key: int, came_from: dict[int, int], holder: dict[int, int]) -> list[tuple[int, int]]:
    back = {owner: value_of for value_of, owner in holder.items()}
    pairs = []
    while True:
        owner = came_from[value]
        pairs.append((value, owner))
        if owner == key:
            return pairs
        value = back[owner]


def _split(problem: Problem, allocation: Allocation) -> Allocation | None:
    """Return stages cut where pins require it, each piece with the replicas that its pins allow."""
    if len(allocation.pipelines) > 1:
        return None
    spare = sorted(set(range(problem.num_devices)) - {d for stage in allocation.stages for d in stage.devices})
    stages: list[Stage] = []
    for stage in allocation.stages:
        pieces = _segments(problem, stage.first, stage.last)
        if pieces is None:
            return None
        devices = list(stage.devices)
        while len(devices) < len(pieces) and spare:
            devices.append(spare.pop(0))
        if len(devices) < len(pieces):
            return None
        counts = _shares(problem, pieces, len(devices))
        for (first, last), count in zip(pieces, counts, strict=True):
            part, devices = devices[:count], devices[count:]
            again = ((first, last),) if stage.recompute else ()
            stages.append(Stage(first, last, tuple(part), stage.dispatch, again, modules=stage.modules))
    return Allocation((Pipeline(tuple(stages), allocation.pipelines[0].micro_batches),), allocation.num_micro_batches)


def _segments(problem: Problem, first: int, last: int) -> list[tuple[int, int]] | None:
    """Return the layers in the fewest pieces that keep the pins, each as long as possible; None if no cut allows it."""
    pieces = []
    start = first
    while start <= last:
        end = None
        for layer in range(start, last + 1):
            if not allowed_devices(problem, start, layer):
                break
            if layer == last or problem.cuttable[layer]:
                end = layer
        if end is None:
            return None
        pieces.append((start, end))
        start = end + 1
    return pieces


def _shares(problem: Problem, pieces: Sequence[tuple[int, int]], devices: int) -> list[int]:
    """Return devices for each piece: one each, then one at a time to the piece with most work per device."""
    total = problem.sample_ns
    work = [int(total[last + 1] - total[first]) for first, last in pieces]
    room = [len(allowed_devices(problem, first, last)) for first, last in pieces]
    counts = [1] * len(pieces)
    for _ in range(devices - len(pieces)):
        open_pieces = [i for i in range(len(pieces)) if counts[i] < room[i]]
        if not open_pieces:
            break
        counts[max(open_pieces, key=lambda i: (Fraction(work[i], counts[i]), -i))] += 1
    return counts

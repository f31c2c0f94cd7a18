"""The least load of the cables around all groups of devices in a plan below a time (BOUNDS section 3).

A plan is a line of *runs*, neighbouring stages in one group, and stages *across* several groups. Only stages and runs
that could each be part of a plan below that time count.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.contiguous.label_steps import Pieces
from penstock.solvers.bounds.windows_kernel import window_span
from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.fields import Fields

NONE = 2**62
"""The cost of an impossible entry; as a number of devices: ``MANY``."""
MANY = 2**30

RUN_RUN, ACROSS_RUN, RUN_ACROSS, ACROSS_ACROSS = range(4)
"""Kinds of a cut: the pieces before and after it."""


@Fields.register
class Around(NamedTuple):
    """The load and the capacity of the cables around groups of devices, in ns of the widest group's cables.

    * ``out``, ``back`` (size + 1, L + 1): forwards and gradients of a step over each cut. Row 0: of all samples. Row n:
      of the least samples that leave or reach a group in which a run has n devices, if the stage on the other side of
      the cut is across groups.
    * ``reduced`` [replicas, first, after]: of a stage's all-reduces, in each direction.
    * ``groups`` (replicas,): the least number of groups that a stage is in.
    * ``size``: devices of the largest group; ``nodes``: whether the groups are nodes.
    * ``full``: whether cables carry both directions at once; ``first``: the first possible cut.
    """

    out: np.ndarray
    back: np.ndarray
    reduced: np.ndarray
    groups: np.ndarray
    size: int
    nodes: bool
    full: bool
    first: int


@Fields.register
class Shares(NamedTuple):
    """The parts of ``room`` that devices take: of a run (size + 1,), and of a stage across groups (replicas,)."""

    run: np.ndarray
    across: np.ndarray
    room: int


@Fields.register
class Room(NamedTuple):
    """Arrays (L + 1, L + 1) by first layer and layer after, and the least load by layer, room taken and cut.

    ``alone``, ``run``: the fewest devices of a stage and of a run in one group; ``across``: of a stage across groups.
    ``load``: the least all-reduces of that stage over all its groups.
    """

    alone: np.ndarray
    run: np.ndarray
    across: np.ndarray
    load: np.ndarray
    least: np.ndarray


@inner
def _may_end(pieces: Pieces, variant: int, replicas: int, first: int, stop: int, after: int, time_ns: int) -> bool:
    """Return whether a stage may be part of a plan below the time, with all other layers at their quickest."""
    limit = pieces.limit[variant, replicas, first, stop]
    most, left, layers = pieces.devices, pieces.devices - replicas, pieces.sent.shape[1] - 1
    if limit == 0 or (first > 0 and left == 0):
        return False
    head, tail = pieces.least_forward[left, first], pieces.least_backward[left, first]
    around = pieces.least_forward[most, layers] - pieces.least_forward[most, stop]
    around += pieces.least_backward[most, layers] - pieces.least_backward[most, stop]
    forward = pieces.forward[variant, replicas, first, stop]
    backward = pieces.backward[variant, replicas, first, stop]
    end = max(
        window_span(forward, backward, around, limit, 0, 0, pieces.batches), pieces.work[variant, replicas, first, stop]
    )
    weight, whole = pieces.weight[variant, replicas, first, stop], pieces.whole_work[variant, replicas, first, stop]
    return head + max(end + max(tail, weight + after), whole + after) < time_ns


@loop
def find_stages(pieces: Pieces, around: Around, time_ns: int, room: Room) -> bool:
    """Write the possible stages and runs; return whether any stage is across groups."""
    layers = pieces.sent.shape[1] - 1
    any_across = False
    for first in range(layers - 1, -1, -1):
        for stop in range(first + 1, layers + 1):
            _find_alone(pieces, around, time_ns, room, first, stop)
            _find_across(pieces, around, time_ns, room, first, stop)
            any_across = any_across or room.across[first, stop] < MANY
            # The fewest devices of stages one after the other in one group.
            fewest = room.alone[first, stop]
            for cut in range(first + 1, stop):
                fewest = min(fewest, room.alone[first, cut] + room.run[cut, stop])
            room.run[first, stop] = fewest if fewest <= around.size else MANY
    return any_across


@inner
def _find_alone(pieces: Pieces, around: Around, time_ns: int, room: Room, first: int, stop: int) -> None:
    """Write the fewest devices of a stage in one group."""
    room.alone[first, stop] = MANY
    for replicas in range(min(around.size, pieces.limit.shape[1] - 1), 0, -1):
        after = pieces.after[0, replicas, first, stop]
        if not around.nodes:
            after = min(after, pieces.after[1, replicas, first, stop])
        for variant in range(pieces.limit.shape[0]):
            if _may_end(pieces, variant, replicas, first, stop, after, time_ns):
                room.alone[first, stop] = replicas


@inner
def _find_across(pieces: Pieces, around: Around, time_ns: int, room: Room, first: int, stop: int) -> None:
    """Write the fewest devices of a stage across groups, and its least load."""
    room.across[first, stop], room.load[first, stop] = MANY, NONE
    for replicas in range(pieces.limit.shape[1] - 1, 1, -1):
        after = pieces.after[1, replicas, first, stop]
        for variant in range(pieces.limit.shape[0]):
            if _may_end(pieces, variant, replicas, first, stop, after, time_ns):
                room.across[first, stop] = replicas
                load = (1 + around.full) * around.groups[replicas] * around.reduced[replicas, first, stop]
                room.load[first, stop] = min(room.load[first, stop], load)


@loop
def least_load(pieces: Pieces, around: Around, shares: Shares, time_ns: int, room: Room) -> int:
    """Return the least load of all cables around groups together; ``NONE``: there is no plan."""
    layers = pieces.sent.shape[1] - 1
    room.least[:] = NONE
    room.least[0, 0, RUN_RUN], room.least[0, 0, ACROSS_ACROSS] = 0, 0
    for first in range(layers):
        for stop in range(first + 1, layers + 1):
            if room.run[first, stop] < MANY:
                _add_run(pieces, around, shares, time_ns, room, first, stop)
            if room.across[first, stop] < MANY:
                share = shares.across[room.across[first, stop]]
                _add_across(shares.room, room, first, stop, share, room.load[first, stop], layers)
    least = NONE
    for used in range(shares.room + 1):
        least = min(least, room.least[layers, used, RUN_RUN], room.least[layers, used, ACROSS_ACROSS])
    return least


@inner
def _add_run(pieces: Pieces, around: Around, shares: Shares, time_ns: int, room: Room, first: int, stop: int) -> None:
    """Add a run after every plan of the layers before it, where its group's cables can carry its load."""
    layers, devices = pieces.sent.shape[1] - 1, room.run[first, stop]
    for before in range(2 if first > 0 else 1):
        for after in range(2 if stop < layers else 1):
            # Of the samples that pass to a stage across groups, only a part leaves the group.
            part, other = devices if before else 0, devices if after else 0
            out_a, back_a = around.out[part, first], around.back[part, first]
            out_b, back_b = around.out[other, stop], around.back[other, stop]
            if _may_pass(pieces, around, time_ns, first, stop, out_a, back_a, out_b, back_b):
                # It passes the cables of another group as well.
                load = (1 + before) * (out_a + back_a) + (1 + after) * (out_b + back_b)
                source, target = ACROSS_RUN if before else RUN_RUN, RUN_ACROSS if after else RUN_RUN
                _add(shares.room, room, first, source, stop, target, shares.run[devices], load)


@inner
def _may_pass(
    pieces: Pieces,
    around: Around,
    time_ns: int,
    first: int,
    stop: int,
    out_a: int,
    back_a: int,
    out_b: int,
    back_b: int,
) -> bool:
    """Return whether a group's cables have the time for a run, from its first input to its last gradient."""
    forward, backward = pieces.least_forward[pieces.devices], pieces.least_backward[pieces.devices]
    if around.full:
        into = forward[first] + out_a + back_b + backward[stop]
        return max(into, forward[stop] + back_a + out_b + backward[first]) < time_ns
    return forward[first] + out_a + back_a + out_b + back_b + backward[first] < time_ns


@inner
def _add(most: int, room: Room, first: int, source: int, stop: int, target: int, share: int, load: int) -> None:
    """Add a run or a stage to every plan of the layers before it that leaves room for it."""
    for used in range(most + 1 - share):
        before = room.least[first, used, source]
        if before < NONE:
            there = room.least[stop, used + share, target]
            room.least[stop, used + share, target] = min(there, before + load)


@inner
def _add_across(most: int, room: Room, first: int, stop: int, share: int, load: int, layers: int) -> None:
    """Add a stage across groups, after a run or another such stage and before either."""
    for source in (RUN_ACROSS, ACROSS_ACROSS):
        for target in (ACROSS_RUN, ACROSS_ACROSS):
            if (first > 0 or source == ACROSS_ACROSS) and (stop < layers or target == ACROSS_ACROSS):
                _add(most, room, first, source, stop, target, share, load)

"""The simplest lines of stages of a request, and every line that keeps its pins where these are few enough to list.

A *line* is one pipeline's stages on devices of their own. Of a small request all lines are listed
(``grid/enumeration.py``); of a larger one those that are cut exactly where the pins demand it, or at every border of a pin, each piece on its
share of the devices, as one stage or as several even ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise, product

import numpy as np

from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.memory_budget import needed_bytes
from penstock.solvers.costs.stage import stage_costs, stage_rows
from penstock.solvers.costs.tables.stage_table import static_sums
from penstock.solvers.grid.block_partition import block_partition, smallest_largest
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.pins import allowed_devices, broken_pin, fewest_pieces, matching
from penstock.solvers.model.problem import Problem

MOST_COUNTED = 64
"""Devices of requests whose lines are counted."""
MOST_DEALT = 32
"""Lines of a larger one that are made for each way to cut it."""
EVEN = (1, 2, 4)
"""Stages of a piece of a larger line; also one for each of its devices."""

Line = tuple[Stage, ...]
Piece = tuple[int, int]


def simple_lines(problem: Problem, batch: Batch, replicas: int) -> list[Line]:
    """One stage on each number of devices, and even stages of each number, on one device each and on equal shares.

    At most ``replicas`` to a stage. The largest number has one block of layers in each stage, if there are as many
    devices. Of many numbers some are taken. Pins are not looked at.
    """
    order = [device for node in problem.nodes() for device in node]
    most = min(len(order), problem.num_blocks)
    found: list[Line] = []
    for number in _some(most):
        cut = block_partition(problem, batch, number).stages
        widest = min(replicas, len(order) // number)
        for width in _some(widest) if number == 1 else sorted({1, widest}):
            dealt = (tuple(order[s * width : (s + 1) * width]) for s in range(number))
            found.append(tuple(Stage(s.first, s.last, own) for s, own in zip(cut, dealt, strict=True)))
    return found


def _some(most: int) -> Sequence[int]:
    """From 1 on all numbers, or the even ones and the last."""
    return range(1, most + 1) if most <= MOST_DEALT else (*EVEN, most)


def kept_lines(problem: Problem, batch: Batch, replicas: int, most: int) -> list[Line]:
    """Lines that keep the pins and may fit; at most ``replicas`` to a stage.

    All of them where at most ``most`` are to be listed, so that no line fits if there is none.
    """
    space = Space(problem, (batch,))
    lines = _listed(space, replicas, 1) if _are_few(space, most) else _dealt_out(problem, replicas)
    return [line for line in dict.fromkeys(lines) if may_fit(problem, batch, line)]


def folded_lines(problem: Problem, batch: Batch, replicas: int, most: int) -> list[Line]:
    """The same of 2N stages on N places, each of which holds stage i and stage N + i; none of a large request."""
    space = Space(problem, (batch,))
    lines = _listed(space, replicas, 2) if _are_few(space, most) else iter(())
    return [line for line in lines if may_fit(problem, batch, line)]


def _are_few(space: Space, most: int) -> bool:
    """Whether at most ``most`` lines are to be listed; on many devices it is not counted."""
    return space.problem.num_devices <= MOST_COUNTED and space.count() <= most


def may_fit(problem: Problem, batch: Batch, line: Line) -> bool:
    """Whether each device has room for its stage and one micro-batch, without buffers; recomputing if it may."""
    return all(needed_bytes(problem, stage, batch.most_rows) <= free_bytes(problem, stage.devices) for stage in line)


def largest_ns(problem: Problem, batch: Batch, line: Line) -> tuple[int, int]:
    """Computation of a micro-batch in the stage that takes longest, then in all of them; lines encode nothing."""
    kinds = {problem.devices[device].kind for stage in line for device in stage.devices}
    shares = {stage_rows(stage, batch.most_rows) for stage in line}
    if len(kinds) == len(shares) == 1:
        costs, bounds = problem.costs(kinds.pop(), shares.pop()), [0, *(stage.last + 1 for stage in line)]
        each = np.diff((costs.forward_ns + costs.backward_ns)[bounds])
        return int(each.max()), int(each.sum())
    apart = [stage_costs(problem, stage, batch.most_rows) for stage in line]
    times = [cost.forward_ns + cost.backward_ns for cost in apart]
    return max(times), sum(times)


def _listed(space: Space, replicas: int, folds: int) -> Iterator[Line]:
    """Every line on every number of places, each of which holds ``folds`` stages."""
    for places in range(1, min(space.most_stages, (len(space.cuts) + 1) // folds) + 1):
        cuts = space.partitions(folds * places)
        for placement in space.placements(places):
            if max(map(len, placement)) > replicas:
                continue
            for firsts in cuts:
                line = space.allocation(space.batches[0], firsts, placement * folds)
                if broken_pin(space.problem, line) is None:
                    yield line.stages


def _dealt_out(problem: Problem, replicas: int) -> Iterator[Line]:
    fewest = tuple(fewest_pieces(problem) or ())
    for pieces in dict.fromkeys((fewest, tuple(_evened(problem, fewest)), tuple(_bordered(problem)))):
        devices = _shared_out(problem, pieces) if pieces else None
        if devices is None:
            continue
        ways = [_splits(problem, piece, own) for piece, own in zip(pieces, devices, strict=True)]
        alike = [[way[min(k, len(way) - 1)] for way in ways] for k in range(max(map(len, ways)))]
        every = product(*ways) if np.prod([len(way) for way in ways], dtype=float) <= MOST_DEALT else alike
        for chosen in every:
            yield tuple(stage for part in chosen for stage in _narrowed(part, replicas))


def _evened(problem: Problem, pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces, each of which begins as near to an even share of the work as the pins allow.

    ``pieces`` are as long as can be from the front, so a piece may begin earlier, but not before the last one does.
    """
    costs = problem.costs(problem.devices[0].kind, 1)
    work = costs.forward_ns + costs.backward_ns
    last, found = problem.num_layers - 1, []
    for number in range(len(pieces) - 1, 0, -1):
        begins = [
            at
            for at in range(pieces[number - 1][0] + 1, pieces[number][0] + 1)
            if problem.cuttable[at - 1] and allowed_devices(problem, at, last)
        ]
        share = int(work[-1]) * number // len(pieces)
        first = min(begins, key=lambda at, share=share: abs(int(work[at]) - share))  # type: ignore[misc]
        found.append((first, last))
        last = first - 1
    yield from ((0, last), *reversed(found))


def _bordered(problem: Problem) -> Iterator[Piece]:
    """The layers cut at every border of a pin where they may be cut."""
    borders = {pin.first for pin in problem.pins} | {pin.last + 1 for pin in problem.pins}
    cuts = [at for at in sorted(borders) if 0 < at < problem.num_layers and problem.cuttable[at - 1]]
    edges = [0, *cuts, problem.num_layers]
    yield from ((low, high - 1) for low, high in pairwise(edges))


def _shared_out(problem: Problem, pieces: Sequence[Piece]) -> list[list[int]] | None:
    """Devices for each piece: one each, then one by one to the piece with most work per device that may have it."""
    allowed = [allowed_devices(problem, first, last) for first, last in pieces]
    first = matching({number: sorted(own) for number, own in enumerate(allowed)})
    if first is None:
        return None
    held = [[first[number]] for number in range(len(pieces))]
    costs = problem.costs(problem.devices[0].kind, 1)
    total = costs.forward_ns + costs.backward_ns
    work = [int(total[last + 1] - total[begin]) for begin, last in pieces]
    for device in sorted(set(range(problem.num_devices)) - {own[0] for own in held}):
        open_pieces = [number for number, own in enumerate(allowed) if device in own]
        if open_pieces:
            held[max(open_pieces, key=lambda n: (Fraction(work[n], len(held[n])), -n))].append(device)
    return [sorted(own) for own in held]


def _splits(problem: Problem, piece: Piece, devices: list[int]) -> list[Line]:
    """A piece as one stage on its devices, and as several that share its work, or its parameters, and its devices."""
    first, last = piece
    cuttable = problem.cuttable[first:last]
    costs = problem.costs(problem.devices[devices[0]].kind, 1)
    work, size = costs.forward_ns + costs.backward_ns, static_sums(problem).parameters
    most = min(len(devices), int(cuttable.sum()) + 1)
    found = []
    for number in sorted({min(number, most) for number in (*EVEN, most)}):
        for prefix in (work, size):
            bounds = smallest_largest(np.diff(prefix[first : last + 2]), number, cuttable)
            edges = [len(devices) * s // number for s in range(number + 1)]
            found.append(
                tuple(
                    Stage(first + bounds[s], first + bounds[s + 1] - 1, tuple(devices[edges[s] : edges[s + 1]]))
                    for s in range(number)
                )
            )
    return list(dict.fromkeys(found))


def _narrowed(line: Line, replicas: int) -> Iterator[Stage]:
    """The stages with as many replicas as the micro-batches feed."""
    yield from (Stage(stage.first, stage.last, stage.devices[:replicas]) for stage in line)

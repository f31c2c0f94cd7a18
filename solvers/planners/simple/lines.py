"""The simplest lines of stages of a request, and every line that keeps its pins where these are few enough to list.

A *line* is one pipeline's stages on separate devices. Of a small request all lines are listed
(``grid/enumeration.py``). Of a larger request, lines are cut exactly where the pins demand it, or at every border of a
pin; each piece is on its share of the devices, as one stage or as several even ones.
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
from penstock.solvers.grid.block_partition import block_partition, smallest_largest, smallest_largest_on
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.grid.places import side_by_side
from penstock.solvers.model.allocation import Stage, stages_on
from penstock.solvers.model.micro_batches import Batch
from penstock.solvers.model.pins import allowed_devices, broken_pin, fewest_pieces, last_ends, matching
from penstock.solvers.model.problem import Problem

MOST_COUNTED = 64
"""Limit on the devices of requests whose lines are counted."""
MOST_DEALT = 32
"""Limit on the lines of a larger request that are built for each way to cut it."""
EVEN = (1, 2, 4)
"""The numbers of stages of a piece of a larger line; one stage for each of its devices is tried too."""

Line = tuple[Stage, ...]
Piece = tuple[int, int]


def simple_lines(problem: Problem, batch: Batch, replicas: int) -> list[Line]:
    """Return one stage on each number of devices, and even stages of each number on single devices and on equal shares.

    A stage has at most ``replicas`` devices. The largest number has one block of layers in each stage, if there are as
    many devices. Of many numbers some are taken. Pins are ignored.
    """
    order = [device for node in problem.nodes() for device in node]
    most = min(len(order), problem.num_blocks)
    lines: list[Line] = []
    for number in _some(most):
        bounds = [*(stage.first for stage in block_partition(problem, batch, number).stages), problem.num_layers]
        widest = min(replicas, len(order) // number)
        for width in _some(widest) if number == 1 else sorted({1, widest}):
            lines.append(stages_on(side_by_side(order[: number * width], width), bounds))
    return lines


def _some(most: int) -> Sequence[int]:
    """Return all numbers from 1 on, or the even ones and the last."""
    return range(1, most + 1) if most <= MOST_DEALT else (*EVEN, most)


def kept_lines(problem: Problem, batch: Batch, replicas: int, most: int, folds: int = 1) -> list[Line]:
    """Return lines that keep the pins and may fit, at most ``replicas`` to a stage.

    If at most ``most`` lines exist, all are returned, so an empty list proves that no line fits. ``folds``: stages of a
    place, N apart in a line on N places; for a large request only lines with one stage to a place are built.
    """
    space = Space(problem, (batch,))
    are_few = problem.num_devices <= MOST_COUNTED and space.count() <= most
    lines = _listed(space, replicas, folds) if are_few else _dealt_out(problem, replicas) if folds == 1 else ()
    return [line for line in dict.fromkeys(lines) if may_fit(problem, batch, line)]


def may_fit(problem: Problem, batch: Batch, line: Line) -> bool:
    """Return whether each device has enough memory for its stage and one micro-batch, without buffers.

    Stages recompute if they may.
    """
    return all(needed_bytes(problem, stage, batch.most_rows) <= free_bytes(problem, stage.devices) for stage in line)


def largest_ns(problem: Problem, batch: Batch, line: Line) -> tuple[int, int]:
    """Return the computation of a micro-batch in the longest stage, then in all stages; lines have no codecs."""
    kinds = {problem.devices[device].kind for stage in line for device in stage.devices}
    shares = {stage_rows(stage, batch.most_rows) for stage in line}
    if len(kinds) == len(shares) == 1:
        costs, bounds = problem.costs(kinds.pop(), shares.pop()), [0, *(stage.last + 1 for stage in line)]
        each = np.diff(costs.passes_ns[bounds])
        return int(each.max()), int(each.sum())
    apart = [stage_costs(problem, stage, batch.most_rows) for stage in line]
    times = [cost.forward_ns + cost.backward_ns for cost in apart]
    return max(times), sum(times)


def _listed(space: Space, replicas: int, folds: int) -> Iterator[Line]:
    """Yield every line on every number of places, each of which holds ``folds`` stages."""
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
    for pieces in dict.fromkeys((fewest, tuple(_evened(problem, len(fewest))), tuple(_bordered(problem)))):
        devices = _shared_out(problem, pieces) if pieces else None
        if devices is None:
            continue
        ways = [_splits(problem, piece, of_piece) for piece, of_piece in zip(pieces, devices, strict=True)]
        alike = [[way[min(k, len(way) - 1)] for way in ways] for k in range(max(map(len, ways)))]
        every = product(*ways) if np.prod([len(way) for way in ways], dtype=float) <= MOST_DEALT else alike
        for chosen in every:
            yield tuple(stage for part in chosen for stage in _narrowed(part, replicas))


def _evened(problem: Problem, number: int) -> Iterator[Piece]:
    """Yield a number of pieces that some device may hold, the longest as short as possible."""
    unlike = {tuple(device in pin.devices for pin in problem.pins): device for device in range(problem.num_devices)}
    ends = np.max([last_ends(problem, (device,)) for device in unlike.values()], axis=0)
    times = [np.diff(problem.sample_ns)] * number
    bounds = smallest_largest_on(times, problem.cuttable, [ends] * number) if number else None
    yield from ((low, high - 1) for low, high in pairwise(bounds or ()))


def _bordered(problem: Problem) -> Iterator[Piece]:
    """Yield the pieces between the borders of pins at which the layers may be cut."""
    borders = {pin.first for pin in problem.pins} | {pin.last + 1 for pin in problem.pins}
    cuts = [at for at in sorted(borders) if 0 < at < problem.num_layers and problem.cuttable[at - 1]]
    edges = [0, *cuts, problem.num_layers]
    yield from ((low, high - 1) for low, high in pairwise(edges))


def _shared_out(problem: Problem, pieces: Sequence[Piece]) -> list[list[int]] | None:
    """Return the devices of each piece, or None if a piece gets none.

    Each piece gets one device; each further device goes to the piece with most work per device that may have it.
    """
    allowed = [allowed_devices(problem, first, last) for first, last in pieces]
    first = matching({number: sorted(devices) for number, devices in enumerate(allowed)})
    if first is None:
        return None
    shares = [[first[number]] for number in range(len(pieces))]
    total = problem.sample_ns
    work = [int(total[last + 1] - total[begin]) for begin, last in pieces]
    for device in sorted(set(range(problem.num_devices)) - {devices[0] for devices in shares}):
        open_pieces = [number for number, devices in enumerate(allowed) if device in devices]
        if open_pieces:
            shares[max(open_pieces, key=lambda n: (Fraction(work[n], len(shares[n])), -n))].append(device)
    return [sorted(devices) for devices in shares]


def _splits(problem: Problem, piece: Piece, devices: list[int]) -> list[Line]:
    """Return a piece as one stage on its devices, and as several stages.

    Several stages share its work, or its parameters, and its devices.
    """
    first, last = piece
    cuttable = problem.cuttable[first:last]
    work = problem.costs(problem.devices[devices[0]].kind, 1).passes_ns
    size = static_sums(problem).parameters
    most = min(len(devices), int(cuttable.sum()) + 1)
    lines = []
    for number in sorted({min(number, most) for number in (*EVEN, most)}):
        for prefix in (work, size):
            bounds = smallest_largest(np.diff(prefix[first : last + 2]), number, cuttable)
            edges = pairwise(len(devices) * s // number for s in range(number + 1))
            shares = (tuple(devices[low:high]) for low, high in edges)
            lines.append(stages_on(shares, [first + bound for bound in bounds]))
    return list(dict.fromkeys(lines))


def _narrowed(line: Line, replicas: int) -> Iterator[Stage]:
    """Yield the stages with as many replicas as the micro-batches feed."""
    yield from (Stage(stage.first, stage.last, stage.devices[:replicas]) for stage in line)

"""Layouts in a cluster of pipelines of d devices, w side by side: H(d:w) of WPipe's equation 3 (ALGORITHMS 5.4).

Layout **A** keeps the neighbours of a pipeline in one node and its replicas in different nodes, **B** the opposite.
*Mixed* layouts split both d and w over nodes and the devices in a node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import InvalidDocument
from penstock.solvers.model.micro_batches import Batch, divisors, equal_batches
from penstock.solvers.model.problem import Problem

Places = tuple[tuple[int, ...], ...]
"""The devices of each rank, in replica order."""


def side_by_side(devices: Sequence[int], width: int) -> Places:
    """Return ranks of ``width`` neighbours each, as many as fit."""
    return tuple(tuple(devices[low : low + width]) for low in range(0, len(devices) - width + 1, width))


def apart(devices: Sequence[int], depth: int) -> Places:
    """Return ``depth`` ranks, each of devices at equal distances, so that neighbours are of different ranks."""
    return tuple(tuple(devices[rank::depth]) for rank in range(depth))


def even_shapes(problem: Problem, devices: Sequence[int], most: int) -> Iterator[tuple[Places, Batch]]:
    """Yield equally many neighbours for each of at most ``most`` ranks, with every batch that feeds all alike."""
    for ranks in divisors(len(devices)):
        if ranks <= most:
            places = side_by_side(devices, len(devices) // ranks)
            yield from ((places, batch) for batch in equal_batches(problem, len(places[0])))


class Layout(NamedTuple):
    """``places[i]``: the w devices that hold stage i of every pipeline, in replica order."""

    name: str
    places: Places


def layouts(problem: Problem, depth: int, width: int, wanted: str = "all") -> tuple[Layout, ...]:
    """Return the layouts of ``depth`` × ``width`` devices, one of those equal up to a permutation of equal nodes.

    ``wanted``: ``A``, ``B``, ``mixed`` or ``all``. Devices are taken kind by kind and node by node. The mixed layouts
    need whole nodes of one size.
    """
    order = sorted(range(problem.num_devices), key=lambda d: (problem.devices[d].kind, problem.devices[d].node, d))
    used = order[: depth * width]
    candidates = [
        Layout("A", apart(used, depth)),
        Layout("B", side_by_side(used, width)),
        *_mixed(problem, order, depth, width),
    ]
    distinct: dict[tuple[object, ...], Layout] = {}
    for layout in candidates:
        distinct.setdefault(_signature(problem, layout), layout)
    kept = [layout for layout in distinct.values() if wanted in ("all", layout.name)]
    return tuple(kept) if kept or wanted == "mixed" else tuple(each for each in candidates if each.name == wanted)


def _mixed(problem: Problem, order: list[int], depth: int, width: int) -> list[Layout]:
    """Return layouts with some stages and replicas in each node, and the rest of both over the nodes."""
    nodes: dict[int, list[int]] = {}
    for device in order:
        nodes.setdefault(problem.devices[device].node, []).append(device)
    of_node = list(nodes.values())
    slots = len(of_node[0])
    if any(len(node) != slots for node in of_node):
        return []
    result = []
    for inside in range(slots, 0, -1):
        per_node = slots // inside
        if slots % inside or depth % inside or width % per_node:
            continue
        rows = width // per_node
        places = []
        for i in range(depth):
            far, near = divmod(i, inside)
            stage = [of_node[far * rows + j // per_node][near * per_node + j % per_node] for j in range(width)]
            places.append(tuple(stage))
        result.append(Layout("mixed", tuple(places)))
    return result


def _signature(problem: Problem, layout: Layout) -> tuple[object, ...]:
    """Return the layout with its nodes numbered by first appearance, and each device's kind."""
    numbers: dict[int, int] = {}
    devices = [problem.devices[d] for stage in layout.places for d in stage]
    return tuple((numbers.setdefault(device.node, len(numbers)), device.kind) for device in devices)


def check_depth(problem: Problem, option: str, depth: int, most: int, fewest: int = 1, step: int = 1) -> None:
    """Raise ``InvalidDocument`` for an option's depth that devices and blocks rule out; 0 means all depths."""
    if depth and (not fewest <= depth <= most or depth % step):
        multiples = f", multiples of {step}" if step > 1 else ""
        raise InvalidDocument(
            f"option {option!r} is {depth} devices in a pipeline, but {problem.num_devices} devices and "
            f"{problem.num_blocks} separable blocks of layers allow {fewest} to {most}{multiples}",
            remedy=f"between {fewest} and {most}{multiples}, or 0 for all of them",
        )


def least_pass_ns(problem: Problem, devices: Iterable[int], rows: int, again: bool = False) -> int:
    """Return the time of a forward and a backward, each layer on the quickest kind; ``again``: all is recomputed."""
    kinds = {problem.devices[device].kind for device in devices}
    sums = [problem.costs(kind, rows) for kind in kinds]
    return int(np.min([np.diff(each.passes_ns + again * each.forward_ns) for each in sums], axis=0).sum())

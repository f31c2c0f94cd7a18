"""Where pipelines of d devices, w side by side, lie in a cluster: H(d:w) of WPipe's equation 3 (ALGORITHMS 5.4).

Layout **A** keeps the neighbours of a pipeline in one node and its replicas apart, **B** the opposite. The *mixed* ones
split both d and w over nodes and the devices in a node.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.solvers.model.problem import Problem


class Layout(NamedTuple):
    """``places[i]``: the w devices that hold stage i of every pipeline, in replica order."""

    name: str
    places: tuple[tuple[int, ...], ...]


def layouts(problem: Problem, depth: int, width: int, wanted: str = "all") -> tuple[Layout, ...]:
    """Every layout of ``depth`` × ``width`` devices, those that differ by a permutation of equal nodes once.

    ``wanted``: ``A``, ``B``, ``mixed`` or ``all``. Devices are taken kind by kind and node by node. The mixed layouts
    need whole nodes of one size.
    """
    order = sorted(range(problem.num_devices), key=lambda d: (problem.devices[d].kind, problem.devices[d].node, d))
    found = [
        Layout("A", tuple(tuple(order[j * depth + i] for j in range(width)) for i in range(depth))),
        Layout("B", tuple(tuple(order[i * width + j] for j in range(width)) for i in range(depth))),
        *_mixed(problem, order, depth, width),
    ]
    distinct: dict[tuple[object, ...], Layout] = {}
    for layout in found:
        distinct.setdefault(_signature(problem, layout), layout)
    kept = [layout for layout in distinct.values() if wanted in ("all", layout.name)]
    return tuple(kept) if kept or wanted == "mixed" else tuple(each for each in found if each.name == wanted)


def _mixed(problem: Problem, order: list[int], depth: int, width: int) -> list[Layout]:
    """``inside`` stages and ``slots / inside`` replicas in each node, the rest of both over the nodes."""
    nodes: dict[int, list[int]] = {}
    for device in order:
        nodes.setdefault(problem.devices[device].node, []).append(device)
    held = list(nodes.values())
    slots = len(held[0])
    if any(len(node) != slots for node in held):
        return []
    found = []
    for inside in range(slots, 0, -1):
        per_node = slots // inside
        if slots % inside or depth % inside or width % per_node:
            continue
        rows = width // per_node
        places = []
        for i in range(depth):
            far, near = divmod(i, inside)
            stage = [held[far * rows + j // per_node][near * per_node + j % per_node] for j in range(width)]
            places.append(tuple(stage))
        found.append(Layout("mixed", tuple(places)))
    return found


def _signature(problem: Problem, layout: Layout) -> tuple[object, ...]:
    """The layout with its nodes numbered by first appearance, and each device's kind."""
    numbers: dict[int, int] = {}
    devices = [problem.devices[d] for stage in layout.places for d in stage]
    return tuple((numbers.setdefault(device.node, len(numbers)), device.kind) for device in devices)

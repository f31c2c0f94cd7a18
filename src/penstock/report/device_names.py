"""Devices in words: whole nodes by their names, neighbouring ones as a range, and which devices a plan leaves idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from penstock.schemas.plan import DevicePrediction, Plan
from penstock.schemas.topology import ClusterTopology, Node

MAX_PIECES = 6


def idle_devices(plan: Plan, nodes: Sequence[Node]) -> list[str]:
    """Return the devices that hold no stage, in the cluster's order."""
    used = {device for pipeline in plan.pipelines for stage in pipeline.stages for device in stage.devices}
    return [device.id for node in nodes for device in node.devices if device.id not in used]


def idle_sentence(plan: Plan, topology: ClusterTopology) -> str | None:
    """Return ``16 of 1,024 devices stay idle: node126 … node127.``; None where all are used."""
    nodes = topology.expanded().nodes
    idle = idle_devices(plan, nodes)
    if not idle:
        return None
    stay = "device stays" if len(idle) == 1 else "devices stay"
    return f"{len(idle):,} of {topology.num_devices:,} {stay} idle: {named(idle, nodes)}."


def named(devices: Collection[str], nodes: Sequence[Node]) -> str:
    """Return ``node0 … node3, node7/0``: devices of ``nodes`` in words, at most ``MAX_PIECES`` pieces."""
    pieces = list(_pieces(set(devices), nodes))
    more = len(pieces) - MAX_PIECES
    shown = ", ".join(pieces[:MAX_PIECES])
    return f"{shown} and {more:,} more" if more > 0 else shown


def _pieces(chosen: set[str], nodes: Sequence[Node]) -> Iterator[str]:
    """Yield a piece for neighbouring nodes of which every device is chosen, and one for each device of the others."""

    for whole, group in groupby(nodes, key=lambda node: all(device.id in chosen for device in node.devices)):
        members = list(group)
        if whole:
            yield members[0].name if len(members) == 1 else f"{members[0].name} … {members[-1].name}"
        else:
            yield from (device.id for node in members for device in node.devices if device.id in chosen)


def alike(uses: Sequence[DevicePrediction]) -> list[tuple[DevicePrediction, int]]:
    """Return the first of the devices whose predicted times and memory are equal, and how many these are."""
    counted: Counter[tuple[object, ...]] = Counter()
    first: dict[tuple[object, ...], DevicePrediction] = {}
    for use in uses:
        numbers = (use.busy_ns, use.communication_ns, use.idle_ns, use.peak_memory_bytes, use.memory_bytes)
        key = (*numbers, use.memory)
        counted[key] += 1
        first.setdefault(key, use)
    return [(use, counted[key]) for key, use in first.items()]


def num_used(plan: Plan) -> int:
    """Return how many devices hold a stage."""
    return len({device for pipeline in plan.pipelines for stage in pipeline.stages for device in stage.devices})


def together(plan: Plan) -> int:
    """Return the number of devices that each predicted device stands for: devices that share layers do alike."""
    assert plan.prediction is not None
    return num_used(plan) // len(plan.prediction.devices)


def times(name: str, count: int) -> str:
    """Return ``node0/0 ×32``; of a single one its name."""
    return f"{name} ×{count:,}" if count > 1 else name

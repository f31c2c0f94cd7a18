"""Requests to the planners after a node has died: the plan's own request, for the remaining devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.request import Pin, PlanRequest, Termination
from penstock.schemas.topology import ClusterTopology, MeasuredMatrix

BUDGET = Termination(time_limit_ns=20_000_000_000, max_plans=200)
"""A count of plans, so that the answer is the same on every machine; the time is for planners that do not count."""


def requests_for(request: PlanRequest, devices: Collection[str]) -> list[PlanRequest]:
    """Return the requests to try, in order.

    First the same planner as before; then auto, which has no options to keep. A request with degrees of parallelism is
    also tried with auto at all degrees that the profile has costs at.

    Raises UnsupportedRequest when none of the topology's devices is left, or none for a pinned layer.
    """
    assert isinstance(request.topology, ClusterTopology)
    topology = reduced(request.topology, devices)
    left = {device.id for node in topology.nodes for device in node.devices}
    same = {"topology": topology, "pins": tuple(_narrowed(pin, left) for pin in request.pins), "termination": BUDGET}
    first = request.model_copy(update=same)
    free = first.model_copy(update={"planner": "auto", "schedule": "auto", "options": {}})
    other = free if request.degrees is None else free.model_copy(update={"degrees": "auto"})
    return [PlanRequest.parse(one.model_dump(mode="json")) for one in _distinct((first, free, other))]


def _distinct(requests: Iterable[PlanRequest]) -> list[PlanRequest]:
    unique: list[PlanRequest] = []
    for one in requests:
        unique += [] if one in unique else [one]
    return unique


def reduced(topology: ClusterTopology, devices: Collection[str]) -> ClusterTopology:
    """Return the topology without the devices that are not among ``devices``, and without what only they had.

    Switches stay: they may join what is left. Raises UnsupportedRequest when no device is left.
    """
    whole = topology.expanded()
    nodes = []
    for node in whole.nodes:
        kept = tuple(device for device in node.devices if device.id in devices)
        if kept:
            nodes.append(node.model_copy(update={"devices": kept}))
    if not nodes:
        raise UnsupportedRequest(
            f"none of the devices of topology {topology.name!r} is free and offered by a living agent",
            remedy="start `penstock agent` again on a node of the plan",
        )
    left = [device.id for node in nodes for device in node.devices]
    ends = {*whole.switches, *left, *(node.name for node in nodes)}
    links = tuple(link for link in whole.links if link.a in ends and link.b in ends)
    matrix = None if whole.matrix is None else _rows_of(whole.matrix, left)
    return whole.model_copy(update={"nodes": tuple(nodes), "links": links, "matrix": matrix})


def _rows_of(matrix: MeasuredMatrix, devices: list[str]) -> MeasuredMatrix:
    at = [matrix.devices.index(device) for device in devices]

    def cut(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rows[i][j] for j in at) for i in at)

    return MeasuredMatrix(
        devices=tuple(devices),
        bandwidth_bytes_per_s=cut(matrix.bandwidth_bytes_per_s),
        latency_ns=None if matrix.latency_ns is None else cut(matrix.latency_ns),
    )


def _narrowed(pin: Pin, left: Collection[str]) -> Pin:
    devices = tuple(device for device in pin.devices if device in left)
    if not devices:
        first, last = pin.layers
        raise UnsupportedRequest(
            f"layers {first}…{last} are pinned to {', '.join(pin.devices)}, but none of these devices is left",
            remedy="start the agent of one of these devices again, or plan without the pin",
        )
    return pin.model_copy(update={"devices": devices})

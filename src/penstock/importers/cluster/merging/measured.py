"""The network and kinds of a topology document of Penstock, used where no other source has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.merging.notes import Notes
from penstock.schemas.topology import ClusterTopology, DeviceKind, Node


def kinds_of(sources: Sequence[SourceFacts], option_kinds: Sequence[DeviceKind]) -> tuple[DeviceKind, ...]:
    """Return the device kinds whose costs topologies state, then the options' kinds; the first of each name counts."""
    source_kinds = [kind for facts in sources if facts.measured is not None for kind in facts.measured.kinds]
    kinds: dict[str, DeviceKind] = {}
    for kind in (*source_kinds, *option_kinds):
        kinds.setdefault(kind.name, kind)
    return tuple(kinds.values())


def measured_network(
    sources: Sequence[SourceFacts], hosts: Sequence[str], joined: Mapping[str, str], notes: Notes
) -> dict[str, Any] | None:
    """Return switches and links, or the matrix, of the first topology that has all of these hosts; None without one.

    The measured collectives come with them, if any. ``joined``: the hosts' names here for other names in some source.
    """
    for facts in sources:
        if facts.measured is None:
            continue
        topology = _called(facts.measured, joined)
        nodes = {node.name: node for node in topology.nodes}
        if not nodes.keys() >= set(hosts) or not (topology.links or topology.matrix or len(hosts) == 1):
            continue
        is_measured = topology.links_from == "measured"
        notes.assume(f"links are as {facts.source} has them{', measured' if is_measured else ''}")
        from_probe: dict[str, Any] = {"links_from": "measured"} if is_measured else {}
        if topology.collectives is not None:
            from_probe["collectives"] = topology.collectives
        if topology.matrix is not None:
            devices = [device.id for host in hosts for device in nodes[host].devices]
            return {"matrix": topology.matrix.of(devices), **from_probe}
        return {**_links(topology, hosts), **from_probe}
    return None


def _called(topology: ClusterTopology, joined: Mapping[str, str]) -> ClusterTopology:
    """Return the topology with its nodes and their devices renamed as the hosts."""
    new = {node.name: joined[node.name] for node in topology.nodes if node.name in joined}
    if not new:
        return topology
    for node in topology.nodes:
        if node.name in new:
            new |= {device.id: f"{new[node.name]}/{device.id.removeprefix(f'{node.name}/')}" for device in node.devices}

    def called(node: Node) -> Node:
        devices = tuple(each.model_copy(update={"id": new.get(each.id, each.id)}) for each in node.devices)
        return node.model_copy(update={"name": new.get(node.name, node.name), "devices": devices})

    links = tuple(
        each.model_copy(update={"a": new.get(each.a, each.a), "b": new.get(each.b, each.b)}) for each in topology.links
    )
    matrix = topology.matrix
    if matrix is not None:
        matrix = matrix.model_copy(update={"devices": tuple(new.get(each, each) for each in matrix.devices)})
    nodes = tuple(map(called, topology.nodes))
    return topology.model_copy(update={"nodes": nodes, "links": links, "matrix": matrix})


def _links(topology: ClusterTopology, hosts: Sequence[str]) -> dict[str, Any]:
    gone = {node.name for node in topology.nodes} - set(hosts)
    lost = gone | {device.id for node in topology.nodes if node.name in gone for device in node.devices}
    return {
        "switches": topology.switches,
        "links": tuple(link for link in topology.links if link.a not in lost and link.b not in lost),
    }

"""The network of a topology of Penstock's own, where no other source has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.merging.notes import Notes
from penstock.schemas.topology import ClusterTopology


def measured_network(sources: Sequence[SourceFacts], hosts: Sequence[str], notes: Notes) -> dict[str, Any] | None:
    """Switches and links, or the matrix, of the first topology that has all of these hosts; None without one."""
    for facts in sources:
        topology = facts.measured
        if topology is None:
            continue
        nodes = {node.name: node for node in topology.nodes}
        if not nodes.keys() >= set(hosts) or not (topology.links or topology.matrix or len(hosts) == 1):
            continue
        is_measured = topology.links_from == "measured"
        notes.assume(f"links are as {facts.source} has them{', measured' if is_measured else ''}")
        from_probe = {"links_from": "measured"} if is_measured else {}
        if topology.matrix is not None:
            devices = [device.id for host in hosts for device in nodes[host].devices]
            return {"matrix": topology.matrix.of(devices), **from_probe}
        return {**_links(topology, hosts), **from_probe}
    return None


def _links(topology: ClusterTopology, hosts: Sequence[str]) -> dict[str, Any]:
    gone = {node.name for node in topology.nodes} - set(hosts)
    lost = gone | {device.id for node in topology.nodes if node.name in gone for device in node.devices}
    return {
        "switches": topology.switches,
        "links": tuple(link for link in topology.links if link.a not in lost and link.b not in lost),
    }

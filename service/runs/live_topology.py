"""The topology of the agents that are alive: their devices as they offer them, their links as they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from penstock.importers.cluster.hardware import communicators_of
from penstock.schemas.api.agents import AgentOut
from penstock.schemas.errors import Conflict, NotFound
from penstock.schemas.topology import ClusterTopology, Device, Node


def living_topology(agents: Iterable[AgentOut], candidates: Iterable[ClusterTopology]) -> ClusterTopology:
    """Return living agents as nodes; ``candidates``: topologies that may have their links, the newest first.

    The first one with measured links that names all of them counts, reduced to them: links by host, or a matrix if it
    has just the devices that the agents offer. Raises NotFound when no agent is alive, and Conflict when what they
    offer is no topology.
    """
    try:
        return _living(agents, candidates)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise Conflict(
            f"the devices of the living agents do not form a topology: {reason}",
            remedy="correct the settings of the agent with these devices, or stop it",
        ) from None


def _living(agents: Iterable[AgentOut], candidates: Iterable[ClusterTopology]) -> ClusterTopology:
    alive = [agent for agent in agents if agent.alive and agent.devices]
    if not alive:
        raise NotFound("no agent with a device is alive", remedy="start `penstock agent --server …` on a node")
    nodes = {
        agent.id: Node(
            name=agent.id,
            devices=tuple(
                Device(id=d.id, kind=d.kind, memory_bytes=d.memory_bytes, communicators=communicators_of(d.kind))
                for d in agent.devices
            ),
        )
        for agent in alive
    }
    for topology in candidates:
        linked = _linked(nodes, topology.expanded()) if topology.links_from == "measured" else None
        if linked is not None:
            return linked
    names = ", ".join(nodes)
    return ClusterTopology(
        name="living agents",
        nodes=tuple(nodes.values()),
        assumptions=(f"no measured links of {names} are known: penstock probe … --post",),
    )


def _linked(nodes: dict[str, Node], measured: ClusterTopology) -> ClusterTopology | None:
    """Return ``nodes`` with the links that ``measured`` has for them; None where it lacks some."""
    there = {node.name: node for node in measured.nodes}
    if not nodes.keys() <= there.keys():
        return None
    linked = tuple(node.model_copy(update={"fabric": there[name].fabric}) for name, node in nodes.items())
    devices = [device.id for node in linked for device in node.devices]
    if measured.matrix is not None:
        if not set(devices) <= set(measured.matrix.devices):
            return None
        return _topology(linked, measured, {"matrix": measured.matrix.of(devices)})
    gone = there.keys() - nodes.keys()
    lost = gone | {device.id for name in gone for device in there[name].devices}
    links = tuple(link for link in measured.links if not {link.a, link.b} & lost)
    return _topology(linked, measured, {"switches": measured.switches, "links": links})


def _topology(nodes: Sequence[Node], measured: ClusterTopology, links: dict[str, Any]) -> ClusterTopology:
    return ClusterTopology(
        name="living agents",
        nodes=tuple(nodes),
        kinds=measured.kinds,
        assumptions=measured.assumptions,
        links_from="measured",
        collectives=measured.collectives,
        **links,
    )

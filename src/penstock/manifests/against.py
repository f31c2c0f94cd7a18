"""Check that the nodes and devices of a plan still exist, by a topology or by a scheduler's output."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.schemas.document import read_text
from penstock.schemas.errors import Conflict, InvalidDocument

if TYPE_CHECKING:
    from penstock.importers.cluster.facts import SourceFacts
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.topology import ClusterTopology

_SHOWN = 8
_REMEDY = "give a topology, or what `scontrol show nodes` or `kubectl get nodes -o json` prints"


@dataclass(frozen=True, slots=True)
class NodeInventory:
    """The nodes that exist, by ``origin``.

    Attributes
    ----------
    origin
        The name of the source.
    num_devices
        The number of devices of each node, None where the source does not state it.
    unusable
        Nodes that are down or drained, and why.
    """

    origin: str
    num_devices: Mapping[str, int | None]
    unusable: Mapping[str, str]


def read_known(source: str) -> NodeInventory:
    """Read a topology document, or a scheduler's list of nodes (any format of ``penstock import topology``).

    Raises InvalidDocument for a source that cannot be read, and for a text that names no nodes.
    """
    from penstock.importers.cluster.formats import FORMATS, recognised
    from penstock.schemas.api.topology_import import ImportSource
    from penstock.schemas.topology import ClusterTopology

    text = read_text(source)
    try:
        name = recognised(ImportSource(text=text, name=source))
    except InvalidDocument as error:
        raise InvalidDocument(error.detail, faults=error.faults, remedy=_REMEDY) from None
    if name == "agents":
        return of_topology(ClusterTopology.read(source), source)
    inventory = of_facts(FORMATS[name].reader(name)(text, source))
    if not inventory.num_devices:
        raise InvalidDocument(
            f"{source} ({FORMATS[name].what}) names no nodes",
            remedy=_REMEDY,
        )
    return inventory


def of_topology(topology: ClusterTopology, origin: str) -> NodeInventory:
    """Return all nodes of a topology."""
    nodes = topology.expanded().nodes
    return NodeInventory(origin, {node.name: len(node.devices) for node in nodes}, {})


def of_facts(facts: SourceFacts) -> NodeInventory:
    """Return all nodes that a scheduler's text names, below a switch or by themselves."""
    counts: dict[str, int | None] = {name: None for switch in facts.switches for name in switch.nodes}
    counts |= {name: None if node.devices is None else len(node.devices) for name, node in facts.nodes.items() if name}
    unusable = {name: node.why_not_usable or "not usable" for name, node in facts.nodes.items() if node.usable is False}
    return NodeInventory(facts.source, counts, unusable)


def refuse_absent(file: PlanFile, inventory: NodeInventory) -> None:
    """Raise Conflict naming every node of the plan that is missing, cannot be used, or has too few devices."""
    used: dict[str, set[str]] = {}
    for pipeline in file.plan.pipelines:
        for stage in pipeline.stages:
            for device in stage.devices:
                used.setdefault(device.rpartition("/")[0], set()).add(device)
    wrong = [why for node, devices in used.items() if (why := _why_not(node, len(devices), inventory))]
    if wrong:
        raise Conflict(
            f"the plan cannot run on the nodes of {inventory.origin}: {_listed(wrong)}",
            remedy="plan again for the available nodes, or use `penstock place`; or nodes=any (--nodes any) if other "
            "nodes are as good",
        )


def _why_not(node: str, num_devices: int, inventory: NodeInventory) -> str | None:
    if node not in inventory.num_devices:
        near = difflib.get_close_matches(node, inventory.num_devices, 1)
        return f"there is no node {node!r}" + (f" (there is {near[0]!r})" if near else "")
    if node in inventory.unusable:
        return f"{node!r}: {inventory.unusable[node]}"
    has = inventory.num_devices[node]
    if has is not None and has < num_devices:
        return f"{node!r} has {has} devices, and the plan uses {num_devices}"
    return None


def _listed(parts: Iterable[str]) -> str:
    listed = list(parts)
    return "; ".join(listed[:_SHOWN]) + (f"; and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")

"""The output of ``kubectl get nodes -o json`` (or yaml): devices by feature discovery, states, places by labels.

Other objects of the same text are used where they help: Kueue's Topology names the labels of the levels, Volcano's
HyperNodes are the switches themselves, and pods show which devices are busy.
"""

from __future__ import annotations

from collections.abc import Set

from penstock.importers.cluster.facts import NodeFacts, Place, SourceFacts, SwitchFacts
from penstock.importers.cluster.kubernetes.hypernodes import hypernode_switches
from penstock.importers.cluster.kubernetes.kubernetes_devices import busy_devices, read_devices
from penstock.importers.cluster.kubernetes.kubernetes_levels import read_levels
from penstock.importers.cluster.kubernetes.kubernetes_objects import Node, Objects, check_labels, read_objects
from penstock.importers.cluster.structured import several
from penstock.importers.lines import Faults

_EXPECTED_TAINTS = ("nvidia.com/", "amd.com/")
"""Taints that keep away pods without a request for accelerators."""
_CLOSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "ToBeDeletedByClusterAutoscaler")


def read_k8s_nodes(text: str, source: str = "nodes.json") -> SourceFacts:
    """Read the nodes of a Kubernetes cluster.

    Nodes that are not ready, cordoned, or whose devices cannot be distinguished are reported as not usable. Raises
    InvalidDocument with all faults, each by the object's pointer; a text that does not parse by line and column.
    """
    faults = Faults(f"the Kubernetes objects {source!r}")
    objects = read_objects(text, faults)
    check_labels(objects, faults)
    if not objects.nodes and not faults.entries:
        faults.add(None, f"there is no node among them, but {objects.kinds_found}; give `kubectl get nodes -o json`")
    devices = {pointer: read_devices(node, pointer, faults) for pointer, node in objects.nodes.items()}
    with_devices = {node.metadata.name for pointer, node in objects.nodes.items() if devices[pointer].devices}
    switches, assumptions = _switches(objects, with_devices, source, faults)
    faults.stop()
    busy = busy_devices(objects.pods)
    nodes = {}
    for pointer, node in objects.nodes.items():
        name, why = node.metadata.name, _why_closed(node) or devices[pointer].why_not_usable
        nodes[name] = NodeFacts(
            name=name,
            place=Place(source, pointer=pointer or None),
            devices=devices[pointer].devices,
            usable=not why,
            why_not_usable=why,
            busy_devices=busy.get(name, 0) if objects.pods else None,
        )
    assumptions += _node_assumptions(objects, nodes)
    return SourceFacts(
        format="k8s-nodes", source=source, nodes=nodes, switches=switches, assumptions=tuple(assumptions)
    )


def _switches(
    objects: Objects, with_devices: Set[str], source: str, faults: Faults
) -> tuple[tuple[SwitchFacts, ...], list[str]]:
    if not objects.hypernodes:
        return read_levels(objects.nodes, with_devices, objects.topologies, source, faults)
    labels = {node.metadata.name: node.labels for node in objects.nodes.values()}
    switches, assumptions = hypernode_switches(objects.hypernodes, labels, source, faults)
    return switches, [*assumptions, "switches are the HyperNodes of the text; topology labels of nodes are not read"]


def _why_closed(node: Node) -> str:
    """Return why no new pod would start on a node; empty where one would."""
    for condition in node.status.conditions or ():
        if condition.type == "Ready" and condition.status != "True":
            return f"it is not ready ({condition.reason or f'Ready={condition.status}'})"
    if node.metadata.deletionTimestamp is not None:
        return "it is being deleted"
    if node.spec.unschedulable:
        return "it is cordoned (unschedulable)"
    for taint in node.spec.taints or ():
        if taint.effect in ("NoSchedule", "NoExecute") and taint.key.startswith(_CLOSING_TAINTS):
            return f"it has the taint {taint.key}:{taint.effect}"
    return ""


def _node_assumptions(objects: Objects, nodes: dict[str, NodeFacts]) -> list[str]:
    sentences = []
    tolerated: dict[str, list[str]] = {}
    for node in objects.nodes.values():
        for taint in node.spec.taints or ():
            if taint.effect in ("NoSchedule", "NoExecute") and not taint.key.startswith(
                _EXPECTED_TAINTS + _CLOSING_TAINTS
            ):
                tolerated.setdefault(f"{taint.key}:{taint.effect}", []).append(node.metadata.name)
    for taint_name, holders in tolerated.items():
        sentences.append(f"jobs are taken to tolerate {taint_name}, a taint of {several(holders)}")
    memories: dict[str, dict[int, list[str]]] = {}
    for name, facts in nodes.items():
        for device in facts.devices[:1] if facts.devices else ():
            if device.product and device.memory_bytes:
                memories.setdefault(device.product, {}).setdefault(device.memory_bytes, []).append(name)
    for product, by_size in memories.items():
        if max(by_size) > min(by_size) * _SAME_MEMORY:
            parts = [f"{size / 2**30:.1f} GiB on {several(by_size[size])}" for size in sorted(by_size)]
            sentences.append(
                f"{product} has {', '.join(parts)}: kinds are mixed under one name; each node keeps its memory"
            )
    if not objects.pods:
        sentences.append(
            "what runs on the nodes is not in this text; give `kubectl get nodes,pods -A -o json` to have it"
        )
    return sentences


_SAME_MEMORY = 1.05
"""Drivers keep a little of the memory for themselves, not the same everywhere."""

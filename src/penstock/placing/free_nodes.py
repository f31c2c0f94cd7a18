"""Find the free nodes of a topology by a scheduler's list of nodes."""

from __future__ import annotations

from penstock.importers.cluster.formats import FORMATS, recognised
from penstock.schemas.api.topology_import import Format, ImportSource
from penstock.schemas.errors import Conflict, InvalidDocument
from penstock.schemas.topology import ClusterTopology

SAYING: tuple[Format, ...] = ("scontrol-nodes", "k8s-nodes")
"""Formats that state which nodes may be used, and what runs on them."""

WANTED = "give what `scontrol show nodes` or `kubectl get nodes,pods -A -o json` prints"


def free_nodes(text: str, source: str, topology: ClusterTopology) -> list[str]:
    """Return the topology's usable nodes on which no device is in use; other nodes of the text are ignored.

    Raises InvalidDocument for a text that does not state it, Conflict where no node is left, with the reasons.
    """
    try:
        name = recognised(ImportSource(text=text, name=source))
    except InvalidDocument as error:
        if not error.faults:
            raise
        raise InvalidDocument(
            f"{source} has no known format, and does not say which nodes are free", remedy=WANTED
        ) from None
    if name not in SAYING:
        raise InvalidDocument(
            f"{source} is {FORMATS[name].what}, which does not say which nodes are free",
            remedy=WANTED,
        )
    facts = FORMATS[name].reader(name)(text, source)
    names = {node.name for node in topology.expanded().nodes}
    free, why = [], {}
    for node in facts.nodes.values():
        if node.name not in names:
            continue
        if node.usable is False:
            why[node.name] = node.why_not_usable or "not usable"
        elif node.busy_devices:
            why[node.name] = f"{node.busy_devices} of its devices taken" if node.devices else "something runs there"
        else:
            free.append(node.name)
    if not free:
        first = [f"{node}: {reason}" for node, reason in list(why.items())[:3]] or ["it names no node of the topology"]
        raise Conflict(f"no node of {topology.name!r} is free according to {source}: {'; '.join(first)}")
    return free

"""A topology of Penstock's own as a source: what living agents offer, with the links that a probe has measured."""

from __future__ import annotations

from penstock.importers.cluster.facts import DeviceFacts, NodeFacts, Place, SourceFacts, StatedDevice
from penstock.importers.cluster.structured import read_documents
from penstock.importers.lines import Faults
from penstock.schemas.topology import ClusterTopology, Device


def read_agents(text: str, source: str = "agents.json") -> SourceFacts:
    """Read the nodes of a topology document, JSON or YAML. Raises InvalidDocument as reading the document does."""
    faults = Faults(f"the topology {source!r}")
    documents = read_documents(text, faults)
    if len(documents) != 1:
        faults.add(None, f"it holds {len(documents)} documents, not one")
    faults.stop()
    by_hand = not text.lstrip("\ufeff \t\r\n").startswith("{")
    topology = ClusterTopology.parse(documents[0], units=True, by_hand=by_hand, origin=repr(source)).expanded()
    nodes = {
        node.name: NodeFacts(
            name=node.name,
            place=Place(source, pointer=f"nodes/{number}"),
            devices=tuple(_device(node.name, place, device) for place, device in enumerate(node.devices)),
        )
        for number, node in enumerate(topology.nodes)
    }
    assumptions = tuple(f"{source}: {sentence}" for sentence in topology.assumptions)
    return SourceFacts(format="agents", source=source, nodes=nodes, assumptions=assumptions, measured=topology)


def _device(node: str, place: int, device: Device) -> DeviceFacts:
    name = device.id.removeprefix(f"{node}/")
    index = int(name) if name.isdecimal() else place
    stated = StatedDevice(name, device.context_bytes, device.price, device.gpus, device.communicators)
    return DeviceFacts(index, product=device.kind, memory_bytes=device.memory_bytes, is_kind=True, stated=stated)

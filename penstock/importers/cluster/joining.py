"""Nodes of several sources joined by their names: what is known of each, and where sources contradict each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from penstock.importers.cluster.facts import (
    DeviceFacts,
    DeviceLinkFacts,
    LinkFacts,
    NicFacts,
    NodeFacts,
    Place,
    SourceFacts,
    SwitchFacts,
)
from penstock.importers.cluster.hardware import Recognised, recognise
from penstock.importers.cluster.hostlist import expand
from penstock.importers.cluster.notes import Notes, shown
from penstock.importers.lines import Faults
from penstock.schemas.topology import Fabric, Link

NAMELESS = "node0"
"""What the one node is called that no source names."""

MEMORY_ERROR = 0.1
"""How far two sources may differ in a device's memory (MiB or MB, with or without ECC); the smaller one counts."""


class Measured(NamedTuple):
    """A node as a topology of Penstock's has it: its fabric, and its link if it has one to a switch."""

    source: str
    fabric: Fabric | None
    link: Link | None


@dataclass(frozen=True, slots=True)
class Host:
    """All that sources say of a node. ``devices`` is None where no source says them."""

    name: str
    devices: tuple[DeviceFacts, ...] | None = None
    device_links: tuple[DeviceLinkFacts, ...] = ()
    has_nvswitch: bool | None = None
    nics: tuple[NicFacts, ...] | None = None
    why_not_usable: str = ""
    busy_devices: int | None = None
    measured: Measured | None = None


@dataclass(frozen=True, slots=True)
class Wiring:
    """What one source says of the network, in the names of the hosts."""

    source: str
    switches: tuple[SwitchFacts, ...]
    links: tuple[LinkFacts, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """Hosts by name, in the order in which they were first named; what each source says of the network."""

    hosts: dict[str, Host] = field(default_factory=dict)
    wirings: tuple[Wiring, ...] = ()


def join(sources: Sequence[SourceFacts], described: Sequence[str | None], notes: Notes) -> Joined:
    """Join sources; ``described``: per source, the hostlist of the nodes that a text without names is about.

    Raises InvalidDocument with all contradictions, each with both places; for short names that fit several nodes; for
    a hostlist with names that no source has.
    """
    faults = Faults("what the sources say together")
    names = _Names(faults)
    for facts in sources:
        names.learn(facts)
    faults.stop("give the nodes the same names in all sources")
    said: dict[str, list[NodeFacts]] = {name: [] for name in names.known}
    for facts in sources:
        for name, node in facts.nodes.items():
            if name:
                said[names.of(name)].append(node)
    for facts, hostlist in zip(sources, described, strict=True):
        if "" in facts.nodes:
            _describe(said, facts.nodes[""], hostlist, notes, faults)
    measured = _measured(sources, names)
    hosts = {name: _host(name, nodes, measured.get(name), faults) for name, nodes in said.items()}
    faults.stop("mend the source that is wrong, or leave it out")
    if names.joined:
        a, b = next(iter(names.joined.items()))
        count = len(names.joined)
        more = f", and so are {count - 1} more" if count > 1 else ""
        notes.assume(f"{a!r} is taken for the node {b!r} of another source{more}: their first labels are the same")
    return Joined(hosts, tuple(_wiring(facts, names) for facts in sources if facts.switches or facts.links))


class _Names:
    """Which names mean the same node: equal ones, and a first label (``gpu1``) and the whole (``gpu1.site.org``)."""

    def __init__(self, faults: Faults) -> None:
        self.known: dict[str, None] = {}
        self.joined: dict[str, str] = {}
        self._by_label: dict[str, list[str]] = {}
        self._faults = faults

    def of(self, name: str) -> str:
        """What the node is called here."""
        return self.joined.get(name, name)

    def learn(self, facts: SourceFacts) -> None:
        """The names of a source. A name joins one node of the sources before, which no other name of it is or joins."""
        before = {label: tuple(names) for label, names in self._by_label.items()}
        here = _named(facts)
        taken: dict[str, str] = {}
        for name in here:
            if name in self.known or name in self.joined:
                continue
            label = _label(name)
            near = [other for other in before.get(label, ()) if label in (name, other) and other not in here]
            if len(near) > 1:
                self._faults.add(None, f"{name!r} of {facts.source} may be any of {', '.join(near)}", at=name)
            elif near and near[0] in taken:
                detail = f"{near[0]!r} may be {taken[near[0]]!r} or {name!r} of {facts.source}"
                self._faults.add(None, detail, at=near[0])
            elif near:
                self.joined[name] = near[0]
                taken[near[0]] = name
            else:
                self.known[name] = None
                if label:
                    self._by_label.setdefault(label, []).append(name)


def _label(name: str) -> str:
    """The first label of a host name; empty for an address."""
    label = name.partition(".")[0]
    return "" if label.isdigit() else label


def _named(facts: SourceFacts) -> dict[str, None]:
    switches = {switch.name for switch in facts.switches}
    found = dict.fromkeys(name for name in facts.nodes if name)
    for switch in facts.switches:
        found.update(dict.fromkeys(switch.nodes))
    for link in facts.links:
        found.update(dict.fromkeys(end for end in (link.a, link.b) if end not in switches))
    return found


def _wiring(facts: SourceFacts, names: _Names) -> Wiring:
    if not names.joined:
        return Wiring(facts.source, facts.switches, facts.links)
    return Wiring(
        facts.source,
        tuple(replace(switch, nodes=tuple(map(names.of, switch.nodes))) for switch in facts.switches),
        tuple(replace(link, a=names.of(link.a), b=names.of(link.b)) for link in facts.links),
    )


def _describe(
    said: dict[str, list[NodeFacts]], node: NodeFacts, hostlist: str | None, notes: Notes, faults: Faults
) -> None:
    """Let a text without names speak of the nodes that it is about."""
    if hostlist is not None:
        for name in expand(hostlist):
            said.setdefault(name, []).append(node)
        return
    if not said:
        said[NAMELESS] = [node]
        notes.assume(f"{node.place.source} names no node; it is called {NAMELESS}")
        return
    alike = [name for name, nodes in said.items() if _may_describe(node, nodes)]
    if not alike:
        faults.add(None, "it is like no node of the other sources; say which it describes", at=str(node.place))
        return
    for name in alike:
        said[name].append(node)
    if len(said) > 1:
        notes.assume(
            f"{shown(alike)} {'is' if len(alike) == 1 else 'are each'} as {node.place.source} describes one node"
        )


def _may_describe(node: NodeFacts, nodes: Sequence[NodeFacts]) -> bool:
    told = [each.devices for each in nodes if each.devices is not None]
    if node.devices is None or not told:
        return True
    if len(told[0]) != len(node.devices):
        return False
    return all(_agree(a.product, b.product) for a, b in zip(told[0], node.devices, strict=True))


def _measured(sources: Sequence[SourceFacts], names: _Names) -> dict[str, Measured]:
    found: dict[str, Measured] = {}
    for facts in sources:
        topology = facts.measured
        if topology is None:
            continue
        links = {link.a: link for link in topology.links if link.b in topology.switches}
        links |= {link.b: link for link in topology.links if link.a in topology.switches}
        for node in topology.nodes:
            here = Measured(facts.source, node.fabric, links.get(node.name))
            found.setdefault(names.of(node.name), here)
    return found


def _host(name: str, nodes: Sequence[NodeFacts], measured: Measured | None, faults: Faults) -> Host:
    if len(nodes) == 1:
        node = nodes[0]
        why, busy_devices = _why_not_usable(nodes), node.busy_devices
        return Host(name, node.devices, node.device_links, node.has_nvswitch, node.nics, why, busy_devices, measured)
    busy = [node.busy_devices for node in nodes if node.busy_devices is not None]
    return Host(
        name,
        _devices(name, nodes, faults),
        next((node.device_links for node in nodes if node.device_links), ()),
        next((node.has_nvswitch for node in nodes if node.has_nvswitch is not None), None),
        max((node.nics for node in nodes if node.nics is not None), key=_speeds, default=None),
        _why_not_usable(nodes),
        max(busy, default=None),
        measured,
    )


def _why_not_usable(nodes: Sequence[NodeFacts]) -> str:
    return next((node.why_not_usable or "not usable" for node in nodes if node.usable is False), "")


def _speeds(nics: Sequence[NicFacts]) -> tuple[int, int]:
    """The source that says more of the cards counts."""
    return sum(nic.bandwidth_bytes_per_s is not None for nic in nics), sum(bool(nic.near) for nic in nics)


def _devices(name: str, nodes: Sequence[NodeFacts], faults: Faults) -> tuple[DeviceFacts, ...] | None:
    told = [(node.devices, node.place) for node in nodes if node.devices is not None]
    if not told:
        return None
    devices, place = told[0]
    for others, other_place in told[1:]:
        if len(others) != len(devices):
            faults.add(None, f"{_count(devices)} in {place}, {_count(others)} in {other_place}", at=name)
            return devices
        pairs = zip(devices, others, strict=True)
        devices = tuple(_device(name, a, b, (place, other_place), faults) for a, b in pairs)
    return devices


def _device(name: str, a: DeviceFacts, b: DeviceFacts, places: tuple[Place, Place], faults: Faults) -> DeviceFacts:
    if not _agree(a.product, b.product):
        detail = f"device {a.index} is {a.product!r} in {places[0]}, {b.product!r} in {places[1]}"
        faults.add(None, detail, at=name)
    memory = [each for each in (a.memory_bytes, b.memory_bytes) if each is not None]
    if memory and max(memory) > min(memory) * (1 + MEMORY_ERROR):
        detail = f"device {a.index} has {memory[0]} bytes in {places[0]}, {memory[1]} in {places[1]}"
        faults.add(None, detail, at=name)
    most = max((a, b), key=lambda each: _told_by(each.product))
    return replace(
        most,
        index=a.index,
        memory_bytes=min(memory, default=None),
        bus_id=a.bus_id or b.bus_id,
        pcie_bandwidth_bytes_per_s=a.pcie_bandwidth_bytes_per_s or b.pcie_bandwidth_bytes_per_s,
        is_partition=a.is_partition or b.is_partition,
    )


def _agree(a: str | None, b: str | None) -> bool:
    """Whether two names may be of one product. A name that the table does not know, a site's own, may be anything's."""
    known = [each for each in map(_recognised, (a, b)) if each is not None]
    if len(known) < 2:
        return True
    one, other = known
    if one.hardware.kind != other.hardware.kind:
        return False
    if not one.is_bare and not other.is_bare and one.hardware != other.hardware:
        return False
    return one.memory is None or other.memory is None or one.is_bare or other.is_bare or one.memory == other.memory


def _told_by(product: str | None) -> int:
    """How much a product's name tells."""
    if product is None:
        return 0
    known = recognise(product)
    return 1 if known is None else 2 if known.is_bare or known.memory is None else 3


def _recognised(product: str | None) -> Recognised | None:
    return None if product is None else recognise(product)


def _count(devices: Sequence[DeviceFacts]) -> str:
    return f"{len(devices)} device{'' if len(devices) == 1 else 's'}"


def usable(hosts: Mapping[str, Host], devices_per_node: int | None, notes: Notes) -> dict[str, Host]:
    """Hosts with whole devices that may be used; the others are left out.

    Where a source says devices of some hosts, others need ``devices_per_node``.
    """
    are_told = devices_per_node is None and any(host.devices is not None for host in hosts.values())
    found = {}
    for name, host in hosts.items():
        if host.why_not_usable:
            notes.leave_out(name, host.why_not_usable)
        elif host.devices is None and are_told:
            notes.leave_out(name, "no source says which devices it has")
        elif host.devices is not None and not host.devices:
            notes.leave_out(name, "it has no device")
        elif host.devices is not None and any(device.is_partition for device in host.devices):
            notes.leave_out(name, "its devices are partitions (MIG); plans are for whole devices")
        else:
            found[name] = host
    return found

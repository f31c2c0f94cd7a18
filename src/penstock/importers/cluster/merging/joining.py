"""Nodes of several sources joined by their names: the facts of each, and contradictions between sources."""

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
    SourceFacts,
    SwitchFacts,
)
from penstock.importers.cluster.hardware import is_partition
from penstock.importers.cluster.hostlist import expand
from penstock.importers.cluster.merging.contradictions import Contradictions, against, agree, count_of, precision_of
from penstock.importers.cluster.merging.node_names import Names, free_name
from penstock.importers.cluster.merging.notes import Notes, shown
from penstock.importers.lines import Faults
from penstock.schemas.topology import Fabric, Link

NAMELESS = "node0"
"""The name of the one node that no source names."""
NO_DEVICE = "it has no device"


class Measured(NamedTuple):
    """A node in a topology document of Penstock: its fabric, and its link if it has one to a switch."""

    source: str
    fabric: Fabric | None
    link: Link | None


@dataclass(frozen=True, slots=True)
class Host:
    """All facts of the sources about a node. ``devices`` is None where no source lists them."""

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
    """The network by one source, in the names of the hosts."""

    source: str
    switches: tuple[SwitchFacts, ...]
    links: tuple[LinkFacts, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """Hosts by name, in the order in which they were first named; the network by each source.

    ``names``: the name here for each other name of a host.
    """

    hosts: dict[str, Host] = field(default_factory=dict)
    wirings: tuple[Wiring, ...] = ()
    names: dict[str, str] = field(default_factory=dict)


def join(sources: Sequence[SourceFacts], described: Sequence[str | None], notes: Notes) -> Joined:
    """Join sources; ``described``: per source, the hostlist of the nodes that a text without names is about.

    Raises InvalidDocument with all contradictions, each with both places, for short names that fit several nodes, and
    for a hostlist with names that no source has.
    """
    faults = Faults("what the sources say together")
    names = Names(faults)
    for facts in sources:
        names.learn(facts)
    faults.stop("give the nodes the same names in all sources")
    facts_of: dict[str, list[NodeFacts]] = {name: [] for name in names.nodes}
    for facts in sources:
        for name, node in facts.nodes.items():
            if name:
                facts_of[names.of(name)].append(node)
    nameless = [
        (facts.nodes[""], hostlist) for facts, hostlist in zip(sources, described, strict=True) if "" in facts.nodes
    ]
    if not nameless and any(hostlist is not None for hostlist in described):
        faults.add(None, "every source names its nodes itself; leave --node (sources.nodes) out", at=str(described[0]))
    for node, hostlist in nameless:
        wanted = None if hostlist is None else [names.of(name) for name in expand(hostlist)]
        _describe(facts_of, node, wanted, notes, faults, is_known=bool(names.nodes))
    measured = _measured(sources, names)
    contradictions = Contradictions()
    hosts = {name: _host(name, nodes, measured.get(name), contradictions) for name, nodes in facts_of.items()}
    contradictions.report(faults)
    faults.stop("mend the source that is wrong, or leave it out")
    if names.joined:
        a, b = next(iter(names.joined.items()))
        count = len(names.joined)
        more = f", and so are {count - 1} more" if count > 1 else ""
        notes.assume(f"{a!r} is taken for the node {b!r} of another source{more}: their first labels are the same")
    wirings = tuple(_wiring(facts, names, notes) for facts in sources if facts.switches or facts.links)
    return Joined(hosts, wirings, names.joined)


def _wiring(facts: SourceFacts, names: Names, notes: Notes) -> Wiring:
    """Return a source's network with the hosts' names for nodes, and no switch named like a host."""
    names_in_use = {*names.nodes, *(switch.name for switch in facts.switches)}
    called = {
        switch.name: free_name(f"{switch.name}-switch", names_in_use)
        for switch in facts.switches
        if switch.name in names.nodes and not switch.is_nvlink
    }
    if called:
        notes.assume(f"{facts.source} has switches and nodes of one name; the switches are {shown(called.values())}")
    if not called and not names.joined:
        return Wiring(facts.source, facts.switches, facts.links)
    switches = tuple(
        replace(
            switch,
            name=called.get(switch.name, switch.name),
            nodes=tuple(map(names.of, switch.nodes)),
            switches=tuple(called.get(name, name) for name in switch.switches),
        )
        for switch in facts.switches
    )

    def end(name: str) -> str:
        return called.get(name, names.of(name))

    links = tuple(replace(link, a=end(link.a), b=end(link.b)) for link in facts.links)
    return Wiring(facts.source, switches, links)


def _describe(
    facts_of: dict[str, list[NodeFacts]],
    node: NodeFacts,
    wanted: Sequence[str] | None,
    notes: Notes,
    faults: Faults,
    *,
    is_known: bool,
) -> None:
    """Apply a text without names to the nodes that it describes; ``is_known``: others say which nodes there are."""
    if wanted is not None:
        if is_known and (unknown := [name for name in wanted if name not in facts_of]):
            faults.add(None, f"no source names it; {node.place.source} cannot describe it", at=shown(unknown))
        for name in wanted:
            facts_of.setdefault(name, []).append(node)
        return
    if not facts_of:
        facts_of[NAMELESS] = [node]
        notes.assume(f"{node.place.source} names no node; it is called {NAMELESS}")
        return
    are_known = any(each.devices is not None for nodes in facts_of.values() for each in nodes)
    alike = [name for name, nodes in facts_of.items() if _may_describe(node, nodes, are_known)]
    if not alike:
        what = "it" if node.devices is None else f"the node with {count_of(node.devices)}"
        faults.add(None, f"{what} is like none of the other sources; say which it is (--node)", at=str(node.place))
        return
    for name in alike:
        facts_of[name].append(node)
    if len(facts_of) > 1:
        notes.assume(
            f"{shown(alike)} {'is' if len(alike) == 1 else 'are each'} as {node.place.source} describes one node"
        )


def _may_describe(node: NodeFacts, nodes: Sequence[NodeFacts], are_known: bool) -> bool:
    """Return whether a node is like the one of ``nodes``; ``are_known``: some source lists devices of nodes."""
    others = [each.devices for each in nodes if each.devices is not None]
    if node.devices is None or not others:
        return not are_known
    if len(others[0]) != len(node.devices):
        return False
    return all(agree(a.product, b.product) for a, b in zip(others[0], node.devices, strict=True))


def _measured(sources: Sequence[SourceFacts], names: Names) -> dict[str, Measured]:
    measured: dict[str, Measured] = {}
    for facts in sources:
        topology = facts.measured
        if topology is None:
            continue
        links = {link.a: link for link in topology.links if link.b in topology.switches}
        links |= {link.b: link for link in topology.links if link.a in topology.switches}
        for node in topology.nodes:
            here = Measured(facts.source, node.fabric, links.get(node.name))
            measured.setdefault(names.of(node.name), here)
    return measured


def _host(name: str, nodes: Sequence[NodeFacts], measured: Measured | None, contradictions: Contradictions) -> Host:
    if len(nodes) == 1:
        node = nodes[0]
        why, busy_devices = _why_not_usable(nodes), node.busy_devices
        return Host(name, node.devices, node.device_links, node.has_nvswitch, node.nics, why, busy_devices, measured)
    busy = [node.busy_devices for node in nodes if node.busy_devices is not None]
    _check_links(name, nodes, contradictions)
    return Host(
        name,
        _devices(name, nodes, contradictions),
        next((node.device_links for node in nodes if node.device_links), ()),
        next((node.has_nvswitch for node in nodes if node.has_nvswitch is not None), None),
        max((node.nics for node in nodes if node.nics is not None), key=_speeds, default=None),
        _why_not_usable(nodes),
        max(busy, default=None),
        measured,
    )


def _check_links(name: str, nodes: Sequence[NodeFacts], contradictions: Contradictions) -> None:
    """Add a contradiction where one source has NVLink between devices, and another PCIe alone."""
    nvlink = [node for node in nodes if node.has_nvswitch or any(link.path == "nvlink" for link in node.device_links)]
    pcie = [node for node in nodes if node.device_links and node not in nvlink]
    if nvlink and pcie:
        contradictions.add(name, "NVLink joins its devices", nvlink[0].place, "PCIe alone does", pcie[0].place)


def _why_not_usable(nodes: Sequence[NodeFacts]) -> str:
    return next((node.why_not_usable or "not usable" for node in nodes if node.usable is False), "")


def _speeds(nics: Sequence[NicFacts]) -> tuple[int, int]:
    """Return a key that ranks network cards by how much their source states."""
    return sum(nic.bandwidth_bytes_per_s is not None for nic in nics), sum(bool(nic.near) for nic in nics)


def _devices(name: str, nodes: Sequence[NodeFacts], contradictions: Contradictions) -> tuple[DeviceFacts, ...] | None:
    statements = [(node.devices, node.place) for node in nodes if node.devices is not None]
    if not statements:
        return None
    devices, place = statements[0]
    for others, other_place in statements[1:]:
        pairs = list(zip(devices, others, strict=False))
        words = next((difference for difference in map(against, pairs) if difference), None)
        if len(others) != len(devices):
            words = count_of(devices), count_of(others)
        if words is not None:
            contradictions.add(name, words[0], place, words[1], other_place)
            return devices
        devices = tuple(_device(a, b) for a, b in pairs)
    return devices


def _device(a: DeviceFacts, b: DeviceFacts) -> DeviceFacts:
    most = max((a, b), key=lambda each: (precision_of(each.product), each.is_kind))
    memory = [each for each in (a.memory_bytes, b.memory_bytes) if each is not None]
    return replace(
        most,
        index=a.index,
        memory_bytes=min(memory, default=None),
        bus_id=a.bus_id or b.bus_id,
        pcie_bandwidth_bytes_per_s=a.pcie_bandwidth_bytes_per_s or b.pcie_bandwidth_bytes_per_s,
        is_partition=a.is_partition or b.is_partition,
        stated=a.stated or b.stated,
    )


def usable(hosts: Mapping[str, Host], devices_per_node: int | None, notes: Notes) -> dict[str, Host]:
    """Return the hosts with whole devices that may be used; the others are left out.

    Where a source lists devices of some hosts, others need ``devices_per_node``. Where no host has a device, as Slurm
    prints a cluster without GPUs, all have that many: processors, for example, are meant.
    """
    are_known = devices_per_node is None and any(host.devices is not None for host in hosts.values())
    if devices_per_node is not None and hosts and not any(host.devices for host in hosts.values()):
        if uncounted := [name for name, host in hosts.items() if host.devices is not None]:
            notes.assume(
                f"sources count no device; a node has {devices_per_node}, as --devices-per-node says", uncounted
            )
        hosts = {name: replace(host, devices=None) for name, host in hosts.items()}
    usable_hosts = {}
    for name, host in hosts.items():
        if host.why_not_usable:
            notes.leave_out(name, host.why_not_usable)
        elif host.devices is None and are_known:
            notes.leave_out(name, "no source says which devices it has")
        elif host.devices is not None and not host.devices:
            notes.leave_out(name, NO_DEVICE)
        elif host.devices is not None and all(map(_is_part, host.devices)):
            notes.leave_out(
                name, "its devices are partitions (MIG, vGPU, or shared in time); plans are for whole devices"
            )
        else:
            usable_hosts[name] = _whole_only(host, notes)
    return usable_hosts


def _whole_only(host: Host, notes: Notes) -> Host:
    """Return the host without its partitions. Those are noted, and so are jobs that may run on either."""
    devices = tuple(device for device in host.devices or () if not _is_part(device))
    parts = len(host.devices or ()) - len(devices)
    if not parts:
        return host
    notes.assume(
        f"{parts} partitions of devices (MIG, vGPU, or shared in time) are left out beside whole ones", [host.name]
    )
    kept = {device.index for device in devices}
    links = tuple(link for link in host.device_links if link.a in kept and link.b in kept)
    return replace(host, devices=devices, device_links=links)


def _is_part(device: DeviceFacts) -> bool:
    return device.is_partition or (device.product is not None and is_partition(device.product))

"""Facts of several sources become one topology, with all assumptions and everything left out.

Nodes are joined by name (``joining``), what is inside each comes from facts, options and the table of devices
(``inside``), what is between them from one source (``network``). The same sources give the same topology, byte by byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.importers.cluster.facts import SourceFacts
from penstock.importers.cluster.hostlist import expand
from penstock.importers.cluster.merging.inside import Inside, insides
from penstock.importers.cluster.merging.joining import NO_DEVICE, Host, Joined, Wiring, join, usable
from penstock.importers.cluster.merging.measured import kinds_of, measured_network
from penstock.importers.cluster.merging.network import links_of, network
from penstock.importers.cluster.merging.notes import Notes, shown
from penstock.importers.cluster.merging.reading import Options
from penstock.schemas.api.topology_import import ImportOptions, SourceFound, TopologyImported
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest
from penstock.schemas.topology import ClusterTopology


def merge(
    sources: Sequence[SourceFacts],
    described: Sequence[str | None],
    options: ImportOptions,
    most_devices: int | None = None,
) -> TopologyImported:
    """Merge all sources into one topology; ``described``: per source, the nodes that a text without names is about.

    Raises InvalidDocument for contradictions, for nodes that no source has, where nothing is left, and with all that
    is missing; UnsupportedRequest for more than ``most_devices``.
    """
    notes, device_options = Notes(), Options(options)
    joined = join(sources, described, notes)
    for sentence in (sentence for facts in sources for sentence in facts.assumptions):
        notes.assume(sentence)
    if not joined.hosts:
        raise InvalidDocument("no source names a node", remedy="give a source with nodes, or --node")
    hosts = _asked_for(joined, options.only, notes)
    hosts = usable(hosts, options.devices_per_node, notes)
    if options.only_free:
        hosts = _free_only(hosts, notes)
    wirings = _with_nvlink_blocks(joined.wirings) if options.nvlink_blocks else joined.wirings
    net, reached = network(wirings, hosts, notes)
    hosts = {name: host for name, host in hosts.items() if name in reached}
    if not hosts:
        _refuse_nothing(notes)
    inside = insides(hosts, device_options, notes)
    _refuse_more(sum(len(each.devices) for each in inside.values()), most_devices)
    wires = measured_network(sources, list(hosts), joined.names, notes) if net.is_unknown else None
    if wires is None:
        wires = links_of(net, inside, options, notes) if len(inside) == len(hosts) else {}
    notes.stop_if_missing()
    for unused in device_options.unused():
        notes.assume(f"that devices are {unused} has no effect: the sources say what they are")
    assumptions = notes.assumptions(hosts)
    topology = ClusterTopology.parse(
        {
            "name": options.name,
            "nodes": [_node(name, inside[name]) for name in hosts],
            "kinds": kinds_of(sources, options.kinds),
            "assumptions": assumptions,
            **wires,
        }
    )
    return TopologyImported.model_construct(
        topology=topology,
        sources=tuple(map(_source_row, sources)),
        assumptions=assumptions,
        left_out=notes.left_out(),
        free=_free(hosts),
        hash=None,
    )


def _with_nvlink_blocks(wirings: Sequence[Wiring]) -> tuple[Wiring, ...]:
    """Return blocks as NVLink domains. Raises InvalidDocument where no source has any."""
    with_blocks = tuple(
        replace(wiring, switches=tuple(replace(each, is_nvlink=each.layer == "block") for each in wiring.switches))
        for wiring in wirings
        if any(each.layer == "block" for each in wiring.switches)
    )
    if not with_blocks:
        raise InvalidDocument("no source has blocks to treat as NVLink domains", remedy="leave --nvlink-blocks out")
    others = tuple(each for each in wirings if all(switch.layer != "block" for switch in each.switches))
    return with_blocks + others


def _source_row(facts: SourceFacts) -> SourceFound:
    return SourceFound(
        source=facts.source,
        format=facts.format,  # type: ignore[arg-type]
        nodes=len(facts.nodes),
        switches=len(facts.switches),
        links=len(facts.links),
    )


def _node(name: str, inside: Inside) -> dict[str, Any]:
    """Return plain data, which is validated as a whole: many times faster than object by object."""
    devices = [
        {"id": f"{name}/{device}", **entry.plain} for device, entry in zip(inside.names, inside.devices, strict=True)
    ]
    return {"name": name, "devices": devices, "fabric": inside.fabric}


def _asked_for(joined: Joined, hostlist: str | None, notes: Notes) -> dict[str, Host]:
    hosts = joined.hosts
    if hostlist is None:
        return dict(hosts)
    wanted = dict.fromkeys(joined.names.get(name, name) for name in expand(hostlist))
    if unknown := [name for name in wanted if name not in hosts]:
        raise InvalidDocument(
            f"no source names the nodes {shown(unknown)}",
            faults=(Fault("/options/only", f"no source names {shown(unknown)}", "unknown"),),
            remedy=f"choose from {shown(hosts)}" if len(hosts) < 10_000 else None,
        )
    for name in hosts:
        if name not in wanted:
            notes.leave_out(name, "it was not asked for")
    return {name: host for name, host in hosts.items() if name in wanted}


def _free_only(hosts: Mapping[str, Host], notes: Notes) -> dict[str, Host]:
    if all(host.busy_devices is None for host in hosts.values()):
        raise InvalidDocument(
            "no source says which nodes are busy, so the free nodes are unknown",
            remedy="add the output of `scontrol show nodes`, or leave --only-free out",
        )
    for name, host in hosts.items():
        if host.busy_devices is None:
            notes.leave_out(name, "no source says whether something runs there")
        elif host.busy_devices:
            notes.leave_out(name, "something runs there")
    return {name: host for name, host in hosts.items() if host.busy_devices == 0}


def _free(hosts: Mapping[str, Host]) -> str | None:
    """Return the hosts on which nothing runs; None where no source states what runs."""
    if all(host.busy_devices is None for host in hosts.values()):
        return None
    free = [name for name, host in hosts.items() if host.busy_devices == 0]
    return shown(free) if free else ""


def _refuse_more(devices: int, most: int | None) -> None:
    if most is not None and devices > most:
        raise UnsupportedRequest(
            f"the sources have {devices:,} devices; the limit is {most:,} (max_devices)",
            remedy="import fewer nodes (--only), or have the operator raise max_devices",
        )


def _refuse_nothing(notes: Notes) -> None:
    faults = tuple(Fault(group.nodes, group.why, "left-out") for group in notes.left_out())
    no_device = all(group.why == NO_DEVICE for group in notes.left_out())
    remedy = "--devices-per-node 2 --device-kind cpu, if the job trains on CPUs" if no_device else None
    raise InvalidDocument(
        "no node is left for the topology", faults=faults, remedy=remedy or "see why each node was left out"
    )

"""``penstock probe``: what links between processes, and between hosts, really carry."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documents import STANDARD, post_document, refuse_unwritable, write_document

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.topology import ClusterTopology, Fabric


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("probe")(probe)


def probe(
    peers: Annotated[
        list[str] | None, typer.Argument(metavar="[HOST:PORT]…", help="Peers whose links are measured pair by pair.")
    ] = None,
    agents: Annotated[
        str | None, typer.Option(metavar="URL", help="The living agents of this service are the peers; it is told.")
    ] = None,
    serve: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Be such a peer, until interrupted.")] = None,
    name: Annotated[
        str | None, typer.Option(help="What this host is called; the host's own name when left out.")
    ] = None,
    fabric: Annotated[
        str | None, typer.Option(help="Bandwidth between this host's devices ('12 GB/s') instead of measuring it.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where the topology goes; - is standard output.")
    ] = STANDARD,
    post: Annotated[str | None, typer.Option(help="Also send the topology to this service, http://host:port.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="Measuring time per direction of a link.")] = 3.0,
    cpu_devices: Annotated[int, typer.Option(min=0, help="CPU devices that this host offers; 0: its GPUs.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, help="Without peers: hosts to speak for, all like this one.")] = 1,
    node_names: Annotated[str, typer.Option(help="Without peers: what node i is called, by str.format.")] = "node{}",
) -> None:
    """Measure links: between processes of this machine, or between hosts where `penstock probe --serve` runs.

    Writes a topology. With peers, this machine is itself part of it only where it is one of them.
    """
    if serve is not None:
        if peers:
            raise typer.BadParameter("a peer measures when it is asked to; give either --serve or peers")
        _serve(serve, name or socket.gethostname(), cpu_devices, fabric)
        return
    if agents is not None:
        if peers:
            raise typer.BadParameter("the agents are the peers; give either --agents or peers")
        peers, post = _peers_of_agents(agents), post or agents
    refuse_unwritable(output)
    screen = _screen()
    topology = _of_peers(screen, peers, seconds) if peers else _of_processes(screen, cpu_devices, nodes, node_names)
    screen.done()
    write_document(topology, output)
    if post is not None:
        post_document(screen, topology, post)


def _peers_of_agents(url: str) -> list[str]:
    """Where the living agents answer probes. Raises NotFound without any, InvalidDocument naming those that do not."""
    from penstock.client import Client
    from penstock.schemas.errors import InvalidDocument, NotFound

    with Client(url) as client:
        living = [agent for agent in client.agents() if agent.alive and agent.devices]
    if not living:
        raise NotFound(f"no agent with a device is alive at {url}", remedy="penstock agent --server …")
    if silent := [agent.id for agent in living if agent.probe_address is None]:
        raise InvalidDocument(f"agents {', '.join(silent)} answer no probes", remedy="their probe_port is -1")
    return [agent.probe_address for agent in living if agent.probe_address is not None]


def _serve(address: str, name: str, cpu_devices: int, fabric: str | None) -> None:
    """Be a peer in this process until it is interrupted or told to end."""
    from penstock.executor.devices import discover
    from penstock.executor.links.link_peer import Host, Peer

    devices = tuple(device.offer for device in discover(name, cpu_devices=cpu_devices))
    inside = _inside(len(devices), cpu_devices, fabric)
    peer = Peer(address, Host(name, devices, inside))
    _screen().say(f"host {name!r} with {len(devices)} devices listens on {peer.address}")
    try:
        peer.serve()
    finally:
        peer.close()


def _inside(devices: int, cpu_devices: int, given: str | None) -> Fabric | None:
    from penstock.schemas.quantities import parse_bytes_per_s
    from penstock.schemas.topology import Fabric

    if given is not None:
        try:
            return Fabric(bandwidth_bytes_per_s=parse_bytes_per_s(given))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--fabric") from None
    if devices < 2 or not cpu_devices:
        return None
    from penstock.executor.links.link_probe import measure_links

    return measure_links(devices - devices % 2).fabric()


def _of_peers(screen: Screen, peers: list[str], seconds: float) -> ClusterTopology:
    from penstock.executor.links.link_peer import measure_pairs, who, with_fabric
    from penstock.executor.links.measured_topology import topology_of_hosts
    from penstock.report.words import duration

    hosts = [with_fabric(address, who(address), seconds=seconds) for address in peers]
    links = measure_pairs(peers, seconds=seconds, progress=screen.progress)
    for (a, b), link in sorted(links.items()):
        carried = f"{link.bandwidth_bytes_per_s / 1e6:.4g} MB/s"
        screen.say(f"{hosts[a].name} → {hosts[b].name}: {carried}, {duration(link.latency_ns)} late")
    return topology_of_hosts(hosts, links)


def _of_processes(screen: Screen, cpu_devices: int, nodes: int, node_names: str) -> ClusterTopology:
    from penstock.executor.devices import machine_memory_bytes
    from penstock.executor.links.link_probe import measure_links, measured_cluster

    if cpu_devices < 2:
        raise typer.BadParameter(
            "links of one machine are measured between two processes or more", param_hint="--cpu-devices"
        )
    link = measure_links(cpu_devices - cpu_devices % 2, progress=screen.progress)
    return measured_cluster(
        link,
        nodes=nodes,
        devices_per_node=cpu_devices,
        memory_bytes=machine_memory_bytes() // (nodes * cpu_devices),
        node_names=node_names,
    )


def _screen() -> Screen:
    """Standard error: standard output may be the topology's."""
    from penstock.cli.show import Screen

    return Screen.of(file=sys.stderr)

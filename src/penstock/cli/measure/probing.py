"""``penstock probe``: what links between processes, and between hosts, really carry."""

from __future__ import annotations

import socket
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.durations import METAVAR, SECOND_NS, between, seconds
from penstock.cli.input_files import STANDARD, post_document, prepare_output, write_document
from penstock.cli.options import MEASUREMENT, Document
from penstock.cli.panels import MEASURE
from penstock.cli.service.remote import Post

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.topology import ClusterTopology, Fabric

PEERS = "Peers"


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("probe", rich_help_panel=MEASURE)(probe)


def probe(
    peers: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[HOST:PORT]…", help="Addresses of peers (`penstock probe --serve`), measured pair by pair."
        ),
    ] = None,
    agents: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Service whose living agents are the peers, such as http://planner:8642; it also gets the topology.",
            rich_help_panel=PEERS,
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address to be such a peer at until interrupted: 0.0.0.0:8745.",
            rich_help_panel=PEERS,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of this host in the topology (default: its own).", rich_help_panel=PEERS)
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(
            metavar="BANDWIDTH",
            help="Bandwidth between the devices of this host, such as '12 GB/s' (default: measured).",
            rich_help_panel=PEERS,
        ),
    ] = None,
    cpu_devices: Annotated[
        int,
        typer.Option(min=0, help="CPU devices that this host offers; 0 offers its GPUs.", rich_help_panel=MEASUREMENT),
    ] = 2,
    nodes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Without peers: nodes of the topology, all taken to be like this one.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = 1,
    node_names: Annotated[
        str,
        typer.Option(help="Without peers: names of the nodes, in which {} is the number.", rich_help_panel=MEASUREMENT),
    ] = "node{}",
    measure_for: Annotated[
        int,
        typer.Option(
            "--measure-for",
            parser=between("100ms", "60s"),
            metavar=METAVAR,
            show_default="3s",
            help="Time that each direction of a link is measured for: 500ms, 10s.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = 3 * SECOND_NS,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives",
            help="Also measure all-reduces, all-gathers and the like among the CPU devices of a node and of all nodes.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    output: Document = STANDARD,
    post: Post = None,
) -> None:
    """Measure the links between processes of this machine, or between hosts, and write a topology.

    With peers, this machine is part of the topology only if it is one of them.

    Example: penstock probe 10.0.0.1:8745 10.0.0.2:8745 -o topology.json
    """
    if serve is not None:
        if peers:
            raise typer.BadParameter("a peer measures only on request; give either --serve or peers")
        _serve(serve, name or socket.gethostname(), cpu_devices, fabric)
        return
    if agents is not None:
        if peers:
            raise typer.BadParameter("the agents are the peers; give either --agents or peers")
        peers, post = _peers_of_agents(agents), post or agents
    prepare_output(output)
    screen = _screen()
    topology = (
        _of_peers(screen, peers, seconds(measure_for), collectives)
        if peers
        else _of_processes(screen, cpu_devices, nodes, node_names, collectives)
    )
    screen.done()
    if topology.collectives is not None:
        screen.say(f"{len(topology.collectives)} times of collectives")
    write_document(topology, output)
    if post is not None:
        post_document(screen, topology, post)


def _peers_of_agents(url: str) -> list[str]:
    """Return the addresses at which the living agents answer probes.

    Raises NotFound where no agent is alive, InvalidDocument naming agents that do not answer.
    """
    from penstock.client import Client
    from penstock.schemas.errors import InvalidDocument, NotFound

    with Client(url) as client:
        living = [agent for agent in client.agents() if agent.alive and agent.devices]
    if not living:
        raise NotFound(f"no agent with a device is alive at {url}", remedy="penstock agent --server …")
    if silent := [agent.id for agent in living if agent.probe_address is None]:
        raise InvalidDocument(
            f"agents {', '.join(silent)} do not answer probes", remedy="set their probe_port, which is -1"
        )
    return [agent.probe_address for agent in living if agent.probe_address is not None]


def _serve(address: str, name: str, cpu_devices: int, fabric: str | None) -> None:
    """Serve as a peer in this process until it is interrupted or terminated."""
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


def _inside(devices: int, cpu_devices: int, bandwidth: str | None) -> Fabric | None:
    from penstock.schemas.quantities import parse_bytes_per_s
    from penstock.schemas.topology import Fabric

    if bandwidth is not None:
        try:
            return Fabric(bandwidth_bytes_per_s=parse_bytes_per_s(bandwidth))
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--fabric") from None
    if devices < 2 or not cpu_devices:
        return None
    from penstock.executor.links.link_probe import measure_links

    return measure_links(devices - devices % 2).fabric()


def _of_peers(screen: Screen, peers: list[str], time_s: float, collectives: bool) -> ClusterTopology:
    from penstock.executor.links.host_collectives import measure_among_hosts
    from penstock.executor.links.link_peer import measure_pairs, who, with_fabric
    from penstock.executor.links.measured_topology import topology_of_hosts
    from penstock.schemas.amounts import duration

    hosts = [with_fabric(address, who(address), seconds=time_s) for address in peers]
    rows = measure_among_hosts(peers, hosts, progress=screen.progress) if collectives else None
    links = measure_pairs(peers, seconds=time_s, progress=screen.progress)
    for (a, b), link in sorted(links.items()):
        carried = f"{link.bandwidth_bytes_per_s / 1e6:.4g} MB/s"
        screen.say(f"{hosts[a].name} → {hosts[b].name}: {carried}, {duration(link.latency_ns)} late")
    return topology_of_hosts(hosts, links, collectives=rows)


def _of_processes(screen: Screen, cpu_devices: int, nodes: int, node_names: str, collectives: bool) -> ClusterTopology:
    from penstock.executor.devices import machine_memory_bytes
    from penstock.executor.links.collective_probe import measure_collectives
    from penstock.executor.links.link_probe import measure_links, measured_cluster

    if cpu_devices < 2:
        raise typer.BadParameter(
            "links of one machine are measured between at least two processes", param_hint="--cpu-devices"
        )
    rows = measure_collectives(cpu_devices, nodes, progress=screen.progress) if collectives else None
    link = measure_links(cpu_devices - cpu_devices % 2, progress=screen.progress)
    return measured_cluster(
        link,
        nodes=nodes,
        devices_per_node=cpu_devices,
        memory_bytes=machine_memory_bytes() // (nodes * cpu_devices),
        node_names=node_names,
        collectives=rows,
    )


def _screen() -> Screen:
    """Return a screen on standard error, since the topology may go to standard output."""
    from penstock.cli.show import Screen

    return Screen.of(file=sys.stderr)

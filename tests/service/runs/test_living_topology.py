"""GET /v1/topologies/agents: the devices of living agents, with the links that a probe has sent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from played_agent import Agent
from service_process import Server

from penstock.cli.main import main
from penstock.client import Client
from penstock.executor.links.link_peer import Host, Link
from penstock.executor.links.measured_topology import topology_of_hosts
from penstock.schemas.api.agents import AgentDevice, AgentOut
from penstock.schemas.errors import NotFound
from penstock.schemas.topology import ClusterTopology, Fabric
from penstock.service.runs.live_topology import living_topology

FABRIC = Fabric(bandwidth_bytes_per_s=4 * 10**9)


def devices(name: str, count: int) -> tuple[AgentDevice, ...]:
    return tuple(AgentDevice(id=f"{name}/{i}", kind="cpu", memory_bytes=10**9) for i in range(count))


def agent(name: str, count: int = 1, *, alive: bool = True) -> AgentOut:
    return AgentOut(
        id=name,
        incarnation="1",
        alive=alive,
        last_seen="2026-01-01T00:00:00Z",
        address="127.0.0.1",
        devices=devices(name, count),
        models=("gpt",),
        runs=(),
    )


def measured(names: tuple[str, ...], bandwidth: dict[tuple[int, int], int], count: int = 1) -> ClusterTopology:
    hosts = [Host(name, devices(name, count), FABRIC) for name in names]
    pairs = {
        (a, b): Link(bandwidth[min(a, b), max(a, b)], 2_000, {})
        for a, b in (*bandwidth, *((b, a) for a, b in bandwidth))
    }
    return topology_of_hosts(hosts, pairs)


EVEN = {(0, 1): 10**9, (0, 2): 10**9, (1, 2): 10**9}
UNEVEN = {(0, 1): 10**9, (0, 2): 10**8, (1, 2): 10**9}


@pytest.mark.tier("quick")
def test_links_of_the_living_alone_are_kept() -> None:
    topology = living_topology(
        [agent("a", 2), agent("b", 2), agent("c", alive=False)], [measured(("a", "b", "c"), EVEN, 2)]
    )
    assert [node.name for node in topology.nodes] == ["a", "b"]
    assert [node.fabric for node in topology.nodes] == [FABRIC, FABRIC]
    assert [(link.a, link.b) for link in topology.links] == [("a", "switch"), ("b", "switch")]
    assert topology.links_from == "measured"


@pytest.mark.tier("quick")
def test_a_matrix_is_reduced_to_the_living() -> None:
    topology = living_topology([agent("a"), agent("c")], [measured(("a", "b", "c"), UNEVEN)])
    assert topology.matrix is not None
    assert topology.matrix.devices == ("a/0", "c/0")
    assert topology.matrix.bandwidth_bytes_per_s[0][1] == 10**8
    more = living_topology([agent("a", 2), agent("c")], [measured(("a", "b", "c"), UNEVEN)])
    assert more.matrix is None
    assert "no measured links" in more.assumptions[0]


@pytest.mark.tier("quick")
def test_the_newest_that_was_measured_and_names_everybody_counts() -> None:
    declared = measured(("a", "b"), {(0, 1): 7}).model_copy(update={"links_from": None})
    others = measured(("a", "x"), {(0, 1): 8})
    newest, older = (measured(("a", "b"), {(0, 1): bandwidth}) for bandwidth in (9, 10))
    topology = living_topology([agent("a"), agent("b")], [declared, others, newest, older])
    assert {link.bandwidth_bytes_per_s for link in topology.links} == {9}


def test_over_http(client: Client) -> None:
    url = str(client._http.base_url)
    with pytest.raises(NotFound, match="alive"):
        client.topologies.of_agents()
    agents = [Agent(url, name) for name in ("living0", "living1")]
    try:
        for one in agents:
            one.sync()
        assert client.topologies.of_agents().links == ()
        client.topologies.create(measured(("living0", "living1"), {(0, 1): 123}))
        topology = client.topologies.of_agents()
        assert {link.bandwidth_bytes_per_s for link in topology.links} == {123}
        assert client.topologies.create(topology).hash == topology.content_hash()
    finally:
        for one in agents:
            one.sync(leaving=True)
            one.http.close()


@pytest.fixture
def start_agent() -> Iterator[Callable[..., Any]]:
    """Start real agents; all are ended at the end."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(url: str, name: str, *more: str) -> None:
        arguments = ("agent", "--server", url, "--name", name, "--job", "gpt=examples.gpt:job", *more)
        begun.append(subprocess.Popen([sys.executable, "-P", "-m", "penstock.cli.main", *arguments]))

    yield start
    for one in begun:
        one.terminate()
    assert [one.wait(60) for one in begun] == [0] * len(begun)


def test_agents_are_peers_of_each_other(
    start_server: Callable[..., Server], start_agent: Callable[..., Any], tmp_path: Path
) -> None:
    """Real agents; what was measured between and inside them is what the service answers with from then on."""
    server = start_server(slots=0)
    start_agent(server.url, "node0", "--cpu-devices", "2")
    start_agent(server.url, "node1", "--cpu-devices", "1")
    deadline = time.monotonic() + 60
    while len([one for one in server.client.agents() if one.alive]) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    target = tmp_path / "topology.json"
    assert main(["probe", "--agents", server.url, "--measure-for", "0.2", "-o", str(target)]) == 0
    topology = server.client.topologies.of_agents()
    assert topology.links_from == "measured"
    assert [node.name for node in topology.nodes] == ["node0", "node1"]
    assert topology.nodes[0].fabric is not None
    whole_matrix = topology.matrix is not None and len(topology.matrix.devices) == 3
    assert whole_matrix or {link.a for link in topology.links} == {"node0", "node1"}, (
        "a matrix if directions differ much"
    )
    assert [node.name for node in ClusterTopology.read(target).nodes] == ["node0", "node1"]


def test_agents_that_answer_no_probes_are_named(client: Client, capsys: pytest.CaptureFixture[str]) -> None:
    url = str(client._http.base_url)
    assert main(["probe", "--agents", url]) == 1
    assert "no agent with a device is alive" in capsys.readouterr().err
    silent = Agent(url, "silent0")
    try:
        silent.sync()
        assert main(["probe", "--agents", url]) == 65
        assert "silent0 do not answer probes" in capsys.readouterr().err
        assert main(["probe", "--agents", url, "127.0.0.1:1"]) == 64
    finally:
        silent.sync(leaving=True)
        silent.http.close()

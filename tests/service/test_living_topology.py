"""GET /v1/topologies/agents: the devices of living agents, with the links that a probe has sent."""

from __future__ import annotations

import pytest
from played_agent import Agent

from penstock.client import Client
from penstock.executor.links.link_peer import Host, Link
from penstock.executor.links.measured_topology import topology_of_hosts
from penstock.schemas.agents import AgentDevice, AgentOut
from penstock.schemas.errors import NotFound
from penstock.schemas.topology import ClusterTopology, Fabric
from penstock.service.living import living_topology

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


def test_links_of_the_living_alone_are_kept() -> None:
    found = living_topology(
        [agent("a", 2), agent("b", 2), agent("c", alive=False)], [measured(("a", "b", "c"), EVEN, 2)]
    )
    assert [node.name for node in found.nodes] == ["a", "b"]
    assert [node.fabric for node in found.nodes] == [FABRIC, FABRIC]
    assert [(link.a, link.b) for link in found.links] == [("a", "switch"), ("b", "switch")]
    assert found.links_from == "measured"


def test_a_matrix_is_reduced_to_the_living() -> None:
    found = living_topology([agent("a"), agent("c")], [measured(("a", "b", "c"), UNEVEN)])
    assert found.matrix is not None
    assert found.matrix.devices == ("a/0", "c/0")
    assert found.matrix.bandwidth_bytes_per_s[0][1] == 10**8
    more = living_topology([agent("a", 2), agent("c")], [measured(("a", "b", "c"), UNEVEN)])
    assert more.matrix is None
    assert "no measured links" in more.assumptions[0]


def test_the_newest_that_was_measured_and_names_everybody_counts() -> None:
    declared = measured(("a", "b"), {(0, 1): 7}).model_copy(update={"links_from": None})
    others = measured(("a", "x"), {(0, 1): 8})
    newest, older = (measured(("a", "b"), {(0, 1): bandwidth}) for bandwidth in (9, 10))
    found = living_topology([agent("a"), agent("b")], [declared, others, newest, older])
    assert {link.bandwidth_bytes_per_s for link in found.links} == {9}


def test_over_http(client: Client) -> None:
    url = str(client._http.base_url)
    with pytest.raises(NotFound, match="alive"):
        client.agents_topology()
    agents = [Agent(url, name) for name in ("living0", "living1")]
    try:
        for one in agents:
            one.sync()
        assert client.agents_topology().links == ()
        client.post(measured(("living0", "living1"), {(0, 1): 123}))
        found = client.agents_topology()
        assert {link.bandwidth_bytes_per_s for link in found.links} == {123}
        assert client.post(found).hash == found.content_hash()
    finally:
        for one in agents:
            one.sync(leaving=True)
            one.http.close()

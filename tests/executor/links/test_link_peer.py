"""Links between hosts: real sockets on loopback, and a link that is slow by a computed clock."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from peers import host, peer

from penstock.executor.links import link_peer
from penstock.executor.links.link_peer import Link, Peer, measure, measure_between, measure_pairs, tournament, who
from penstock.executor.links.measured_topology import topology_of_hosts
from penstock.schemas.errors import InvalidDocument, RunFailed, Unreachable
from penstock.schemas.topology import Fabric

SECONDS = 0.3
DELAY_S = 0.02
RATE_BYTES_PER_S = 20_000_000
FABRIC = Fabric(bandwidth_bytes_per_s=3 * 10**9, latency_ns=700)


class SlowSocket(socket.socket):
    """A connection whose messages each take ``DELAY_S`` and their way's rate, by a clock of their own."""

    now_ns = 0.0
    is_answer_due = False

    @classmethod
    def take(cls, seconds: float) -> None:
        cls.now_ns += 1e9 * seconds

    def sendall(self, message: Any, flags: int = 0) -> None:
        self.take(DELAY_S + len(message) / RATE_BYTES_PER_S)
        self.is_answer_due = True
        super().sendall(message, flags)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        count = super().recv_into(buffer, nbytes, flags)
        self.take(self.is_answer_due * DELAY_S + count / (RATE_BYTES_PER_S / 4))
        self.is_answer_due = False
        return count


def test_a_slow_link_is_found_with_its_two_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real sockets carry the bytes; how long they take is computed, so headers are all that makes a difference."""

    def connect(address: str, connect: Callable[[str], socket.socket] = link_peer.connect) -> socket.socket:
        slow = SlowSocket(fileno=connect(address).detach())
        slow.settimeout(None)
        return slow

    clock = {"perf_counter": lambda: SlowSocket.now_ns / 1e9, "perf_counter_ns": lambda: round(SlowSocket.now_ns)}
    monkeypatch.setattr(link_peer, "connect", connect)
    monkeypatch.setattr(link_peer, "time", SimpleNamespace(**clock))
    with peer(host("far", 2, FABRIC)) as address:
        there, back = measure(address, seconds=0.5)
    assert there.latency_ns == pytest.approx(1e9 * DELAY_S, rel=1e-4)
    assert there.bandwidth_bytes_per_s == pytest.approx(RATE_BYTES_PER_S, rel=1e-3)
    assert back.bandwidth_bytes_per_s == pytest.approx(RATE_BYTES_PER_S / 4, rel=1e-3)
    assert list(there.one_way_ns) == sorted(there.one_way_ns)


def test_peers_measure_every_pair_for_a_third_process() -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(peer(host(name, 2, FABRIC))) for name in ("a", "b", "c")]
        lines: list[str] = []
        pairs = measure_pairs(addresses, seconds=SECONDS, progress=lines.append)
        assert [who(address) for address in addresses] == [host(name, 2, FABRIC) for name in ("a", "b", "c")]
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(link.bandwidth_bytes_per_s > 10**7 and link.latency_ns > 0 for link in pairs.values())
    assert len(lines) == 3


@pytest.mark.parametrize("players", range(2, 10))
def test_everybody_meets_everybody_once_and_nobody_twice_at_a_time(players: int) -> None:
    rounds = tournament(players)
    assert sorted(pair for one in rounds for pair in one) == list(combinations(range(players), 2))
    assert all(len({p for pair in one for p in pair}) == 2 * len(one) for one in rounds)
    assert len(rounds) == players - 1 + players % 2


def test_who_cannot_be_reached_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(Unreachable, match=nobody):
        who(nobody)
    with peer(host("a", 2, FABRIC)) as address:
        with pytest.raises(RunFailed, match=f"{address} could not measure.*{nobody}"):
            measure_between(address, nobody, seconds=SECONDS)
        with pytest.raises(InvalidDocument, match=r"cannot listen.*in use"):
            Peer(address, host("b"))
    for wrong in ("localhost", "localhost:", ":80", "a:b", "a:70000"):
        with pytest.raises(InvalidDocument, match="host:port"):
            who(wrong)


def test_something_else_at_the_address_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for reply in (b"HTTP/1.1 400\r\n", b"{}\n", b""):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for _ in range(2):
            with pytest.raises(RunFailed, match=address):
                who(address)
        with pytest.raises(RunFailed, match="broke while it was measured"):
            measure(address, seconds=SECONDS)
        thread.join()


def even(bandwidth: list[int], latency_ns: list[int]) -> dict[tuple[int, int], Link]:
    numbers = range(len(bandwidth))
    return {
        (a, b): Link(min(bandwidth[a], bandwidth[b]), latency_ns[a] + latency_ns[b], {})
        for a in numbers
        for b in numbers
        if a != b
    }


@pytest.mark.parametrize(
    ("bandwidth", "latency_ns"),
    [([10**9, 10**9], [50_000, 50_000]), ([10**9, 10**9, 10**8], [10_000, 20_000, 400_000])],
)
def test_hosts_behind_one_switch_get_a_link_each(bandwidth: list[int], latency_ns: list[int]) -> None:
    hosts = [host(f"h{i}") for i in range(len(bandwidth))]
    topology = topology_of_hosts(hosts, even(bandwidth, latency_ns))
    assert [(link.a, link.bandwidth_bytes_per_s, link.latency_ns) for link in topology.links] == [
        (f"h{i}", bandwidth[i], latency_ns[i]) for i in range(len(hosts))
    ]
    assert topology.matrix is None


def test_links_that_no_switch_explains_are_a_matrix() -> None:
    hosts = [host("a", 2, FABRIC), host("b"), host("c")]
    pairs = even([10**9, 10**9, 10**9], [10_000] * 3)
    pairs[1, 2] = Link(10**8, 5_000_000, {})
    topology = topology_of_hosts(hosts, pairs)
    assert topology.matrix is not None
    devices = list(topology.matrix.devices)
    rows, late = topology.matrix.bandwidth_bytes_per_s, topology.matrix.latency_ns
    assert late is not None
    b, c = devices.index("b/0"), devices.index("c/0")
    assert (rows[b][c], rows[c][b], late[b][c], late[c][b]) == (10**8, 10**9, 5_000_000, 20_000)
    assert (rows[0][1], late[0][1]) == (3 * 10**9, 700)


def test_hosts_that_make_no_topology_are_refused() -> None:
    pairs = even([10**9, 10**9], [1, 1])
    for hosts, word in (
        ([host("a"), host("a")], "the name 'a'"),
        ([host("a"), host("b", 0)], "'b' has no device"),
        ([host("a"), host("b", 2)], "between the 2 devices of 'b'"),
    ):
        with pytest.raises(InvalidDocument, match=word):
            topology_of_hosts(hosts, pairs)

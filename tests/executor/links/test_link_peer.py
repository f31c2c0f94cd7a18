"""Links between hosts: real sockets on loopback, and a link that is slow because a relay makes it so."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack, suppress
from itertools import combinations
from queue import SimpleQueue

import pytest
from peers import host, peer

from penstock.executor.links.link_peer import Link, Peer, measure, measure_between, measure_pairs, tournament, who
from penstock.executor.links.measured_topology import topology_of_hosts
from penstock.schemas.errors import InvalidDocument, RunFailed, Unreachable
from penstock.schemas.topology import Fabric

SECONDS = 0.3
MOST_TRIES = 40
DELAY_S = 0.02
RATE_BYTES_PER_S = 20_000_000
FABRIC = Fabric(bandwidth_bytes_per_s=3 * 10**9, latency_ns=700)


class SlowWay:
    """A relay to ``target``: passes one connection on, late by ``delay_s`` and no faster than each way's rate."""

    def __init__(self, target: str, *, rate_there: int, rate_back: int, delay_s: float) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        host, _, port = target.rpartition(":")
        self._target, self._delay_s = (host, int(port)), delay_s
        self._rates = rate_there, rate_back
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()

    def _accept(self) -> None:
        near, _ = self._server.accept()
        with near, socket.create_connection(self._target) as far:
            threads = []
            for source, sink, rate in ((near, far, self._rates[0]), (far, near, self._rates[1])):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                late: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
                threads.append(threading.Thread(target=self._take, args=(source, late, rate)))
                threads.append(threading.Thread(target=self._give, args=(sink, late)))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _take(self, source: socket.socket, late: SimpleQueue[tuple[float, bytes]], rate: int) -> None:
        through, data = 0.0, b" "
        while data:
            data = source.recv(1 << 16)
            through = max(through, time.perf_counter()) + len(data) / rate
            late.put((through + self._delay_s, data))

    def _give(self, sink: socket.socket, late: SimpleQueue[tuple[float, bytes]]) -> None:
        while True:
            due, data = late.get()
            time.sleep(max(0.0, due - time.perf_counter()))
            if not data:
                break
            sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.close()
        self._accepting.join()


@pytest.mark.tier("ci")
def test_a_slow_link_is_found_with_its_two_directions() -> None:
    """Other work on the machine makes a link slower and later, never quicker: measured until the best is close."""
    there: list[Link] = []
    back: list[Link] = []

    def is_found() -> bool:
        return (
            min(each.latency_ns for each in there) < 1.2e9 * DELAY_S
            and max(each.bandwidth_bytes_per_s for each in there) > 0.8 * RATE_BYTES_PER_S
            and max(each.bandwidth_bytes_per_s for each in back) > 0.8 * RATE_BYTES_PER_S / 4
        )

    with peer(host("far", 2, FABRIC)) as address:
        while not (there and is_found()):
            assert len(there) < MOST_TRIES, (there, back)
            way = SlowWay(address, rate_there=RATE_BYTES_PER_S, rate_back=RATE_BYTES_PER_S // 4, delay_s=DELAY_S)
            links = measure(way.address, seconds=0.5)
            there.append(links.there)
            back.append(links.back)
            way.close()
    assert min(each.latency_ns for each in there) > 0.8e9 * DELAY_S
    assert max(each.bandwidth_bytes_per_s for each in there) < 1.2 * RATE_BYTES_PER_S
    assert max(each.bandwidth_bytes_per_s for each in back) < 1.2 * RATE_BYTES_PER_S / 4
    assert all(list(each.one_way_ns) == sorted(each.one_way_ns) for each in there)


def test_peers_measure_every_pair_for_a_third_process() -> None:
    with ExitStack() as stack:
        addresses = [stack.enter_context(peer(host(name, 2, FABRIC))) for name in ("a", "b", "c")]
        said: list[str] = []
        pairs = measure_pairs(addresses, seconds=SECONDS, progress=said.append)
        assert [who(address) for address in addresses] == [host(name, 2, FABRIC) for name in ("a", "b", "c")]
    assert sorted(pairs) == [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
    assert all(link.bandwidth_bytes_per_s > 10**7 and link.latency_ns > 0 for link in pairs.values())
    assert len(said) == 3


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
            for said in (b"HTTP/1.1 400\r\n", b"{}\n", b""):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(said)

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

"""Bandwidth and latency between hosts, over plain TCP sockets as gloo uses them. Loads no torch.

A peer listens on an address. A client sends its request in one line of JSON: ``who`` (the host's name and devices),
``exchange`` (messages in both directions over this connection), or ``measure``. With ``measure`` the peer itself
exchanges messages with another peer and returns the results, so that a process outside of the hosts can measure every
pair of them. ``store`` and ``collectives`` serve measurements of collectives (``host_collectives``).

An exchange needs no common clock. A payload that is acknowledged with one byte takes the payload's time one way plus an
empty message's time back; half of an empty round trip is the latency of either way. So the two directions of a link can
have different bandwidths, but not different latencies.
"""

from __future__ import annotations

import json
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from penstock.executor.links.link_fit import fit
from penstock.executor.links.peer_ranks import ranks_here, serve_store
from penstock.executor.node.tcp_store import join_address
from penstock.schemas.api.agents import AgentDevice
from penstock.schemas.errors import InvalidDocument, PenstockError, RunFailed, Unreachable
from penstock.schemas.topology import Fabric

SIZES_BYTES = (1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
CONNECT_LIMIT_S = 5.0
SILENCE_LIMIT_S = 60.0
SECONDS = 3.0
"""Measurement time of one direction of one link, in seconds."""

_ROUNDS = 20
_MIN_ROUNDS = 3
_LATENCY_ROUNDS = 50
_LONGEST_MESSAGE_S = 0.4
_THERE, _BACK = 0, 1
_HEADER = struct.Struct("!BI")
_LARGEST_BYTES = max(SIZES_BYTES)
_LONGEST_LINE = 1 << 16


class Link(NamedTuple):
    """One direction of a link; ``one_way_ns``: the median of each message size in bytes, 1 for an empty message."""

    bandwidth_bytes_per_s: int
    latency_ns: int
    one_way_ns: dict[int, int]


class Links(NamedTuple):
    """Both directions between two hosts: from the host that measured, and back to it."""

    there: Link
    back: Link


class Host(NamedTuple):
    """A peer's host; ``fabric``: the measured fabric between its devices, where it has several."""

    name: str
    devices: tuple[AgentDevice, ...]
    fabric: Fabric | None = None


class Peer:
    """A listening peer, which serves every connection in a separate thread until ``close``.

    Raises InvalidDocument for an address that is not this machine's, or already in use.
    """

    def __init__(self, address: str, host: Host) -> None:
        name, port = split_address(address)
        self._host = host
        self._server = socket.socket(socket.AF_INET6 if ":" in name else socket.AF_INET, socket.SOCK_STREAM)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._server.bind((name, port))
            self._server.listen()
        except OSError as error:
            self._server.close()
            raise InvalidDocument(
                f"cannot listen on {address!r}: {error.strerror or error}",
                remedy="give an address of this machine and a free port",
            ) from None
        self.address = join_address(name, self._server.getsockname()[1])
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def serve(self) -> None:
        """Serve until ``close`` is called."""
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._open.add(connection)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Stop, and cut open connections."""
        for one in (self._server, *self._open):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, EOFError, ValueError):
            _prepare(connection)
            request = read_line(connection)
            match request.get("ask"):
                case "who":
                    write_line(connection, _description(self._host))
                case "exchange":
                    _serve_exchange(connection)
                case "measure":
                    write_line(connection, _measured(request))
                case "store":
                    serve_store(connection)
                case "collectives":
                    write_line(connection, ranks_here(connection, len(self._host.devices), request))
                case _:
                    write_line(connection, {"error": "ask for who, exchange, measure, store or collectives"})
        self._open.discard(connection)


def who(address: str) -> Host:
    """Return the host at a peer's address. Raises Unreachable."""
    answer = ask(address, {"ask": "who"})
    try:
        devices = tuple(AgentDevice.model_validate(one) for one in answer["devices"])
        fabric = None if answer["fabric"] is None else Fabric.model_validate(answer["fabric"])
        return Host(str(answer["name"]), devices, fabric)
    except (KeyError, TypeError, ValueError) as error:
        raise RunFailed(f"{address} does not answer like a peer of penstock probe: {error!r}") from None


def measure(address: str, *, seconds: float = SECONDS) -> Links:
    """Measure both directions between this host and the peer at ``address``, each for about ``seconds``.

    Raises Unreachable when no process listens there, RunFailed when the peer goes away.
    """
    with connect(address) as connection:
        try:
            write_line(connection, {"ask": "exchange"})
            _exchange(connection, _THERE, 1, _MIN_ROUNDS, 1.0)
            empty = _exchange(connection, _THERE, 1, _LATENCY_ROUNDS, seconds / 4)
            latency_ns = round(statistics.median(empty) / 2)
            return Links(*(_direction(connection, way, latency_ns, seconds) for way in (_THERE, _BACK)))
        except (OSError, EOFError) as error:
            raise RunFailed(f"the connection to {address} broke while it was measured: {error or 'closed'}") from None


def measure_between(one: str, other: str, *, seconds: float = SECONDS) -> Links:
    """Measure both directions between two peers, from the first. Raises the errors that it met."""
    answer = ask(one, {"ask": "measure", "address": other, "seconds": seconds}, wait_s=SILENCE_LIMIT_S + 4 * seconds)
    if "error" in answer:
        raise RunFailed(f"{one} could not measure its link to {other}: {answer['error']}")
    return Links(*(_link({int(size): ns for size, ns in answer[way].items()}) for way in ("there", "back")))


def measure_pairs(
    addresses: Sequence[str], *, seconds: float = SECONDS, progress: Callable[[str], None] | None = None
) -> dict[tuple[int, int], Link]:
    """Measure the link from each of the peers to each other one, by their places in ``addresses``.

    Disjoint pairs are measured at the same time, as the circle method of round-robin tournaments pairs them.
    """
    links_of_pairs: dict[tuple[int, int], Link] = {}
    errors: list[PenstockError] = []

    def play(a: int, b: int) -> None:
        try:
            links = measure_between(addresses[a], addresses[b], seconds=seconds)
        except PenstockError as error:
            errors.append(error)
            return
        links_of_pairs[a, b], links_of_pairs[b, a] = links

    for number, pairs in enumerate(rounds := tournament(len(addresses))):
        if progress is not None:
            progress(f"round {number + 1} of {len(rounds)}: {len(pairs)} pairs of hosts")
        threads = [threading.Thread(target=play, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
    return links_of_pairs


def with_fabric(address: str, host: Host, *, seconds: float = SECONDS) -> Host:
    """Return a peer's host; without a stated fabric between several devices, measure one over its sockets."""
    if host.fabric is not None or len(host.devices) < 2:
        return host
    there = measure_between(address, address, seconds=seconds).there
    return host._replace(fabric=Fabric(bandwidth_bytes_per_s=there.bandwidth_bytes_per_s, latency_ns=there.latency_ns))


def tournament(players: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which each of ``players`` meets each other one once, and none meets two at a time."""
    places = list(range(players + players % 2))
    rounds = []
    for _ in places[1:]:
        half = len(places) // 2
        meetings = zip(places[:half], reversed(places[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in meetings if max(pair) < players])
        places = [places[0], places[-1], *places[1:-1]]
    return rounds


def split_address(address: str) -> tuple[str, int]:
    """Split ``host:port`` into host and port; an IPv6 address is in brackets. Raises InvalidDocument."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise InvalidDocument(f"{address!r} is not an address; write host:port, such as 10.0.0.2:8645")
    return host.strip("[]"), int(port)


def _description(host: Host) -> dict[str, Any]:
    devices = [device.model_dump() for device in host.devices]
    return {"name": host.name, "devices": devices, "fabric": host.fabric and host.fabric.model_dump()}


def _link(one_way_ns: dict[int, int]) -> Link:
    """Build a link with the empty message's latency: the fitted latency would be bent by messages sent in a burst."""
    bandwidth_bytes_per_s, _ = fit(one_way_ns)
    return Link(bandwidth_bytes_per_s, one_way_ns[1], one_way_ns)


def _direction(connection: socket.socket, way: int, latency_ns: int, seconds: float) -> Link:
    """Measure each size one way: its round trip, less the empty message's way back."""
    one_way_ns = {1: latency_ns}
    for size in SIZES_BYTES:
        times = _exchange(connection, way, size, _ROUNDS, seconds / len(SIZES_BYTES))
        one_way_ns[size] = max(1, round(statistics.median(times)) - latency_ns)
        if one_way_ns[size] > _LONGEST_MESSAGE_S * 1e9:
            break
    return _link(one_way_ns)


def _exchange(connection: socket.socket, way: int, size: int, rounds: int, seconds: float) -> list[int]:
    """Measure round trips (ns) with ``size`` bytes one way and one byte the other."""
    sent, received = (size, 1) if way == _THERE else (0, size)
    message = _HEADER.pack(way, size) + bytes(sent)
    buffer = bytearray(received)
    times: list[int] = []
    until = time.perf_counter() + seconds
    while len(times) < _MIN_ROUNDS or (len(times) < rounds and time.perf_counter() < until):
        start = time.perf_counter_ns()
        connection.sendall(message)
        _read_into(connection, memoryview(buffer))
        times.append(time.perf_counter_ns() - start)
    return times


def _serve_exchange(connection: socket.socket) -> None:
    """Serve the other end of ``_exchange``, until the connection is closed."""
    header, buffer = memoryview(bytearray(_HEADER.size)), memoryview(bytearray(_LARGEST_BYTES))
    while True:
        _read_into(connection, header)
        way, size = _HEADER.unpack(header)
        if size > _LARGEST_BYTES:
            return
        if way == _THERE:
            _read_into(connection, buffer[:size])
        connection.sendall(b"." if way == _THERE else buffer[:size])


def _measured(request: Mapping[str, Any]) -> dict[str, Any]:
    """Answer the request ``measure``."""
    try:
        links = measure(str(request["address"]), seconds=min(60.0, float(request["seconds"])))
    except PenstockError as error:
        return {"error": error.detail}
    return {"there": links.there.one_way_ns, "back": links.back.one_way_ns}


def ask(address: str, question: Mapping[str, Any], *, wait_s: float = SILENCE_LIMIT_S) -> dict[str, Any]:
    with connect(address) as connection:
        connection.settimeout(wait_s)
        try:
            write_line(connection, question)
            return read_line(connection)
        except (OSError, EOFError, ValueError) as error:
            raise RunFailed(f"{address} gave no answer: {error or 'the connection was closed'}") from None


def connect(address: str) -> socket.socket:
    try:
        connection = socket.create_connection(split_address(address), timeout=CONNECT_LIMIT_S)
    except OSError as error:
        raise Unreachable(
            f"no process listens at {address}: {error.strerror or error}",
            remedy="start `penstock probe --serve HOST:PORT` there, and let the firewall pass the port",
        ) from None
    _prepare(connection)
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(SILENCE_LIMIT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _read_into(connection: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        count = connection.recv_into(view[at:])
        if not count:
            raise EOFError
        at += count


def read_line(connection: socket.socket) -> dict[str, Any]:
    """Read one JSON object, byte by byte up to the newline, because what follows it belongs to the exchange."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part or len(line) > _LONGEST_LINE:
            raise EOFError
        line += part
    answer = json.loads(line)
    if not isinstance(answer, dict):
        raise ValueError(f"{line[:80]!r} is not an object")
    return answer


def write_line(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")

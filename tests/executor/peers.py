"""Peers of this process: hosts that others measure links and collectives with."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.executor.links.link_peer import Host, Peer
from penstock.schemas.api.agents import AgentDevice
from penstock.schemas.topology import Fabric


def host(name: str, devices: int = 1, fabric: Fabric | None = None, kind: str = "cpu") -> Host:
    """A host with devices of 1 GiB each."""
    offered = tuple(AgentDevice(id=f"{name}/{d}", kind=kind, memory_bytes=2**30) for d in range(devices))
    return Host(name, offered, fabric)


@contextmanager
def peer(one: Host) -> Iterator[str]:
    """Serve a host, and yield its address."""
    serving = Peer("127.0.0.1:0", one)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        yield serving.address
    finally:
        serving.close()
        thread.join()

"""Peers of this process: hosts that others measure links and collectives with, and ranks of scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.executor.links.link_peer import Host, Peer
from penstock.executor.run.local import loopback_interface
from penstock.schemas.api.agents import AgentDevice
from penstock.schemas.topology import Fabric


def host(name: str, devices: int = 1, fabric: Fabric | None = None, kind: str = "cpu") -> Host:
    """Build a host with devices of 1 GiB each."""
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


def printed_by_ranks(script: Path, world: int, store: Path, *arguments: str) -> list[list[str]]:
    """Run a script as ``RANK WORLD STORE …`` for each rank; return the lines that each has printed."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(store), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": loopback_interface()},
        )
        for rank in range(world)
    ]
    try:
        lines = [rank.communicate(timeout=240)[0].splitlines() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world
    return lines

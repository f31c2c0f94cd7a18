"""A peer's part in a measurement of collectives: the host of the ranks' store, or of the ranks of its devices."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from penstock.executor.interfaces import interface_of
from penstock.executor.links.local_ranks import outputs
from penstock.schemas.errors import PenstockError

PROBE = "penstock.executor.links.collective_probe"


def serve_store(connection: socket.socket) -> None:
    """Start a store on the interface of the connection, and send its address; it ends with the connection."""
    command = [sys.executable, "-m", "penstock.executor.node.tcp_store", connection.getsockname()[0]]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as store:
        assert store.stdin is not None
        assert store.stdout is not None
        try:
            connection.sendall(store.stdout.readline() or b'{"error": "the store of the ranks did not start"}\n')
            connection.settimeout(None)
            connection.recv(1)
        finally:
            store.stdin.close()


def ranks_here(connection: socket.socket, devices: int, request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a rank for each of this node's devices, node ``node`` of ``nodes``, and return their outputs."""
    node, nodes = int(request["node"]), int(request["nodes"])
    interface = interface_of(connection.getsockname()[0])
    environment = {} if interface is None else {"GLOO_SOCKET_IFNAME": interface}
    ranks = range(node * devices, (node + 1) * devices)
    try:
        results = outputs(PROBE, ranks, nodes * devices, str(request["store"]), [str(nodes)], environment)
    except PenstockError as error:
        return {"error": error.detail}
    return {"outputs": [json.loads(each) for each in results]}

"""The host of the TCPStore at which ranks of a generation meet: ``python -m penstock.executor.node.tcp_store``.

It is a separate process, because the agent loads no torch, and because a store must not outlive its generation: ranks
that meet at a used store read the addresses of dead ranks (EXECUTOR E.1). It listens only on the given interface, on a
free port, writes its address as one JSON line to stdout, and ends when its stdin is closed.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TextIO

from penstock.schemas.errors import InvalidDocument

_BACKLOG = 1024


def listen(interface: str) -> socket.socket:
    """Open a listening socket on a free port of ``interface`` (an IP address). InvalidDocument if it is not ours."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.bind((interface, 0))
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        raise InvalidDocument(
            f"the store cannot listen on {interface!r}: {error.strerror}", remedy="give an address of this machine"
        ) from None
    return server


def host_store(interface: str, until_closed: TextIO, output: TextIO) -> None:
    """Serve a store on ``interface``, write its address to ``output``, and continue until ``until_closed`` ends."""
    from torch._C._distributed_c10d import TCPStore

    server = listen(interface)
    port = server.getsockname()[1]
    store = TCPStore(
        interface,
        port,
        world_size=None,
        is_master=True,
        timeout=timedelta(seconds=30),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    output.write(json.dumps({"kind": "ready", "address": join_address(interface, port)}) + "\n")
    output.flush()
    until_closed.read()
    del store


def join_address(host: str, port: int) -> str:
    """Return ``host:port``, with the brackets of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def main(arguments: Sequence[str]) -> int:
    """Run the store on the interface in the only argument (default: loopback)."""
    interface = arguments[0] if arguments else "127.0.0.1"
    try:
        host_store(interface, sys.stdin, sys.stdout)
    except InvalidDocument as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The rendezvous of the processes of a launch: one store, at which each announces its place and its arguments.

The store stays open after ranks are assigned, for the first failure and for the end of all processes.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from uuid import uuid4

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import DistError, DistStoreError

from penstock.executor.interfaces import address_towards, interface_of, is_loopback
from penstock.executor.launched.environment import Launch
from penstock.executor.launched.rank_places import Presence
from penstock.executor.node.tcp_store import join_address
from penstock.executor.runtime.hardware import machine
from penstock.schemas.errors import Unreachable

_PREFIX = "penstock"
_SCONTROL_LIMIT_S = 30
_SHOWN = 16
_AGAIN_S = 0.1


class Rendezvous:
    """The store of a launch, as one of its processes uses it.

    ``host``: its address, resolved. Raises Unreachable when it cannot be opened, or stays closed for ``wait_s``.
    """

    def __init__(self, launch: Launch, wait_s: float) -> None:
        self.launch = launch
        self._wait_s = wait_s
        self.host = _resolved(launch)
        self._tcp = self._open()
        self._store = PrefixStore(_PREFIX, self._tcp)

    @property
    def address(self) -> str:
        """``host:port`` of the store."""
        return join_address(self.host, self.launch.port)

    def present(self, bundle: str, orders: Mapping[str, Any]) -> tuple[list[Presence], str]:
        """Announce this process. Return all announcements in the launcher's order, and a name for this rendezvous.

        Raises Unreachable with the processes that have not come in time.
        """
        launch = self.launch
        presence = Presence(
            node=launch.node,
            local_rank=launch.local_rank,
            machine=machine(),
            address=address_towards(self.host),
            bundle=bundle,
            orders=dict(orders),
            opens_store=launch.opens_store,
        )
        if launch.process == 0:
            self._store.set("name", uuid4().hex)
        self._store.set(f"here/{launch.process}", json.dumps(asdict(presence)))
        keys = [f"here/{number}" for number in range(launch.processes)]
        try:
            self._store.wait(keys, timedelta(seconds=self._wait_s))
        except DistError:
            missing = [number for number, key in enumerate(keys) if not self._store.check([key])]
            raise Unreachable(
                f"{launch.processes - len(missing)} of {launch.processes} processes have arrived at {self.address} "
                "within "
                f"{self._wait_s:g} s; missing are, by the launcher's numbers, "
                f"{', '.join(map(str, missing[:_SHOWN]))}{' and more' if len(missing) > _SHOWN else ''}",
                remedy="look at the output of the missing processes; --start-timeout waits longer for slow starts",
            ) from None
        return [Presence(**json.loads(self._store.get(key))) for key in keys], self._store.get("name").decode()

    # After ranks are assigned

    def publish_failure(self, text: str) -> None:
        """Publish why this process ends, if the store still exists; the first failure counts."""
        with suppress(DistError):
            self._store.compare_set("failed", "", text)

    def watch(self) -> str:
        """Wait until a process has published a failure, over a separate connection; return its text.

        Raises DistError when the store is gone.
        """
        store = PrefixStore(_PREFIX, self._tcp.clone())  # type: ignore[attr-defined]
        store.wait(["failed"], timedelta(days=365))
        return str(store.get("failed").decode())

    def failure(self, within_s: float) -> str | None:
        """Return the failure that a process publishes within the limit. Raises DistNetworkError without a store."""
        try:
            self._store.wait(["failed"], timedelta(seconds=within_s))
        except DistStoreError:
            return None
        return str(self._store.get("failed").decode())

    def leave(self, limit_s: float) -> None:
        """Leave. The process that has the store stays until all others have left, or the limit is over."""
        with suppress(DistError):
            if self._store.add("left", 1) == self.launch.processes:
                self._store.set("left/all", "1")
            if self.launch.opens_store:
                self._store.wait(["left/all"], timedelta(seconds=limit_s))

    def _open(self) -> TCPStore:
        launch, limit = self.launch, timedelta(seconds=self._wait_s)
        if not launch.opens_store:
            self._wait_until_open()
        try:
            return TCPStore(self.host, launch.port, is_master=launch.opens_store, timeout=limit, wait_for_workers=False)
        except DistError as error:
            if launch.opens_store:
                raise Unreachable(
                    f"the store cannot listen on port {launch.port}: {_first_line(error)}",
                    remedy="export MASTER_PORT=… with a free port, on all processes",
                ) from None
            raise Unreachable(
                f"the server at {self.address} is not the ranks' store: {_first_line(error)}",
                remedy="export MASTER_PORT=… with a free port, on all processes",
            ) from None

    def _wait_until_open(self) -> None:
        """Wait for the store to open; torch would wait longer than its limit, and end with a long traceback."""
        give_up_at = time.monotonic() + self._wait_s
        while True:
            try:
                socket.create_connection((self.host, self.launch.port), timeout=self._wait_s).close()
                return
            except OSError as error:
                problem = error.strerror or str(error)
            if time.monotonic() >= give_up_at:
                raise Unreachable(
                    f"no process has opened the store at {self.address} within {self._wait_s:g} s: {problem}",
                    remedy="look at the output of the first process on that host, which opens the store; check that "
                    "this "
                    "host reaches the port; export MASTER_ADDR and MASTER_PORT to meet elsewhere",
                )
            time.sleep(_AGAIN_S)


def bind_to(present: list[Presence], process: int) -> None:
    """Have gloo and NCCL use the interface that leads to the others, unless the environment names one."""
    others = [one.address for one in present if one.machine != present[process].machine]
    address = present[process].address
    if others and is_loopback(address):
        address = address_towards(next((other for other in others if not is_loopback(other)), others[0]))
    interface = interface_of(address if others else "127.0.0.1")
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if others:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)


def _resolved(launch: Launch) -> str:
    """Return the address of the store's host; Slurm has addresses of nodes whose names other resolvers lack."""
    try:
        addresses = socket.getaddrinfo(launch.host, launch.port, type=socket.SOCK_STREAM)
        return min(addresses, key=lambda one: one[0] != socket.AF_INET)[4][0]  # type: ignore[return-value]
    except socket.gaierror as error:
        problem = error.strerror or str(error)
    address = _node_address(launch.host) if launch.job_id is not None else None
    if address is None:
        raise Unreachable(
            f"the host {launch.host!r}, where ranks meet, cannot be resolved here: {problem}",
            remedy="export MASTER_ADDR with an address of the first node, on all processes",
        )
    return address


def _node_address(node: str) -> str | None:
    """Return the address of a node by Slurm's controller, or None."""
    command = ["scontrol", "--oneliner", "show", "node", node]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SCONTROL_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = [word.partition("=") for word in done.stdout.split()]
    name = next((value for key, _, value in words if key == "NodeAddr"), None)
    try:
        return None if name is None else socket.gethostbyname(name)
    except socket.gaierror:
        return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]

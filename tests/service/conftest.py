"""Services for the tests: one that all share, and as many others as a test wants to ill-treat."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_process import Server

from penstock.client import Client


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One service for all tests that leave it as it is; it must not have met an error of its own."""
    server = Server(tmp_path_factory.mktemp("service") / "shared.sqlite", agent_timeout_s=600, slots=2)
    server.load_judge()
    yield server
    assert server.stop() == 0
    assert "Traceback" not in server.text, server.text


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Start services on one database; what still runs in the end is killed."""
    servers: list[Server] = []

    def start(**settings: Any) -> Server:
        servers.append(Server(tmp_path / "service.sqlite", **settings))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop(signal.SIGKILL)


@pytest.fixture
def client(shared_server: Server) -> Client:
    """A client of the shared service."""
    return shared_server.client

"""Services for the tests: one that all share, and as many others as a test wants to ill-treat."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from postgres import Cluster, running_cluster
from service_process import Server

from penstock.client import Client
from penstock.examples.tiny import tiny_request
from penstock.schemas.request import PlanRequest
from penstock.service.db.database import Database


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One service for all tests of this process; they count on nothing that others may have asked it, and no agent."""
    with running_service(tmp_path_factory) as server:
        yield server


@contextmanager
def running_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a service that several tests use; its log must have no traceback at the end."""
    server = Server(tmp_path_factory.mktemp("service") / "shared.sqlite", agent_timeout_s=600, slots=2)
    try:
        server.load_judge()
        yield server
    finally:
        code = server.stop()
    assert code == 0
    assert "Traceback" not in server.text, server.text


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A service of a module's own, for tests that look at all that it has, or play its agents."""
    with running_service(tmp_path_factory) as server:
        yield server


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


@pytest.fixture
def http(client: Client) -> httpx.Client:
    """The connection of that client."""
    return client._http


@pytest.fixture
def planned(client: Client) -> Any:
    """The tiny request's finished job."""
    return client.plans.create(PlanRequest.parse(tiny_request()))


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL server for all tests of this process; started by the first that needs it."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def postgresql_url(postgres: Cluster) -> Iterator[str]:
    """A new, empty PostgreSQL database."""
    url = postgres.new_database()
    yield url
    postgres.restore()
    postgres.drop(url)


@pytest.fixture(params=["sqlite", "postgresql"])
def engine_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A new, empty database on each of the engines in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'penstock.sqlite'}"
    url: str = request.getfixturevalue("postgresql_url")
    return url


@pytest.fixture
def database(engine_url: str) -> Iterator[Database]:
    """A new database with its tables, on each of the engines in turn."""
    database = Database(engine_url)
    database.create()
    yield database
    database.close()

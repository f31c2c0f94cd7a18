# Made from async_client.py by scripts/make-client: change that one.
"""The client for programs without an event loop."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from penstock.client.connection import Connection
from penstock.client.messages import LOCAL, Send, settings
from penstock.client.questions import Questions
from penstock.client.resources import (
    Jobs,
    Plans,
    Profiles,
    Runs,
    Sweeps,
    Topologies,
)
from penstock.schemas.api.agents import AgentOut
from penstock.schemas.api.jobs import ExampleOut, PlannerOut, VersionOut


class Client(Questions):
    """One service. Raises Unreachable when it does not answer, and PenstockError for its refusals.

    ``key``: the API key, by default ``PENSTOCK_API_KEY``. ``ca``: a file with the certificates to trust, in addition to
    the system's. ``patience_s``: how long to try again while the service is busy or away. ``timeout_s``: for one
    answer.
    """

    def __init__(
        self,
        server: str = LOCAL,
        *,
        key: str | None = None,
        ca: str | Path | None = None,
        timeout_s: float = 60.0,
        patience_s: float = 20.0,
    ) -> None:
        self._http = httpx.Client(**settings(server, key, ca, timeout_s))
        super().__init__(Connection(self._http, server, patience_s))
        self.jobs = Jobs(self._connection)
        self.plans = Plans(self._connection, self.jobs)
        self.runs = Runs(self._connection)
        self.sweeps = Sweeps(self._connection)
        self.profiles = Profiles(self._connection)
        self.topologies = Topologies(self._connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def planners(self) -> list[PlannerOut]:
        """List the planners that a request may name."""
        return self._connection.document(list[PlannerOut], Send("GET", "/v1/planners"))

    def examples(self) -> list[ExampleOut]:
        """List requests that can be sent as they are."""
        return self._connection.document(list[ExampleOut], Send("GET", "/v1/examples"))

    def agents(self) -> list[AgentOut]:
        """List all agents that have ever reported to the service."""
        return self._connection.document(list[AgentOut], Send("GET", "/v1/agents"))

    def version(self) -> VersionOut:
        """Name and version of the service."""
        return self._connection.document(VersionOut, Send("GET", "/version"))

    def wait_until_ready(self, timeout_s: float = 30.0) -> None:
        """Return once the service is ready. Raises Unreachable, or the service's reason, when it is not in time."""
        self._connection.until_ready(timeout_s)

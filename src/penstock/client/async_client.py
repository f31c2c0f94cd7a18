"""The client for programs with an event loop (asyncio or trio)."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from penstock.client.async_connection import AsyncConnection
from penstock.client.async_questions import AsyncQuestions
from penstock.client.async_resources import (
    AsyncJobs,
    AsyncPlans,
    AsyncProfiles,
    AsyncRuns,
    AsyncSweeps,
    AsyncTopologies,
)
from penstock.client.messages import LOCAL, Send, settings
from penstock.schemas.api.agents import AgentOut
from penstock.schemas.api.jobs import ExampleOut, PlannerOut, VersionOut


class AsyncClient(AsyncQuestions):
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
        self._http = httpx.AsyncClient(**settings(server, key, ca, timeout_s))
        super().__init__(AsyncConnection(self._http, server, patience_s))
        self.jobs = AsyncJobs(self._connection)
        self.plans = AsyncPlans(self._connection, self.jobs)
        self.runs = AsyncRuns(self._connection)
        self.sweeps = AsyncSweeps(self._connection)
        self.profiles = AsyncProfiles(self._connection)
        self.topologies = AsyncTopologies(self._connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection."""
        await self._http.aclose()

    async def planners(self) -> list[PlannerOut]:
        """List the planners that a request may name."""
        return await self._connection.document(list[PlannerOut], Send("GET", "/v1/planners"))

    async def examples(self) -> list[ExampleOut]:
        """List requests that can be sent as they are."""
        return await self._connection.document(list[ExampleOut], Send("GET", "/v1/examples"))

    async def agents(self) -> list[AgentOut]:
        """List all agents that have ever reported to the service."""
        return await self._connection.document(list[AgentOut], Send("GET", "/v1/agents"))

    async def version(self) -> VersionOut:
        """Name and version of the service."""
        return await self._connection.document(VersionOut, Send("GET", "/version"))

    async def wait_until_ready(self, timeout_s: float = 30.0) -> None:
        """Return once the service is ready. Raises Unreachable, or the service's reason, when it is not in time."""
        await self._connection.until_ready(timeout_s)

"""Answers computed by a child process while the client waits; a client that hangs up ends the child."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import aclosing
from typing import Any

from fastapi import Request, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.requests import ClientDisconnect

from penstock.schemas.api.jobs import ProblemDetails
from penstock.service.http.requests.bodies import json_response
from penstock.service.jobs.direct_tasks import json_of, messages, unless_gone
from penstock.service.problems import TaskFailed
from penstock.service.security.places import NoPlace
from penstock.service.services import Service


async def messages_of(service: Service, tenant: str, task: dict[str, Any], limit_s: float, kind: str) -> list[Any]:
    """Return the messages of one kind that a child sends. Raises NoPlace and TaskFailed."""
    async with service.children.place(tenant), aclosing(messages(service.forkserver, task, limit_s)) as said:
        return [message[kind] async for message in said if message["kind"] == kind]


def wants_events(request: Request) -> bool:
    """Whether the client asks for server-sent events."""
    return "text/event-stream" in request.headers.get("accept", "")


def streamed(service: Service, tenant: str, task: dict[str, Any], limit_s: float, *kinds: str) -> Response:
    """Stream a child's messages of some kinds as server-sent events of these names; the last is `end` or `problem`."""
    return EventSourceResponse(_events(service, tenant, task, limit_s, kinds), headers={"Cache-Control": "no-store"})


async def _events(
    service: Service, tenant: str, task: dict[str, Any], limit_s: float, kinds: Collection[str]
) -> AsyncIterator[bytes]:
    try:
        async with service.children.place(tenant), aclosing(messages(service.forkserver, task, limit_s)) as said:
            async for message in said:
                if (kind := message["kind"]) in kinds:
                    yield format_sse_event(data_str=json_of(message[kind]).decode(), event=kind)
        yield format_sse_event(data_str="{}", event="end")
    except TaskFailed as failed:
        yield format_sse_event(data_str=failed.problem.model_dump_json(exclude_none=True), event="problem")
    except NoPlace as none:
        yield format_sse_event(data_str=ProblemDetails.of(none).model_dump_json(exclude_none=True), event="problem")


async def result_of(
    request: Request, service: Service, tenant: str, task: dict[str, Any], *, plans: bool = False
) -> Any:
    """Return a child's result as plain data. Raises ClientDisconnect when the client has hung up.

    ``plans``: whether the task plans something anew, which may take as long as a solve.
    """
    settings = service.settings
    limit_s = settings.max_solve_s if plans else min(settings.max_question_s, settings.max_solve_s)
    found = await unless_gone(request.receive, lambda: messages_of(service, tenant, task, limit_s, "result"))
    if found is None:
        raise ClientDisconnect
    return found[-1]


async def answered(
    request: Request, service: Service, tenant: str, task: dict[str, Any], *, plans: bool = False
) -> Response:
    """Return a child's result as a response."""
    return json_response(json_of(await result_of(request, service, tenant, task, plans=plans)))

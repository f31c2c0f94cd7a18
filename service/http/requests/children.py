"""Answers computed by a child process while the client waits; a client that hangs up ends the child."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from fastapi import Request, Response
from fastapi.sse import EventSourceResponse, format_sse_event
from starlette.requests import ClientDisconnect

from penstock.questions.in_child import task_of
from penstock.questions.table import QUESTIONS
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.document import Document
from penstock.service.jobs.direct_tasks import messages, unless_gone
from penstock.service.problems import TaskFailed
from penstock.service.security.child_places import NoPlace
from penstock.service.services import Service
from penstock.workers.protocol import Message


def limit_s(service: Service, name: str, request: Document) -> float:
    """Return how long a child may work for an answer, in seconds: as long as for a solve where it makes new plans."""
    settings = service.settings
    plans = QUESTIONS[name].plans(request)
    return settings.max_solve_s if plans else min(settings.max_question_s, settings.max_solve_s)


def wants_events(request: Request) -> bool:
    """Return whether the client asks for server-sent events."""
    return "text/event-stream" in request.headers.get("accept", "")


def streamed(service: Service, tenant: str, name: str, document: Document) -> Response:
    """Stream the messages of a question and its answer as server-sent events; the last is `end` or `problem`."""
    return EventSourceResponse(_events(service, tenant, name, document), headers={"Cache-Control": "no-store"})


async def _events(service: Service, tenant: str, name: str, document: Document) -> AsyncIterator[bytes]:
    event = QUESTIONS[name].event
    kinds = ("result",) if event is None else (event[0], "result")
    try:
        async for message in _messages(service, tenant, name, document):
            if message.kind in kinds:
                yield format_sse_event(data_str=message.body.decode(), event=message.kind)
        yield format_sse_event(data_str="{}", event="end")
    except TaskFailed as failed:
        yield format_sse_event(data_str=failed.problem.model_dump_json(exclude_none=True), event="problem")
    except NoPlace as none:
        yield format_sse_event(data_str=ProblemDetails.of(none).model_dump_json(exclude_none=True), event="problem")


async def result_of(request: Request, service: Service, tenant: str, name: str, document: Document) -> bytes:
    """Return a child's answer as JSON.

    Raises NoPlace, TaskFailed, and ClientDisconnect when the client has hung up.
    """

    async def answer() -> list[bytes]:
        messages = _messages(service, tenant, name, document)
        return [message.body async for message in messages if message.kind == "result"]

    results = await unless_gone(request.receive, answer)
    if results is None:
        raise ClientDisconnect
    return results[-1]


async def _messages(service: Service, tenant: str, name: str, document: Document) -> AsyncGenerator[Message]:
    """Yield the messages of a child that answers a question. Raises NoPlace and TaskFailed."""
    task = task_of(name, document, **service.settings.limits_of_tasks)
    longest_s = limit_s(service, name, document)
    async with service.children.place(tenant), aclosing(messages(service.forkserver, task, longest_s)) as sent:
        async for message in sent:
            yield message

"""Events of jobs and runs: as server-sent events, or as JSON by long polling."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import Query, Request, Response
from fastapi.sse import EventSourceResponse, format_sse_event

from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.service.http.requests.bodies import json_response, prefer_wait_s
from penstock.service.services import Service

HEARTBEAT_S = 15.0
BEATS = 8
"""Heartbeats after which a stream looks although no change was announced: a thousand that wait cost next to nothing."""

After = Annotated[int, Query(ge=0, le=MAX_WIRE_INTEGER)]
Page = Callable[[int], Any]
"""The events after a number, with ``items``, ``last`` and ``done``."""


async def answer_events(
    request: Request, service: Service, topic: str, page: Page, after: int, *, poll: bool
) -> Response:
    """Return the events after ``after``: streamed to the end, or with ``poll`` the next ones, held by ``Prefer``."""
    page_of_events = await run_sync(page, after)
    if not poll:
        if page_of_events.done and not page_of_events.items:
            return Response(status_code=204)
        return EventSourceResponse(_stream(service, topic, page, after), headers={"Cache-Control": "no-store"})
    until = time.monotonic() + prefer_wait_s(request, service.settings.max_wait_s)
    with service.notifier.listen(topic) as listener:
        while True:
            page_of_events = await run_sync(page, after)
            settled = page_of_events.items or page_of_events.done or service.notifier.closed
            if settled or not await listener.wait(until - time.monotonic()):
                return json_response(page_of_events)


async def _stream(service: Service, topic: str, page: Page, after: int) -> AsyncIterator[bytes]:
    with service.notifier.listen(topic) as listener:
        while not service.notifier.closed:
            page_of_events = await run_sync(page, after)
            for event in page_of_events.items:
                yield format_sse_event(data_str=event.model_dump_json(), event=event.kind, id=str(event.sequence))
            after = page_of_events.last
            if page_of_events.done and not page_of_events.items:
                return
            for _ in range(0 if page_of_events.items else BEATS):
                if await listener.wait(HEARTBEAT_S):
                    break
                yield format_sse_event(comment="still here")

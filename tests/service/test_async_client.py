"""The awaited client has the methods of the blocking one, and they do the same."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import httpx
import pytest
from service_process import Server

from penstock.client import AsyncClient, Client
from penstock.client.calls import Calls
from penstock.client.flows import EventParser, Send, answer, call, listing
from penstock.schemas.api.jobs import JobEvent
from penstock.schemas.errors import NotFound, Unreachable
from penstock.schemas.request import PlanRequest
from penstock.service.http.samples import tiny_request


def test_every_method_of_one_is_a_method_of_the_other():
    described = {name for name, value in vars(Calls).items() if isinstance(value, call | listing)}
    assert {"plan", "events", "run", "sweep", "export", "wait_until_ready"} <= described
    for kind in (Client, AsyncClient):
        assert not described & set(vars(kind))
    assert inspect.signature(Client("http://x").job) == inspect.signature(AsyncClient("http://x").job)
    assert "best plan" in (Client("http://x").incumbent.__doc__ or "")


def test_a_plan_and_its_story(shared_server: Server):
    asyncio.run(_a_plan_and_its_story(shared_server.url))


async def _a_plan_and_its_story(url: str) -> None:
    heard: list[JobEvent] = []
    async with AsyncClient(url) as client:
        await client.wait_until_ready()
        request = PlanRequest.parse(tiny_request() | {"global_batch_size": 48})
        job = await client.plan(request, on_event=heard.append)
        assert job.result is not None
        told = [event async for event in client.events(job.id)]
        assert told == heard
        assert [event.sequence for event in told] == list(range(1, len(told) + 1))
        resumed = [event async for event in client.events(job.id, after=told[-2].sequence)]
        assert resumed == told[-1:]
        jobs = await asyncio.gather(*(client.plan(request) for _ in range(5)))
        assert [each.result for each in jobs] == [job.result] * 5
        with pytest.raises(NotFound, match="no job 'x'"):
            await client.job("x")


def _play(server: str, statuses: list[tuple[int, dict[str, str]]], patience_s: float) -> tuple[Any, list[float]]:
    """What a flow makes of a service that answers so, one after the other; and how long it paused."""
    flow = answer(server, Send("GET", "/x"), patience_s)
    pauses: list[float] = []
    step = next(flow)
    while True:
        try:
            if isinstance(step, Send):
                status, headers = statuses.pop(0)
                request = httpx.Request("GET", server + "/x")
                step = flow.send(httpx.Response(status, headers=headers, request=request, content=b"{}"))
            else:
                pauses.append(step.seconds)
                step = flow.send(None)
        except StopIteration as end:
            return end.value, pauses


def test_a_busy_service_is_asked_again_when_it_wants_to_be():
    found, pauses = _play("http://x", [(429, {"retry-after": "3"}), (503, {}), (503, {}), (200, {})], 20)
    assert (found.status_code, pauses) == (200, [3.0, 0.5, 1.0])


def test_patience_ends():
    with pytest.raises(Unreachable, match="503"):
        _play("http://x", [(503, {"retry-after": "5"})] * 9, 12)
    with pytest.raises(Unreachable, match="503"):
        _play("http://x", [(503, {})], 0)


def test_events_are_read_line_by_line():
    text = ': still here\n\nid: 1\nevent: state\ndata: {"a":\ndata:  1}\n\ndata: 2\n'
    parser = EventParser()
    assert [data for line in text.split("\n") if (data := parser.take(line)) is not None] == ['{"a":\n 1}', "2"]

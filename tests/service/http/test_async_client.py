"""The awaited client against a real service."""

from __future__ import annotations

import asyncio

import pytest
from service_process import Server

from penstock.client import AsyncClient
from penstock.examples.tiny import tiny_request
from penstock.schemas.api.jobs import JobEvent
from penstock.schemas.errors import NotFound
from penstock.schemas.request import PlanRequest


def test_a_plan_and_its_story(shared_server: Server):
    asyncio.run(_a_plan_and_its_story(shared_server.url))


async def _a_plan_and_its_story(url: str) -> None:
    heard: list[JobEvent] = []
    async with AsyncClient(url) as client:
        await client.wait_until_ready()
        request = PlanRequest.parse(tiny_request() | {"planner": "gpipe", "global_batch_size": 48})
        job = await client.plans.create(request, on_event=heard.append)
        assert job.result is not None
        events = [event async for event in client.jobs.events(job.id)]
        assert events == heard
        assert [event.sequence for event in events] == list(range(1, len(events) + 1))
        resumed = [event async for event in client.jobs.events(job.id, after=events[-2].sequence)]
        assert resumed == events[-1:]
        jobs = await asyncio.gather(*(client.plans.create(request) for _ in range(5)))
        assert [each.result for each in jobs] == [job.result] * 5
        assert job.id in [each.id async for each in client.jobs.list()]
        with pytest.raises(NotFound, match="no job 'x'"):
            await client.jobs.get("x")

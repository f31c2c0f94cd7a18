"""Processes for questions are shared out among tenants, and nobody waits for one without an end."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from penstock.service.security.child_places import NoPlace, Places


async def _turns(places: Places, tenants: str, order: list[str]) -> list[asyncio.Task[None]]:
    async def one(tenant: str) -> None:
        async with places.place(tenant):
            order.append(tenant)

    tasks = [asyncio.create_task(one(tenant)) for tenant in tenants]
    await asyncio.sleep(0)
    return tasks


def test_a_tenant_that_holds_all_places_keeps_no_other_one_waiting() -> None:
    async def run() -> None:
        places = Places(2, wait_s=60)
        order: list[str] = []
        async with AsyncExitStack() as occupied:
            await occupied.enter_async_context(places.place("a"))
            await occupied.enter_async_context(places.place("a"))
            tasks = await _turns(places, "aab", order)
            await tasks[2]
            assert order == ["b"]
        await asyncio.gather(*tasks)
        assert order == ["b", "a", "a"]

    asyncio.run(run())


def test_more_tenants_than_places_take_turns() -> None:
    async def run() -> None:
        places = Places(1, wait_s=60)
        order: list[str] = []
        async with places.place("a"):
            async with places.place("b"):
                tasks = await _turns(places, "abc", order)
                await asyncio.sleep(0)
                assert order == []
            await tasks[2]
            assert order == ["b", "c"]
        await asyncio.gather(*tasks)
        assert order == ["b", "c", "a"]

    asyncio.run(run())


def test_waiting_ends_and_leaves_nothing_behind() -> None:
    async def run() -> None:
        places = Places(1, wait_s=0.01)
        async with places.place("a"):
            with pytest.raises(NoPlace, match=r"none of 1 running questions \(1 of this tenant\)") as refused:
                async with places.place("a"):
                    raise AssertionError
            assert refused.value.status == 503
            assert refused.value.headers == {"Retry-After": "5"}
            places.wait_s = 60
            waiting = asyncio.create_task(places.place("a").__aenter__())  # type: ignore[arg-type]
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        async with places.place("a"):
            pass

    asyncio.run(run())

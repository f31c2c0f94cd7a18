"""Agents are silent only while the service listens: what holds its event loop up does not count."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from in_process import in_process

from penstock.examples.tiny import tiny_plan_file
from penstock.planning.programs.lowered import lower
from penstock.service.runs.agents import RETRY_S
from penstock.service.runs.listening import LONGEST_S, ListeningClock


class Hand:
    """A clock that a test moves; ``listening`` is moved by it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.listening = ListeningClock(lambda: self.now_s)

    def listen(self, seconds: float) -> None:
        """Pass time in which the event loop runs."""
        for _ in range(int(seconds)):
            self.now_s += 1.0
            self.listening.tick()

    def stand_still(self, seconds: float) -> None:
        """Pass time in which it does not."""
        self.now_s += seconds


@pytest.mark.tier("quick")
def test_time_without_ticks_counts_a_little():
    hand = Hand()
    hand.listen(5)
    hand.stand_still(0.5)
    assert hand.listening.now() == 5.5
    hand.stand_still(600)
    assert hand.listening.now() == 5 + LONGEST_S
    hand.listen(2)
    assert hand.listening.now() == 5 + LONGEST_S + 1, "what did not count never does"


def service_of(client: httpx.AsyncClient) -> Any:
    """Return the service behind a client of this process."""
    return client._transport.app.state.service  # type: ignore[attr-defined]


async def call(client: httpx.AsyncClient, name: str) -> None:
    """Make a call of an agent, which does not wait."""
    body = {
        "incarnation": "one",
        "state_version": 0,
        "devices": [{"id": f"{name}/0", "kind": "cpu", "memory_bytes": 10**9}],
        "models": ["gpt"],
        "address": "127.0.0.1",
        "hold": False,
    }
    assert (await client.post(f"/v1/agents/{name}:sync", json=body)).status_code == 200


async def alive(client: httpx.AsyncClient) -> list[bool]:
    """Return whether each agent is alive."""
    return [agent["alive"] for agent in (await client.get("/v1/agents")).json()]


def with_clock(client: httpx.AsyncClient, hand: Hand) -> None:
    """Have the service's agents live by a test's clock."""
    agents = service_of(client).agents
    agents._clock, agents._started = hand.listening, hand.listening.now()


def test_an_agent_is_not_silent_while_the_service_is_deaf(tmp_path: Path):
    async def run() -> None:
        async with in_process(tmp_path) as client:
            hand = Hand()
            with_clock(client, hand)
            await call(client, "node0")
            hand.stand_still(600)
            assert await alive(client) == [True]
            assert not service_of(client).agents.is_lost("default", "node0", "one")
            hand.listen(RETRY_S)
            assert await alive(client) == [False]

    asyncio.run(run())


def test_a_run_starts_on_the_agents_that_were_there_when_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first one of a service waits until the judge is loaded."""
    hand = Hand()

    def slowly(*arguments: Any) -> Any:
        hand.listen(2 * RETRY_S)
        return lower(*arguments)

    monkeypatch.setattr("penstock.service.http.routes.runs.lower", slowly)

    async def run() -> None:
        async with in_process(tmp_path) as client:
            with_clock(client, hand)
            for name in ("node0", "node1"):
                await call(client, name)
            body = {"schema_version": 1, "plan": tiny_plan_file(), "model": "gpt", "steps": 3}
            answer = await client.post("/v1/runs", json=body)
            assert answer.status_code == 201, answer.text
            assert await alive(client) == [False, False]

    asyncio.run(run())

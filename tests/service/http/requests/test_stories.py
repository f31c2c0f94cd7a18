"""Event streams: what they send, and how seldom a waiting stream reads the database."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.service.db.notifier import Notifier
from penstock.service.http.requests import events as events_route

pytestmark = pytest.mark.tier("quick")


def story(monkeypatch: pytest.MonkeyPatch, scheduled: dict[int, list[str]], beats: int) -> tuple[list[bytes], int]:
    """Return what a stream sends within ``beats`` heartbeats, and how often it read; ``scheduled``: events before a
    beat.
    """
    monkeypatch.setattr(events_route, "HEARTBEAT_S", 0.01)
    events: list[Any] = []
    looks = 0
    notifier = Notifier()

    def page(after: int) -> Any:
        nonlocal looks
        looks += 1
        items = [event for event in events if event.sequence > after]
        return SimpleNamespace(items=items, last=items[-1].sequence if items else after, done=False)

    async def read() -> list[bytes]:
        notifier.bind()
        sent: list[bytes] = []
        async with aclosing(events_route._stream(SimpleNamespace(notifier=notifier), "job:1", page, 0)) as stream:
            while sum(piece.startswith(b":") for piece in sent) < beats:
                for text in scheduled.pop(sum(piece.startswith(b":") for piece in sent), []):
                    number = len(events) + 1
                    events.append(
                        SimpleNamespace(sequence=number, kind="state", model_dump_json=lambda text=text: text)
                    )
                    notifier.publish("job:1")
                sent.append(await anext(stream))
        return sent

    return asyncio.run(read()), looks


def test_a_stream_that_waits_looks_once_in_many_heartbeats(monkeypatch: pytest.MonkeyPatch):
    sent, looks = story(monkeypatch, {}, 3 * events_route.BEATS)
    assert len(sent) == 3 * events_route.BEATS
    assert looks == 3


def test_what_is_told_is_sent_at_once_and_in_order(monkeypatch: pytest.MonkeyPatch):
    sent, looks = story(monkeypatch, {0: ["a"], 2: ["b", "c"], 3: ["d"]}, 4)
    words = [piece.split(b"data: ")[1][:1] for piece in sent if b"data: " in piece]
    assert words == [b"a", b"b", b"c", b"d"]
    order = [b"." if piece.startswith(b":") else piece.split(b"data: ")[1][:1] for piece in sent]
    assert order.index(b"b") == 3, "after the second heartbeat, before the third"
    assert looks < 12

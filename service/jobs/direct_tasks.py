"""Tasks of one endpoint in a child process, watched without a thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from anyio import CancelScope, create_task_group
from anyio.to_thread import run_sync

from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import Unreachable
from penstock.service.problems import TaskFailed
from penstock.workers.child import Child, Spawner
from penstock.workers.protocol import Message, death, end, failure_of, received, send

T = TypeVar("T")

PIECE_BYTES = 1 << 20
END_S = 0.5


async def messages(place: Spawner, task: Message, limit_s: float) -> AsyncGenerator[Message]:
    """Yield a child's messages while it does one task, until its result; closing the iterator ends the child.

    Raises TaskFailed with the child's error, or with how it died.
    """
    child = await run_sync(place.spawn)
    deadline = time.monotonic() + limit_s
    ended = False
    try:
        await run_sync(send, child, task)
        child.pipe.setblocking(False)
        async for message in _messages(child, deadline):
            if (problem := failure_of(message, task)) is not None:
                raise TaskFailed(problem)
            yield message
            if message.kind == "result":
                return
        if time.monotonic() >= deadline:
            raise TaskFailed(_too_long(limit_s))
        ended = True
        raise TaskFailed(death(await run_sync(end, child, END_S)))
    finally:
        with CancelScope(shield=True):
            await run_sync(_dismiss, child, ended)


async def unless_gone(receive: Callable[[], Awaitable[Any]], work: Callable[[], Awaitable[T]]) -> T | None:
    """Return the work's result; None, and the work is cancelled, if the client hangs up first.

    The body has been read before.
    """
    result: T | None = None
    failed: Exception | None = None

    async with create_task_group() as group:

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(until_gone)
        try:
            result = await work()
        except Exception as error:  # raised below, not as an exception group of one
            failed = error
        group.cancel_scope.cancel()
    if failed is not None:
        raise failed
    return result


async def _messages(child: Child, deadline: float) -> AsyncIterator[Message]:
    loop, buffer = asyncio.get_running_loop(), bytearray()
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left_s):
                piece = await loop.sock_recv(child.pipe, PIECE_BYTES)
        except TimeoutError:
            return
        except ConnectionError:
            piece = b""
        if not piece:
            return
        for message in received(buffer, piece):
            yield message


def _too_long(limit_s: float) -> ProblemDetails:
    return ProblemDetails(
        title="It took too long",
        status=504,
        code="time-limit",
        detail=f"there was no answer after {limit_s:.0f} s, the longest that this service works for one request",
        remedy="ask for less: fewer planners, schedules or changes, or a smaller model",
    )


def _dismiss(child: Child, ended: bool) -> None:
    with suppress(Unreachable):  # the forkserver has died, and the child with it
        if not ended:
            end(child, END_S)
    child.close()

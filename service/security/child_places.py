"""Places for the processes that answer questions, shared out among tenants; waiting for one has an end.

All tenants share ``number`` places. Where those are taken, a tenant that holds none gets one more, up to ``number``
more, so that a tenant with long questions keeps no other one waiting.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from penstock.service.problems import RETRY_AFTER_S, Refusal


class NoPlace(Refusal):
    """All processes for questions are at work, for longer than a question waits."""

    title = "Too many questions at once"
    code = "too-many-questions"
    status = 503
    exit_code = 69


class Places:
    """The places of one service. For one event loop."""

    def __init__(self, number: int, wait_s: float) -> None:
        self.number, self.wait_s = number, wait_s
        self._in_use: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @asynccontextmanager
    async def place(self, tenant: str) -> AsyncIterator[None]:
        """Hold a place of a tenant. Raises NoPlace where none was free in time."""
        await self._enter(tenant)
        try:
            yield
        finally:
            self._in_use[tenant] -= 1
            self._in_use += Counter()  # forgets tenants that hold none
            self._hand_out()

    async def _enter(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = tenant, turn
        self._waiting.append(entry)
        self._hand_out()
        try:
            await asyncio.wait_for(asyncio.shield(turn), self.wait_s)
        except BaseException as error:
            if turn.done():  # it was handed out at the last moment
                self._in_use[tenant] -= 1
                self._hand_out()
            else:
                self._waiting.remove(entry)
            if not isinstance(error, TimeoutError):
                raise
            raise NoPlace(
                f"the service is busy: none of {self._in_use.total()} running questions ({self._in_use[tenant]} of "
                f"this tenant) ended within {self.wait_s:g} s",
                remedy="try again later, or have the operator start another service or lower max_question_s",
                headers={"Retry-After": str(RETRY_AFTER_S)},
            ) from None

    def _hand_out(self) -> None:
        """Give free places to the tenants that hold the fewest; of one tenant, to the longest wait."""
        while self._waiting:
            entry = min(self._waiting, key=lambda one: self._in_use[one[0]])
            tenant, turn = entry
            most = self.number if self._in_use[tenant] else 2 * self.number
            if self._in_use.total() >= most:
                return
            self._waiting.remove(entry)
            self._in_use[tenant] += 1
            turn.set_result(None)

"""Streams last as long as the key that opened them: one that is revoked or expires ends them.

Plain ASGI, around whatever answers. The streams of a key are looked after together, so that many cost as one does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from anyio import CancelScope
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.service.security.principals import Principal

if TYPE_CHECKING:
    from penstock.service.services import Service

LOOK_S = 2.0
"""Between two looks at a key; with what the authenticator remembers of it, a stream ends within twice that."""

LAST_WORDS = b": the key that opened this stream has ended\n\n"
"""A comment, which clients skip; when they ask again, they get a 401."""


class Lasting:
    """Middleware; knows the streams that each key has opened."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._authenticator = app, service.authenticator
        self._streams: dict[str, set[CancelScope]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a stream is cut when its key ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key_id: str | None = None
        over = False
        with CancelScope() as stream:

            async def watched(message: Message) -> None:
                nonlocal key_id, over
                if message["type"] == "http.response.start" and _is_stream(message):
                    key_id = self._enter(scope, stream)
                over = message["type"] == "http.response.body" and not message.get("more_body", False)
                await send(message)

            try:
                await self._app(scope, receive, watched)
            finally:
                if key_id is not None:
                    self._leave(key_id, stream)
        if stream.cancelled_caught and not over:
            await send({"type": "http.response.body", "body": LAST_WORDS, "more_body": False})

    def _enter(self, scope: Scope, stream: CancelScope) -> str | None:
        principal: Principal | None = scope.get("state", {}).get("principal")
        if principal is None or principal.key_id is None:
            return None
        key_id = principal.key_id
        self._streams.setdefault(key_id, set()).add(stream)
        if key_id not in self._watches:
            self._watches[key_id] = asyncio.create_task(self._watch(key_id))
        return key_id

    def _leave(self, key_id: str, stream: CancelScope) -> None:
        streams = self._streams[key_id]
        streams.discard(stream)
        if not streams:
            del self._streams[key_id]
            self._watches.pop(key_id).cancel()

    async def _watch(self, key_id: str) -> None:
        while await self._authenticator.is_valid(key_id):
            await asyncio.sleep(LOOK_S)
        for stream in tuple(self._streams[key_id]):
            stream.cancel()


def _is_stream(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")

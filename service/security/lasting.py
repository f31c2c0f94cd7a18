"""Requests that last as long as their key: a key that is revoked or expires ends them.

Plain ASGI, around whatever answers. The requests of a key are looked after together, so that many cost as one does.
"""

from __future__ import annotations

import asyncio

from anyio import CancelScope
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import Unauthenticated
from penstock.service.problems import problem_response
from penstock.service.security.authenticator import Authenticator
from penstock.service.security.principals import Principal

LOOK_S = 0.9
"""Delay between two looks at a key, in seconds.

A look takes the key as it was read within that time, so that its requests end within 2 s.
"""

LAST_WORDS = b": the key that opened this stream has ended\n\n"
"""A comment, which clients skip; when they ask again, they get a 401."""


class Lasting:
    """The middleware that keeps the requests of each key that have no answer yet, and its streams."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app, self._authenticator = app, authenticator
        self._open: dict[str, set[CancelScope]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; while it has no answer, and as long as it streams, it ends with its key."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        key_id: str | None = None
        begun = over = False
        with CancelScope() as cancellable:

            def enter(principal: Principal) -> None:
                nonlocal key_id
                if principal.key_id is not None and key_id is None:
                    key_id = principal.key_id
                    self._enter(key_id, cancellable)

            async def watched(message: Message) -> None:
                nonlocal key_id, begun, over
                if message["type"] == "http.response.start":
                    begun = True
                    if key_id is not None and not _is_stream(message):
                        self._leave(key_id, cancellable)
                        key_id = None
                over = message["type"] == "http.response.body" and not message.get("more_body", False)
                await send(message)

            scope.setdefault("state", {})["held"] = enter
            try:
                await self._app(scope, receive, watched)
            finally:
                if key_id is not None:
                    self._leave(key_id, cancellable)
        if cancellable.cancelled_caught and not begun:
            await problem_response(_ended(scope))(scope, receive, send)
        elif cancellable.cancelled_caught and not over:
            await send({"type": "http.response.body", "body": LAST_WORDS, "more_body": False})

    def _enter(self, key_id: str, request_scope: CancelScope) -> None:
        self._open.setdefault(key_id, set()).add(request_scope)
        if key_id not in self._watches:
            self._watches[key_id] = asyncio.create_task(self._watch(key_id))

    def _leave(self, key_id: str, request_scope: CancelScope) -> None:
        of_key = self._open[key_id]
        of_key.discard(request_scope)
        if not of_key:
            del self._open[key_id]
            self._watches.pop(key_id).cancel()

    async def _watch(self, key_id: str) -> None:
        await asyncio.sleep(LOOK_S)  # a request that enters was checked a moment ago
        while await self._authenticator.is_valid(key_id, known_s=LOOK_S):
            await asyncio.sleep(LOOK_S)
        for request_scope in tuple(self._open[key_id]):
            request_scope.cancel()


def _ended(scope: Scope) -> ProblemDetails:
    error = Unauthenticated("the key that made this request has ended", remedy="make one with `penstock keys create`")
    return ProblemDetails.of(error).model_copy(update={"instance": scope["path"]})


def _is_stream(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")

"""In which form an answer leaves: JSON or, where the client asks for it, MessagePack; 406 where it takes neither."""

from __future__ import annotations

from anyio.to_thread import run_sync
from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.schemas.api.jobs import ProblemDetails
from penstock.service.http import media
from penstock.service.http.problems import MEDIA_TYPE as PROBLEM
from penstock.service.http.problems import NotAcceptable, problem_response

COMPRESS_FROM_BYTES = 1024
API = "/v1/"
SAFE = ("GET", "HEAD", "OPTIONS")
WRITING = (media.JSON, media.MSGPACK, "text/event-stream")
"""What a POST may be answered with; whether as a stream, the route says."""

IN_A_THREAD_BYTES = 1 << 16
TAG_ENDING = '+msgpack"'


def install(app: FastAPI) -> None:
    """Let the app's answers leave in the form, and with the compression, that clients ask for."""
    app.add_middleware(Negotiation)
    app.add_middleware(GZipMiddleware, minimum_size=COMPRESS_FROM_BYTES, compresslevel=4)


class Negotiation:
    """Answers of the API in the form that ``Accept`` prefers. Problems stay JSON, streams stay what they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(API):
            await self._app(scope, receive, send)
            return
        accept = Accept(Headers(scope=scope).get("accept", "*/*"))
        if scope["method"] not in SAFE and not any(accept.takes(each) for each in WRITING):
            await _refuse(accept, " and ".join(WRITING[:2]), scope, receive, send)
        elif accept.weight(media.MSGPACK, exactly=True) > accept.weight(media.JSON, exactly=True):
            await self._app(_without_ending(scope), receive, _Packing(send))
        elif scope["method"] in SAFE and not accept.takes_anything:
            await self._app(scope, receive, _Checking(accept, scope, receive, send))
        else:
            await self._app(scope, receive, send)


class Accept:
    """The value of an ``Accept`` header."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._weights = dict(_range(each) for each in text.split(",") if each.strip())
        self.takes_anything = not self._weights or self._weights.get("*/*", 0.0) > 0

    def weight(self, media_type: str, *, exactly: bool = False) -> float:
        """How much a media type is wanted, 0 to 1; with ``exactly`` by its own name."""
        ranges = (media_type,) if exactly else (media_type, media_type.partition("/")[0] + "/*", "*/*")
        return next((self._weights[each] for each in ranges if each in self._weights), 0.0)

    def takes(self, media_type: str) -> bool:
        """Whether an answer of that type is welcome."""
        return not self._weights or self.weight(media_type) > 0


class _Packing:
    """Turns a JSON answer to MessagePack; holds its start back until the body is known."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(raw=message["headers"])
            headers.add_vary_header("Accept")
            if "etag" in headers:
                headers["ETag"] = headers["etag"].removesuffix('"') + TAG_ENDING
            if headers.get("content-type", "") == media.JSON:
                self._start = message
                return
        elif self._start is not None:
            self._body += message.get("body", b"")
            if message.get("more_body", False):
                return
            message = {**message, "body": await self._packed(self._start)}
        await self._send(message)

    async def _packed(self, start: Message) -> bytes:
        headers = MutableHeaders(raw=start["headers"])
        body = self._body
        if body:
            in_place = len(body) < IN_A_THREAD_BYTES
            body = media.msgpack_of_json(body) if in_place else await run_sync(media.msgpack_of_json, body)
        headers["Content-Type"] = media.MSGPACK
        headers["Content-Length"] = str(len(body))
        await self._send(start)
        return body


class _Checking:
    """Lets an answer pass when the client takes its type, and a 406 instead when it does not."""

    def __init__(self, accept: Accept, scope: Scope, receive: Receive, send: Send) -> None:
        self._accept, self._scope, self._receive, self._send = accept, scope, receive, send
        self._refused = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            found = Headers(raw=message["headers"]).get("content-type", "").partition(";")[0]
            if found and found != PROBLEM and message["status"] < 300 and not self._accept.takes(found):
                self._refused = True
                await _refuse(self._accept, found, self._scope, self._receive, self._send)
        if not self._refused:
            await self._send(message)


async def _refuse(accept: Accept, there_is: str, scope: Scope, receive: Receive, send: Send) -> None:
    error = NotAcceptable(
        f"this can be had as {there_is}, but the request accepts only {accept.text!r}",
        remedy=f"send Accept: {media.JSON}, or no such header",
    )
    problem = ProblemDetails.of(error).model_copy(update={"instance": scope["path"]})
    await problem_response(problem)(scope, receive, send)


def _range(text: str) -> tuple[str, float]:
    name, *parameters = (part.strip().lower() for part in text.split(";"))
    name = media.MSGPACK if media.is_msgpack(name) else name
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip() == "q":
            try:
                return name, min(max(float(value), 0.0), 1.0)
            except ValueError:
                return name, 0.0
    return name, 1.0


def _without_ending(scope: Scope) -> Scope:
    """The request with the tags that its routes know."""
    old, new = TAG_ENDING.encode(), b'"'
    headers = [
        (name, value.replace(old, new) if name == b"if-none-match" else value) for name, value in scope["headers"]
    ]
    return {**scope, "headers": headers}

"""Reading and sending bodies: documents parsed off the event loop, stored JSON sent as it is.

A compressed body is unpacked in small steps, and each is counted before the next one.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, TypeVar

from anyio.to_thread import run_sync
from fastapi import Query, Request, Response
from pydantic import BaseModel

from penstock.schemas.amounts import exact
from penstock.schemas.document import Document
from penstock.service.http.requests import media
from penstock.service.parsing import LARGE_BYTES, parse
from penstock.service.problems import TooLarge
from penstock.service.security.principals import Principal

M = TypeVar("M", bound=Document)
T = TypeVar("T")

MOST_TIMES = 200
"""Most times its own size that a compressed body may unpack to, beyond the first MiB; documents of layers reach 60."""

Cursor = Annotated[str | None, Query(max_length=128, description="`next_cursor` of the page before")]
Limit = Annotated[int, Query(ge=1, le=200, description="how many at most")]

STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("event", "id", "data")},
            "description": "one server-sent event; `data` is JSON",
        }
    }
}
"""Events in the OpenAPI document."""

UNCHANGED: dict[str, Any] = {"description": "unchanged since the ETag in `If-None-Match`"}
"""A 304 in the OpenAPI document."""

BODY_MODELS: dict[str, type[BaseModel]] = {}
"""Models that requests carry, for the OpenAPI document."""


def reader(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """Return a dependency that reads the body as ``model``."""
    BODY_MODELS[model.__name__] = model

    async def read(request: Request) -> M:
        service = request.app.state.service
        stored = service.stores.of(request.state.principal.tenant).resolve
        document: M = await parsed(request, parse, model, await body_of(request), stored)
        service.sizes.check(document)
        return document

    return read


async def parsed(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """Run ``work`` on the request's body in a thread and return its result; two large bodies at most at a time."""
    is_large = len(await body_of(request)) >= LARGE_BYTES
    limiter = request.app.state.service.large_bodies if is_large else None
    return await run_sync(work, *arguments, limiter=limiter)


def takes(model: type[BaseModel], example: Any) -> dict[str, Any]:
    """Return the part of a route's OpenAPI description that describes its body."""
    BODY_MODELS[model.__name__] = model
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {media.JSON: {"schema": schema, "example": example}}}}


async def body_of(request: Request) -> bytes:
    """Return the body as JSON text, unpacked; it is read once and kept with the request.

    Raises WrongMediaType, TooLarge, and InvalidDocument for compressed data that cannot be read.
    """
    if not hasattr(request.state, "body"):
        media.refuse_other_types(request.headers.get("content-type", media.JSON))
        unpacker = media.unpacker(request.headers.get("content-encoding", "identity"))
        request.state.body = await _received(request, unpacker)
    body: bytes = request.state.body
    return body


def json_response(document: BaseModel | bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a document as a response."""
    body = document if isinstance(document, bytes) else document.model_dump_json()
    return Response(body, status, media_type=media.JSON, headers=headers)


def tagged(request: Request, body: bytes) -> Response:
    """Return a body with its ETag, or 304 when the client has it already."""
    tag = '"' + hashlib.sha256(body).hexdigest()[:32] + '"'
    if knows(request, tag):
        return Response(status_code=304, headers={"ETag": tag})
    return json_response(body, headers={"ETag": tag})


def immutable(request: Request, body: bytes, address: str) -> Response:
    """Return a response with a body that never changes; only its tenant may cache it."""
    headers = {"ETag": f'"{address}"', "Cache-Control": "private, max-age=31536000, immutable"}
    if knows(request, headers["ETag"]):
        return Response(status_code=304, headers=headers)
    return json_response(body, headers=headers)


def knows(request: Request, tag: str) -> bool:
    """Return whether ``If-None-Match`` names the tag; weak tags count too (RFC 9110, 13.1.2)."""
    tags = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    return tag in tags or tags == ["*"]


def prefer_wait_s(request: Request, longest_s: float) -> float:
    """Return N of ``Prefer: wait=N`` (RFC 7240) in seconds, at most ``longest_s``; 0 without it."""
    for preference in request.headers.get("prefer", "").replace(";", ",").split(","):
        name, _, value = preference.partition("=")
        if name.strip().lower() == "wait" and value.strip().isdecimal():
            return min(float(value.strip()[:9]), longest_s)
    return 0.0


async def _received(request: Request, unpacker: media.Unpacker | None) -> bytes:
    service = request.app.state.service
    limit = service.settings.max_body_bytes
    principal: Principal | None = getattr(request.state, "principal", None)
    tenant = "" if principal is None else principal.tenant
    pieces: list[bytes] = []
    size = received = 0
    grown_bytes: list[int] = []
    request.state.release = lambda: service.held_bytes.release(tenant, sum(grown_bytes))
    async for chunk in request.stream():
        received += len(chunk)
        most = limit if unpacker is None else min(limit, max(2**20, MOST_TIMES * received))
        async for piece in _unpacked(unpacker, chunk):
            grown_bytes.append(service.held_bytes.grow(tenant, size, size + len(piece)))
            size += len(piece)
            if size > most:
                raise _too_large(limit, None if most == limit else received)
            pieces.append(piece)
    if unpacker is not None:
        unpacker.close()
    return b"".join(pieces)


async def _unpacked(unpacker: media.Unpacker | None, chunk: bytes) -> AsyncIterator[bytes]:
    """Yield what a piece of a body stands for, in steps small enough that each is counted before the next is made."""
    if unpacker is None:
        yield chunk
        return
    yield await run_sync(unpacker.take, chunk)
    while unpacker.has_more:
        yield await run_sync(unpacker.take, b"")


def _too_large(limit: int, received: int | None) -> TooLarge:
    """Return the refusal of a body beyond the limit, or beyond what ``received`` compressed bytes may unpack to."""
    if received is not None:
        return TooLarge(
            f"the compressed body unpacks to more than {MOST_TIMES} times its {exact(received)}",
            remedy="send it uncompressed",
        )
    return TooLarge(
        f"the body has more than {exact(limit)}",
        remedy="POST profile and topology by themselves and refer to their hashes, or raise max_body_bytes",
    )

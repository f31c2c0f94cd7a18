"""How bodies come in and go out: documents parsed off the event loop, JSON that is stored as it is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from anyio.to_thread import run_sync
from fastapi import Request, Response
from pydantic import BaseModel, ValidationError

from penstock.schemas.document import Document, faults_of, load_json
from penstock.schemas.errors import Fault, InvalidDocument
from penstock.service.problems import TooLarge, WrongMediaType

M = TypeVar("M", bound=BaseModel)

BODY_MODELS: dict[str, type[BaseModel]] = {}
"""Models that requests carry, for the OpenAPI document."""


def reader(model: type[M]) -> Callable[[Request], Awaitable[M]]:
    """A dependency that reads the body as ``model``."""
    BODY_MODELS[model.__name__] = model

    async def read(request: Request) -> M:
        return await run_sync(parse, model, await _bytes(request))

    return read


def takes(model: type[BaseModel], example: Any) -> dict[str, Any]:
    """The part of a route's OpenAPI description that says what its body is."""
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema, "example": example}}}}


def parse(model: type[M], body: bytes) -> M:
    """A body as ``model``. Raises InvalidDocument with a fault per mistake."""
    data = load_json(body)
    if issubclass(model, Document):
        return model.parse(data)
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = faults_of(error.errors(), data)
        raise InvalidDocument(f"the body has {len(faults)} faults", faults=_first(faults)) from None


def json_response(document: BaseModel | bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A document as it is sent."""
    body = document if isinstance(document, bytes) else document.model_dump_json()
    return Response(body, status, media_type="application/json", headers=headers)


def tagged(request: Request, body: bytes) -> Response:
    """A body with its ETag, or 304 when the client has it already."""
    tag = '"' + hashlib.sha256(body).hexdigest()[:32] + '"'
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers={"ETag": tag})
    return json_response(body, headers={"ETag": tag})


def immutable(request: Request, body: bytes, address: str) -> Response:
    """A body that will never change."""
    headers = {"ETag": f'"{address}"', "Cache-Control": "public, max-age=31536000, immutable"}
    if request.headers.get("if-none-match") == headers["ETag"]:
        return Response(status_code=304, headers=headers)
    return json_response(body, headers=headers)


def prefer_wait_s(request: Request, longest_s: float) -> float:
    """N of ``Prefer: wait=N`` (RFC 7240), at most ``longest_s``; 0 without it."""
    for preference in request.headers.get("prefer", "").replace(";", ",").split(","):
        name, _, value = preference.partition("=")
        if name.strip().lower() == "wait" and value.strip().isdecimal():
            return min(float(value.strip()[:9]), longest_s)
    return 0.0


def _first(faults: list[Fault], most: int = 50) -> tuple[Fault, ...]:
    return tuple(faults[:most])


async def _bytes(request: Request) -> bytes:
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise WrongMediaType(
            f"the body is {media_type!r}; this endpoint takes application/json",
            remedy="send the header Content-Type: application/json",
        )
    limit = request.app.state.service.settings.max_body_bytes
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise TooLarge(
                f"the body has more than {limit} bytes",
                remedy="POST profile and topology by themselves and refer to their hashes, or raise max_body_bytes",
            )
        chunks.append(chunk)
    return b"".join(chunks)

"""Routes that do a request once, however often it is sent with the same ``Idempotency-Key``."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from anyio import CancelScope
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.routing import APIRoute

from penstock.schemas.errors import Fault
from penstock.service.idempotency import LONGEST_KEY, Kept, WrongKey
from penstock.service.problems import problems
from penstock.service.routes.access import service_of
from penstock.service.routes.bodies import body_of

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
KEPT_HEADERS = ("content-type", "location", "preference-applied")

Handle = Callable[[Request], Coroutine[Any, Any, Response]]


class OnceRoute(APIRoute):
    """A route whose POSTs heed the key. Reading needs none; the others ignore it."""

    def get_route_handler(self) -> Handle:
        """The route's handler, and around it the look whether this was answered before."""
        handle: Handle = super().get_route_handler()

        async def once(request: Request) -> Response:
            key = request.headers.get(HEADER)
            if key is None or request.method != "POST":
                return await handle(request)
            return await _once(handle, request, _checked(key))

        return once


def describe_idempotency(schema: dict[str, Any], routes: Sequence[Any]) -> None:
    """Add the header to the POSTs of an OpenAPI document that heed it."""
    told = "a name of yours for this request: sent again within a day, it is answered as it was, and not done again"
    pattern = {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[!-~]+$"}
    header = {"name": HEADER, "in": "header", "required": False, "description": told, "schema": pattern}
    for route in routes:
        if isinstance(route, OnceRoute) and "POST" in (route.methods or ()):
            operation = schema["paths"][route.path_format]["post"]
            operation.setdefault("parameters", []).append(header)
            operation["responses"].setdefault("409", problems(409)[409])


async def _once(handle: Handle, request: Request, key: str) -> Response:
    service = service_of(request)
    principal = await service.door.principal(request)
    what = (request.method, request.url.path, request.url.query, principal.key_id or "", await body_of(request))
    digest = hashlib.sha256(b"\0".join(part if isinstance(part, bytes) else part.encode() for part in what))
    kept = await run_sync(service.idempotency.begin, principal.tenant, key, "sha256:" + digest.hexdigest())
    if kept is not None:
        return Response(kept.body, kept.status, {**kept.headers, REPLAYED: "true"})
    done = False
    try:
        response = await handle(request)
        if response.status_code < 300 and hasattr(response, "body"):
            headers = {name: response.headers[name] for name in KEPT_HEADERS if name in response.headers}
            answer = Kept(response.status_code, headers, bytes(response.body))
            await run_sync(service.idempotency.keep, principal.tenant, key, answer)
            done = True
        return response
    finally:
        if not done:
            with CancelScope(shield=True):
                await run_sync(service.idempotency.forget, principal.tenant, key)


def _checked(key: str) -> str:
    if 1 <= len(key) <= LONGEST_KEY and key.isascii() and key.isprintable() and " " not in key:
        return key
    raise WrongKey(
        f"the header {HEADER} is no key: it has 1 to {LONGEST_KEY} printable ASCII characters without blanks",
        faults=(Fault("/header/idempotency-key", f"1 to {LONGEST_KEY} characters from ! to ~", "malformed"),),
        remedy="a random UUID will do",
    )

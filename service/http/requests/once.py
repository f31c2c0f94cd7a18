"""Routes that do a request once, however often it is sent with the same ``Idempotency-Key``."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from anyio import CancelScope
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.routing import APIRoute

from penstock.schemas.errors import Fault
from penstock.service.db.database import DatabaseAway, Note
from penstock.service.http.requests.access import every_route, scope_of, service_of
from penstock.service.http.requests.bodies import body_of
from penstock.service.idempotency import LONGEST_KEY, Creation, Doing, Kept, WrongKey
from penstock.service.problems import problems
from penstock.service.security.authenticator import require
from penstock.service.security.principals import Principal
from penstock.service.services import Service

HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
KEPT_HEADERS = ("content-type", "location", "preference-applied")

Handle = Callable[[Request], Coroutine[Any, Any, Response]]
Again = Callable[[Request, Service, Principal, str], Coroutine[Any, Any, Response]]
"""Function that answers a request with the object that was created for it before, by its id."""

A = TypeVar("A", bound=Again)

_AGAIN: dict[str, Again] = {}
"""Handlers of repeated requests, by path."""


class OnceRoute(APIRoute):
    """A route whose POSTs honour the key. GETs need none; other methods ignore it."""

    def get_route_handler(self) -> Handle:
        """Return the route's handler, which first looks for a stored answer."""
        handle: Handle = super().get_route_handler()

        async def once(request: Request) -> Response:
            key = request.headers.get(HEADER)
            if key is None or request.method != "POST":
                return await handle(request)
            principal = await service_of(request).authenticator.principal(request)
            _refuse_scope(self, principal)
            return await _once(handle, request, principal, _checked(key))

        return once


def answers_again(path: str) -> Callable[[A], A]:
    """Register the function that answers POSTs to a path whose process died after it had created something."""

    def register(again: A) -> A:
        _AGAIN[path] = again
        return again

    return register


def note_of(request: Request) -> Note | None:
    """Return a function that notes the id of what a request creates; None for a request without a key."""
    doing: Doing | None = getattr(request.state, "doing", None)
    return None if doing is None else doing.note


def describe_idempotency(schema: dict[str, Any], routes: Iterable[Any]) -> None:
    """Add the header to those POSTs of an OpenAPI document that honour it."""
    words = "a name of your choice for this request: a repetition within a day gets the same answer and has no effect"
    pattern = {"type": "string", "minLength": 1, "maxLength": LONGEST_KEY, "pattern": "^[!-~]+$"}
    header = {"name": HEADER, "in": "header", "required": False, "description": words, "schema": pattern}
    for route in every_route(routes):
        if isinstance(route, OnceRoute) and "POST" in (route.methods or ()) and route.include_in_schema:
            operation = schema["paths"][route.path_format]["post"]
            operation.setdefault("parameters", []).append(header)
            operation["responses"].setdefault("409", problems(409)[409])


def _refuse_scope(route: APIRoute, principal: Principal) -> None:
    """Raise Forbidden for a key without the route's scope, before the body is unpacked and the key noted."""
    if (scope := scope_of(route)) is not None:
        require(principal, scope)


async def _once(handle: Handle, request: Request, principal: Principal, key: str) -> Response:
    service = service_of(request)
    what = (request.method, request.url.path, request.url.query, principal.key_id or "", await body_of(request))
    digest = hashlib.sha256(b"\0".join(part if isinstance(part, bytes) else part.encode() for part in what))
    entry = await run_sync(service.idempotency.begin, principal.tenant, key, "sha256:" + digest.hexdigest())
    if isinstance(entry, Kept):
        return Response(entry.body, entry.status, {**entry.headers, REPLAYED: "true"})
    if isinstance(entry, Creation):
        response = await _AGAIN[request.url.path](request, service, principal, entry.id)
        await _keep(service, entry.doing, response)
        response.headers[REPLAYED] = "true"
        return response
    request.state.doing = entry
    renewing = asyncio.create_task(_renew(service, entry))
    done = False
    try:
        response = await handle(request)
        done = await _keep(service, entry, response)
        return response
    finally:
        renewing.cancel()
        if not done:
            with CancelScope(shield=True):
                await run_sync(service.idempotency.forget, entry)


async def _keep(service: Service, doing: Doing, response: Response) -> bool:
    """Keep an answer if it was a success."""
    if response.status_code >= 300 or not hasattr(response, "body"):
        return False
    headers = {name: response.headers[name] for name in KEPT_HEADERS if name in response.headers}
    await run_sync(service.idempotency.keep, doing, Kept(response.status_code, headers, bytes(response.body)))
    return True


async def _renew(service: Service, doing: Doing) -> None:
    """Renew a request's lease until it has created something, or its handler has ended."""
    while True:
        await asyncio.sleep(service.idempotency.lease_s / 3)
        with suppress(DatabaseAway):
            if not await run_sync(service.idempotency.renew, doing):
                return


def _checked(key: str) -> str:
    if 1 <= len(key) <= LONGEST_KEY and key.isascii() and key.isprintable() and " " not in key:
        return key
    raise WrongKey(
        f"the header {HEADER} is not valid: a key has 1 to {LONGEST_KEY} printable ASCII characters without blanks",
        faults=(Fault("/header/idempotency-key", f"1 to {LONGEST_KEY} characters from ! to ~", "malformed"),),
        remedy="a random UUID will do",
    )

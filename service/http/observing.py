"""Wrapping of every request: its id, its line in the log, its metrics, and the refusal during shutdown.

Plain ASGI, so that streams and waits pass through untouched.
"""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import Unreachable
from penstock.service import metrics
from penstock.service.jobs.queue import new_id
from penstock.service.logs import about
from penstock.service.problems import RETRY_AFTER_S, on_anything, problem_response

if TYPE_CHECKING:
    from penstock.service.services import Service

HEADER = "X-Request-ID"
GONE = 499
"""The status of a request whose client went away before an answer began."""

_GIVEN_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_ASKING = frozenset({"GET", "HEAD", "OPTIONS"})
_QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
_UNKNOWN = "(none)"
"""The route of requests that match none: their paths are not used as labels."""

log = logging.getLogger("penstock.service.requests")


class Observing:
    """The outermost middleware."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, log it and count it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        header_id = Headers(scope=scope).get(HEADER, "")
        request_id = header_id if _GIVEN_ID.fullmatch(header_id) else new_id()
        scope.setdefault("state", {})
        answer = Answer(send, request_id)
        began = time.perf_counter()
        metrics.http_active.inc()
        with about(request_id=request_id):
            try:
                await self._answer(scope, receive, answer)
            except ClientDisconnect:
                pass  # the client hung up while sending its body: no answer, and status 499 in the log
            except Exception as error:
                if answer.has_begun:
                    raise
                await (await on_anything(Request(scope), error))(scope, receive, answer)
            finally:
                metrics.http_active.dec()
                _log(scope, answer.status, time.perf_counter() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Answer) -> None:
        if self._service.ending and scope["method"] not in _ASKING:
            problem = ProblemDetails.of(
                Unreachable("the service is shutting down and takes nothing new", remedy="ask again in a moment")
            )
            refusal = problem_response(problem, {"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class Answer:
    """A ``send`` that adds the request's id and remembers the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id = send, request_id
        self.status = GONE
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        """Pass a message on."""
        if message["type"] == "http.response.start":
            self.has_begun, self.status = True, message["status"]
            MutableHeaders(scope=message)[HEADER] = self._request_id
        await self._send(message)


def _log(scope: Scope, status: int, seconds: float) -> None:
    route = _route(scope)
    metrics.http_seconds.labels(scope["method"], route, str(status)).observe(seconds)
    state = scope["state"]
    principal = state.get("principal")
    facts: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"],
        "route": route,
        "status": status,
        "ms": round(1000 * seconds, 1),
        "tenant": getattr(principal, "tenant", None),
        "key_id": getattr(principal, "key_id", None),
        "problem": state.get("problem"),
    }
    present_facts = {name: value for name, value in facts.items() if value is not None}
    log.log(_level(scope["path"], status), "%s %s %d", scope["method"], scope["path"], status, extra=present_facts)


def _level(path: str, status: int) -> int:
    if status < 400 and path in _QUIET:
        return logging.DEBUG
    return logging.WARNING if status >= 500 and path not in _QUIET else logging.INFO


def _route(scope: Scope) -> str:
    """Return the template of the path; a middleware may have given the router a separate scope."""
    if (route := scope.get("route")) is None:
        route = next((route for route in scope["app"].routes if route.matches(scope)[0] == Match.FULL), None)
    return str(getattr(route, "path", _UNKNOWN))

"""Checks of every request and headers of every answer; plain ASGI, so that streams pass through untouched.

Browsers send a session's cookie, and whatever reaches loopback, for any page that makes them. So what changes
something must come from a page of the service itself (``Sec-Fetch-Site``, else ``Origin``), and a service that asks for
no key answers only to names that no other site can point at it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.schemas.amounts import exact
from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import Forbidden, PenstockError
from penstock.service.problems import Refusal, problem_response
from penstock.service.settings import Settings, is_loopback

READING = frozenset({"GET", "HEAD", "OPTIONS"})
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of answers that do not set them; pages have a separate policy."""

HSTS = "max-age=31536000"

MAX_HEAD_BYTES = 32 * 2**10
"""Most bytes of the request line and the headers together."""


class LongHead(Refusal):
    """A request line and headers beyond what any request needs."""

    title = "The head is too large"
    code = "head-too-large"
    status = 431
    exit_code = 1


class TwoLengths(Refusal):
    """A body with two lengths, of which two servers may believe different ones (RFC 9112, 6.3)."""

    title = "The request has two lengths"
    code = "two-lengths"
    status = 400
    exit_code = 1


class Guard:
    """Middleware around the whole app."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        is_private = settings.security == "off" and is_loopback(settings.host)
        self._hosts = {name.lower() for name in settings.allowed_hosts} if is_private else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(scope, MutableHeaders(scope=message))
            await send(message)

        refusal = self._refusal(scope)
        if refusal is not None:
            problem = ProblemDetails.of(refusal).model_copy(update={"instance": scope["path"]})
            closing = {"Connection": "close"} if isinstance(refusal, TwoLengths) else None
            await problem_response(problem, closing)(scope, receive, with_headers)
            return
        try:
            await self._app(scope, receive, with_headers)
        finally:
            for over in ("release", "leave"):
                if over in state:
                    state[over]()

    def _refusal(self, scope: Scope) -> PenstockError | None:
        size = len(scope["raw_path"]) + len(scope["query_string"])
        size += sum(len(name) + len(value) for name, value in scope["headers"])
        if size > MAX_HEAD_BYTES:
            return LongHead(f"request line and headers have {exact(size)}; the most are {exact(MAX_HEAD_BYTES)}")
        headers = Headers(scope=scope)
        if "transfer-encoding" in headers and "content-length" in headers:
            return TwoLengths(
                "the request has both Content-Length and Transfer-Encoding: a proxy may have taken it for two requests"
            )
        host = headers.get("host", "")
        if self._hosts is not None and not self._is_known(host):
            return Forbidden(
                f"this service has no keys and is called {host!r}: another site may have led a browser here",
                remedy="call it by localhost, add the name to the setting allowed_hosts, or use security = 'keys'",
            )
        if scope["method"] not in READING and "authorization" not in headers and _is_from_elsewhere(headers, host):
            return Forbidden(
                f"a page of {headers.get('origin') or 'another site'!r} asked for this, and only the service's own may",
                remedy="use the service's own pages, or a key in the header Authorization",
            )
        return None

    def _is_known(self, host: str) -> bool:
        name = (urlsplit(f"//{host}").hostname or "") if host else "localhost"
        return is_loopback(name) or name in (self._hosts or ())


def _add_headers(scope: Scope, headers: MutableHeaders) -> None:
    for name, value in HEADERS.items():
        headers.setdefault(name, value)
    if scope["scheme"] == "https":
        headers.setdefault("Strict-Transport-Security", HSTS)
    allowance = scope["state"].get("allowance")
    if allowance is not None:
        for name, value in allowance.headers().items():
            headers[name] = value


def _is_from_elsewhere(headers: Headers, host: str) -> bool:
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() != host.lower()

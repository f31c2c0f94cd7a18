"""The rendering of pages: templates, the names that all of them can use, and the headers of pages."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse
from fastapi.routing import APIRoute
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from penstock.schemas.amounts import amount, duration, number, percent, ranges
from penstock.schemas.errors import NotFound, PenstockError, Unauthenticated
from penstock.service.pages import assets
from penstock.service.problems import on_http
from penstock.service.security.principals import Principal

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}

NAVIGATION = (
    ("/plan", "Plan"),
    ("/fits", "Fits"),
    ("/questions", "Questions"),
    ("/jobs", "Jobs"),
    ("/sweeps", "Sweeps"),
    ("/runs", "Runs"),
    ("/agents", "Agents"),
    ("/cluster", "Cluster"),
    ("/health", "Health"),
    ("/docs", "API"),
)


class PageRoute(APIRoute):
    """A route whose errors are pages too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler, with Penstock's errors rendered as pages."""
        handle = super().get_route_handler()

        async def handle_as_page(request: Request) -> Response:
            try:
                return await handle(request)
            except Unauthenticated:
                return RedirectResponse(f"/sign-in?next={quote(_address(request))}", 303)
            except PenstockError as error:
                return error_page(request, error)

        return handle_as_page


def page(request: Request, template: str, status: int = 200, **shown: Any) -> HTMLResponse:
    """Render a template."""
    common = {"here": request.url.path, "url": str(request.base_url).rstrip("/"), "who": _signed_in(request)}
    return HTMLResponse(_environment().get_template(template).render(common | shown), status, headers=HEADERS)


def found_page(request: Request, template: str, shown: dict[str, Any] | None, otherwise: str) -> Response:
    """Render a page; redirect to another address where there is nothing to show."""
    return RedirectResponse(otherwise, 303) if shown is None else page(request, template, **shown)


def error_page(request: Request, error: PenstockError) -> HTMLResponse:
    """Render an error as a page."""
    return page(request, "error.html", error.status, error=error)


async def unknown_address(request: Request, error: Exception) -> Response:
    """Return a page for a browser at an unknown address, and a problem for other clients."""
    is_unknown = getattr(error, "status_code", 0) == 404 and not request.url.path.startswith("/v1/")
    if is_unknown and request.method == "GET" and "text/html" in request.headers.get("accept", ""):
        return error_page(request, NotFound(f"there is no page at {request.url.path}"))
    return await on_http(request, error)


def _address(request: Request) -> str:
    """Return the address to continue at: the requested page, or the start for a request that changes something."""
    query = f"?{request.url.query}" if request.url.query else ""
    return request.url.path + query if request.method == "GET" else "/"


def _signed_in(request: Request) -> Principal | None:
    """Return the authenticated principal, or None if anonymous."""
    principal: Principal | None = getattr(request.state, "principal", None)
    return principal if principal is not None and principal.key_id is not None else None


def when(moment: str | None) -> str:
    """Return the age of an ISO time in words; the date for another day."""
    if moment is None:
        return "–"
    at = datetime.fromisoformat(moment)
    past_s = (datetime.now(UTC) - at).total_seconds()
    if past_s < 1:
        return "now"
    for limit_s, unit_s, unit in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if past_s < limit_s:
            return f"{past_s // unit_s:.0f} {unit} ago"
    return f"{at:%Y-%m-%d %H:%M}"


def lasting(begin: str | None, end: str | None) -> str:
    """Return the duration between two ISO times, or until now."""
    if begin is None:
        return "–"
    until = datetime.now(UTC) if end is None else datetime.fromisoformat(end)
    return duration(max(0.0, (until - datetime.fromisoformat(begin)).total_seconds()) * 1e9)


def gap(value_ns: int | None, bound_ns: int | None) -> str:
    """Return the gap of a value to its bound."""
    return percent(value_ns / bound_ns - 1) if value_ns is not None and bound_ns else "–"


def short(address: str) -> str:
    """Shorten a hash or an id to a length that people can compare."""
    return address.removeprefix("sha256:")[:8] if address.startswith("sha256:") else f"…{address[-8:]}"


def readable(value: object) -> str:
    """Format a value of an event: hashes short, lists without brackets, numbers with few digits."""
    if isinstance(value, list | tuple):
        return ", ".join(map(readable, value))
    if isinstance(value, float):
        return f"{value:.5g}"
    return short(value) if isinstance(value, str) and value.startswith("sha256:") else str(value)


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=ChoiceLoader([PackageLoader("penstock.service.pages"), PackageLoader("penstock.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {
        "asset": assets.address,
        "navigation": NAVIGATION,
        "version": version("penstock"),
        "duration": duration,
        "number": number,
        "amount": amount,
        "percent": percent,
        "ranges": ranges,
        "gap": gap,
    }
    environment.filters |= {"when": when, "lasting": lasting, "short": short, "readable": readable}
    return environment

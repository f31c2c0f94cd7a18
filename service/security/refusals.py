"""Answers to refused keys and quotas: the headers that HTTP requires with 401 and 429, and a form for browsers."""

from __future__ import annotations

import math
from urllib.parse import quote

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import QuotaExceeded, Unauthenticated
from penstock.service.problems import problem_response
from penstock.service.security.authenticator import Authenticator
from penstock.service.security.guard import Guard
from penstock.service.security.lasting import Lasting
from penstock.service.settings import Settings


def install(app: FastAPI, authenticator: Authenticator, settings: Settings) -> None:
    """Guard the app, and let it answer so."""
    app.add_middleware(Lasting, authenticator=authenticator)
    app.add_middleware(Guard, settings=settings)
    app.add_exception_handler(Unauthenticated, _on_unauthenticated)
    app.add_exception_handler(QuotaExceeded, _on_quota)


def wants_form(request: Request) -> bool:
    """Return whether a browser asks for a page, so that a form to sign in serves it better than an error."""
    return request.method == "GET" and "text/html" in request.headers.get("accept", "")


def to_form(request: Request) -> Response:
    """Send a browser to the form, and from there back to where it was."""
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(f"/sign-in?next={quote(here, safe='')}", 303, {"Cache-Control": "no-store"})


async def _on_unauthenticated(request: Request, error: Exception) -> Response:
    assert isinstance(error, Unauthenticated)
    if wants_form(request):
        return to_form(request)
    shown = ', error="invalid_token"' if "authorization" in request.headers else ""
    return _problem(request, error, {"WWW-Authenticate": f'Bearer realm="penstock"{shown}'})


async def _on_quota(request: Request, error: Exception) -> Response:
    assert isinstance(error, QuotaExceeded)
    return _problem(request, error, {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))})


def _problem(request: Request, error: Unauthenticated | QuotaExceeded, headers: dict[str, str]) -> Response:
    problem = ProblemDetails.of(error).model_copy(update={"instance": request.url.path})
    return problem_response(problem, headers)

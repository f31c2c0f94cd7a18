"""Every error as problem details (RFC 9457, ``application/problem+json``); no traceback ever leaves the service."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

from penstock.schemas.api.jobs import FaultOut, ProblemDetails
from penstock.schemas.document import faults_of
from penstock.schemas.errors import Fault, PenstockError
from penstock.service.db.database import DatabaseAway
from penstock.service.logs import request_id

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 5
MOST_DETAIL = 4000
"""Most characters of a problem's sentence, and of its remedy."""
MOST_IN_DETAIL = 10
"""Wrong parameters that the sentence names; the list of faults has more."""
MOST_ERRORS_BYTES = 80_000
"""Most bytes of the faults that a problem lists, as JSON."""

log = logging.getLogger("penstock.service")


class Refusal(PenstockError):
    """An error known only to HTTP; ``headers`` are sent with it."""

    def __init__(
        self,
        detail: str,
        *,
        faults: tuple[Fault, ...] = (),
        remedy: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail, faults=faults, remedy=remedy)
        self.headers = dict(headers or {})


class TooLarge(Refusal):
    """A body larger than the configured limit."""

    title = "The body is too large"
    code = "too-large"
    status = 413
    exit_code = 65


class WrongMediaType(Refusal):
    """A body of an unsupported media type or encoding."""

    title = "The body has the wrong media type"
    code = "wrong-media-type"
    status = 415
    exit_code = 65


class TaskFailed(Exception):
    """A child process failed; ``problem`` is its error."""

    def __init__(self, problem: ProblemDetails) -> None:
        super().__init__(problem.detail)
        self.problem = problem


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI description of a route's errors."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDetails"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def problem_response(problem: ProblemDetails, headers: dict[str, str] | None = None) -> Response:
    """Return the response for a problem."""
    body = _brief(problem).model_copy(update={"request_id": request_id()}).model_dump_json(exclude_none=True)
    return Response(body, problem.status, media_type=MEDIA_TYPE, headers=headers)


def _brief(problem: ProblemDetails) -> ProblemDetails:
    """Return the problem cut to the size of an answer: its first faults, and the number of the others."""
    changes: dict[str, Any] = {}
    for name in ("detail", "remedy", "instance"):
        text = getattr(problem, name)
        if text is not None and len(text) > MOST_DETAIL:
            changes[name] = text[:MOST_DETAIL] + "…"
    left_bytes, listed = MOST_ERRORS_BYTES, 0
    for fault in problem.errors:
        left_bytes -= len(fault.model_dump_json())
        if left_bytes < 0:
            break
        listed += 1
    if more := len(problem.errors) - listed:
        rest = FaultOut(pointer="", detail=f"{more} more faults are not listed", code="more-faults")
        changes["errors"] = (*problem.errors[:listed], rest)
    return problem.model_copy(update=changes) if changes else problem


def install(app: FastAPI) -> None:
    """Make the app answer every error with problem details."""
    app.add_exception_handler(PenstockError, _on_ours)
    app.add_exception_handler(TaskFailed, _on_failed_task)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(HTTPException, on_http)


async def _on_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    request.state.problem = error.detail
    problem = ProblemDetails.of(error).model_copy(update={"instance": request.url.path})
    if isinstance(error, DatabaseAway):
        problem = problem.model_copy(update={"detail": error.public_detail})
    return problem_response(problem, _headers_of(error))


async def _on_failed_task(request: Request, error: Exception) -> Response:
    assert isinstance(error, TaskFailed)
    return problem_response(error.problem.model_copy(update={"instance": request.url.path}))


def _headers_of(error: PenstockError) -> dict[str, str]:
    if isinstance(error, Refusal):
        return error.headers
    return {"Retry-After": str(RETRY_AFTER_S)} if error.status == HTTPStatus.SERVICE_UNAVAILABLE else {}


async def _on_parameters(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = faults_of(error.errors())
    first = "; ".join(f"{fault.pointer}: {fault.detail}" for fault in faults[:MOST_IN_DETAIL])
    return problem_response(
        ProblemDetails(
            title="The parameters are not valid",
            status=422,
            code="invalid-parameters",
            detail=first + ("; …" if len(faults) > MOST_IN_DETAIL else ""),
            errors=tuple(FaultOut.of(fault) for fault in faults),
            instance=request.url.path,
        )
    )


async def on_http(request: Request, error: Exception) -> Response:
    """Return the problem of an error of the framework: an unknown address, a method that a route lacks."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    detail, remedy = str(error.detail), None
    if error.status_code == 404:
        detail, remedy = f"there is nothing at {request.url.path}", "/openapi.json says what there is"
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(allowed := _allowed_methods(request))
        detail = f"{request.url.path} takes {' and '.join(allowed)}, not {request.method}"
    return problem_response(
        ProblemDetails(
            title=HTTPStatus(error.status_code).phrase,
            status=error.status_code,
            code=HTTPStatus(error.status_code).phrase.lower().replace(" ", "-"),
            detail=detail,
            remedy=remedy,
            instance=request.url.path,
        ),
        headers,
    )


async def on_anything(request: Request, error: Exception) -> Response:
    """Return the answer to an unexpected error; the reason is only in the log."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return problem_response(
        ProblemDetails(
            title="Penstock failed",
            status=500,
            code="internal",
            detail="this is a fault of the service, not of the request; its log has the reason",
            instance=request.url.path,
        )
    )


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes at this path; Starlette names the methods of the first route only."""

    def accepts(method: str) -> bool:
        scope = dict(request.scope) | {"method": method}
        return any(route.matches(scope)[0] == Match.FULL for route in request.app.routes)

    return [method for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT") if accepts(method)]

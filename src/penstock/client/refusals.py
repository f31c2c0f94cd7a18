"""Refusals of a service as the errors that they were there."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import PenstockError, Unreachable


def error_of(problem: ProblemDetails) -> PenstockError:
    """Build the error that problem details describe."""
    return problem.as_error()


def refusal(answer: httpx.Response) -> PenstockError:
    """Build the error of a refused answer."""
    try:
        return error_of(ProblemDetails.model_validate_json(answer.content))
    except ValidationError:
        return Unreachable(
            f"{answer.request.url} answered {answer.status_code} {answer.reason_phrase}",
            remedy="is it a Penstock service?",
        )

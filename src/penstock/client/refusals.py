"""What a service refused, as the error that it was there."""

from __future__ import annotations

import httpx
from pydantic import ValidationError

from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import PenstockError, Unreachable


def error_of(problem: ProblemDetails) -> PenstockError:
    """Problem details as the error that they were."""
    return problem.as_error()


def refusal(answer: httpx.Response) -> PenstockError:
    """The error of an answer that is one."""
    try:
        return error_of(ProblemDetails.model_validate_json(answer.content))
    except ValidationError:
        return Unreachable(
            f"{answer.request.url} answered {answer.status_code} {answer.reason_phrase}",
            remedy="is it a Penstock service?",
        )

"""What a service refused, as the error that it was there."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
from pydantic import ValidationError

from penstock.schemas.api.jobs import ProblemDetails
from penstock.schemas.errors import Fault, PenstockError, Unreachable


def error_of(problem: ProblemDetails) -> PenstockError:
    """Problem details as the error that they were."""
    kind = next((kind for kind in _kinds(PenstockError) if kind.code == problem.code), PenstockError)
    faults = tuple(Fault(fault.pointer, fault.detail, fault.code) for fault in problem.errors)
    return kind(problem.detail, faults=faults, remedy=problem.remedy)


def refusal(answer: httpx.Response) -> PenstockError:
    """The error of an answer that is one."""
    try:
        return error_of(ProblemDetails.model_validate_json(answer.content))
    except ValidationError:
        return Unreachable(
            f"{answer.request.url} answered {answer.status_code} {answer.reason_phrase}",
            remedy="is it a Penstock service?",
        )


def _kinds(kind: type[PenstockError]) -> Iterator[type[PenstockError]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _kinds(inner)

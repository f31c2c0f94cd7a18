"""Every error that Penstock reports, with the words, HTTP status and exit code it carries.

PenstockError
├── InvalidDocument      a profile, topology, request or plan that does not parse or contradicts itself
│   └── WrongDocument    one of another kind: a topology where a profile belongs
├── UnsupportedRequest   well-formed, but no planner, schedule or executor here does it
│   └── UnknownMethod    no such planner, schedule or option of one
├── InvalidPlan          a plan that the judge refuses (does not verify, deadlocks, does not lower)
├── ModelMismatch        the model's layers are not the plan's layers
├── NotFound             no such job, plan, run, agent
│   └── UnknownName      no such example, kind of device or module: a name that its user wrote
├── Conflict             the state does not allow it (a second agent of one name, a finished job)
├── Unauthenticated      no key, or one that is not valid (any more)
├── Forbidden            a valid key that does not open this
├── QuotaExceeded        more than a key or an address may ask for in a while
├── Unreachable          a service, store or agent did not answer
├── RunFailed            a rank or an agent died, or ranks disagree
└── MissingExtra         an optional dependency is not installed

Standard library only: ranks, solvers and the command line all import it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Self


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: where (a JSON pointer), what, and a stable code for programs."""

    pointer: str
    detail: str
    code: str = "invalid"


class PenstockError(Exception):
    """An error that says what went wrong, with which values, and what to do about it."""

    title: ClassVar[str] = "Penstock could not do that"
    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 70

    def __init__(self, detail: str, *, faults: tuple[Fault, ...] = (), remedy: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.faults = faults
        self.remedy = remedy

    def __str__(self) -> str:
        lines = [self.detail]
        lines += [f"  {fault.pointer or '/'}: {fault.detail}" for fault in self.faults]
        if self.remedy:
            lines.append(f"  try: {self.remedy}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.detail, self.faults, self.remedy)


def _rebuild(kind: type[PenstockError], detail: str, faults: tuple[Fault, ...], remedy: str | None) -> PenstockError:
    return kind(detail, faults=faults, remedy=remedy)


class InvalidDocument(PenstockError):
    """A profile, topology, request or plan that does not parse or contradicts itself."""

    title = "The document is not valid"
    code = "invalid-document"
    status = 422
    exit_code = 65


class WrongDocument(InvalidDocument):
    """A document of another kind than the one that belongs here; ``document_kind`` is its kind."""

    def __init__(
        self,
        detail: str,
        *,
        faults: tuple[Fault, ...] = (),
        remedy: str | None = None,
        document_kind: str | None = None,
    ) -> None:
        super().__init__(detail, faults=faults, remedy=remedy)
        self.document_kind = document_kind


class UnsupportedRequest(PenstockError):
    """A well-formed request that nothing here can answer."""

    title = "The request asks for something that is not supported"
    code = "unsupported-request"
    status = 422
    exit_code = 65


class UnknownMethod(UnsupportedRequest):
    """A name that no planner, schedule or option of a planner has."""

    exit_code = 64


class InvalidPlan(PenstockError):
    """A plan that does not verify, deadlocks, or cannot be lowered to programs."""

    title = "The plan is not valid"
    code = "invalid-plan"
    status = 422
    exit_code = 1


class ModelMismatch(PenstockError):
    """The model's layers, shapes or parameters differ from the ones that the plan was made for."""

    title = "The model is not the plan's model"
    code = "model-mismatch"
    status = 409
    exit_code = 1


class NotFound(PenstockError):
    """An object that does not exist here."""

    title = "Not found"
    code = "not-found"
    status = 404
    exit_code = 1


def meant(name: str, names: Iterable[str], otherwise: str | None = None, likeness: float = 0.6) -> str | None:
    """Return the question whether the nearest of the ``names`` was meant; ``otherwise`` where none is near."""
    nearest = get_close_matches(name, list(names), 1, likeness)
    return f"did you mean {nearest[0]!r}?" if nearest else otherwise


class UnknownName(NotFound):
    """A name that nothing has: of an example, a kind of device, the module of a training job."""

    exit_code = 64

    @classmethod
    def among(cls, what: str, name: str, names: Iterable[str]) -> Self:
        """Return the refusal of a ``name`` that no ``what`` has, with the nearest one, or else all ``names``."""
        choices = list(names)
        return cls(f"there is no {what} {name!r}", remedy=meant(name, choices, f"one of {', '.join(choices)}"))


class Conflict(PenstockError):
    """A request that the present state does not allow."""

    title = "The present state does not allow it"
    code = "conflict"
    status = 409
    exit_code = 1


class Unauthenticated(PenstockError):
    """A request without a valid key: the key is missing, malformed, unknown, expired or revoked."""

    title = "A valid key is needed"
    code = "unauthenticated"
    status = 401
    exit_code = 1


class Forbidden(PenstockError):
    """A valid key without the scope that this request needs."""

    title = "The key does not allow it"
    code = "forbidden"
    status = 403
    exit_code = 1


class QuotaExceeded(PenstockError):
    """More requests than one key or address may make; ``retry_after_s``: when it may try again."""

    title = "Too much was asked for"
    code = "quota-exceeded"
    status = 429
    exit_code = 1

    def __init__(
        self,
        detail: str,
        *,
        faults: tuple[Fault, ...] = (),
        remedy: str | None = None,
        retry_after_s: float = 1.0,
    ) -> None:
        super().__init__(detail, faults=faults, remedy=remedy)
        self.retry_after_s = retry_after_s


class Unreachable(PenstockError):
    """A service, store or agent did not answer."""

    title = "No answer"
    code = "unreachable"
    status = 503
    exit_code = 1


class RunFailed(PenstockError):
    """A run ended before it was done."""

    title = "The run failed"
    code = "run-failed"
    status = 500
    exit_code = 1


class NonfiniteLoss(RunFailed):
    """A loss, or a parameter, is NaN or infinite: the same steps would have the same result again."""

    code = "nonfinite-loss"
    title = "The loss is not finite"


class MissingExtra(PenstockError):
    """An optional dependency is not installed."""

    title = "An optional part is not installed"
    code = "missing-extra"
    status = 500
    exit_code = 70

"""Whether a bound covers a plan, and what an answer says in words: the one place where the audit asks the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.solvers.bounds import applies
from penstock.solvers.problem import Problem
from penstock.solvers.result import REQUEST_SCOPE, Bound, Candidate, Result


class Claim(NamedTuple):
    """No plan that is covered takes less than the bound. ``about``: which those are, in words."""

    source: str
    about: str
    bound: Bound
    covers: Callable[[Candidate], bool]


def covered(problem: Problem, bound: Bound, plan: Candidate) -> bool:
    """Whether the plan is one of those that the bound is proven for."""
    return applies(bound, plan)


def of_request(problem: Problem, source: str, bound: Bound) -> Claim:
    """A bound of plans of a request, as a claim."""
    return Claim(source, bound.model, bound, lambda plan: covered(problem, bound, plan))


def sentences_of(problem: Problem, source: str, result: Result) -> Iterator[Claim]:
    """What people read of an answer: today every certificate of a request is shown as of all its plans."""
    for bound in result.bounds:
        if bound.scope == REQUEST_SCOPE:
            said = f"No plan of this request ({bound.model}) takes less than {bound.bound_ns}"
            yield Claim(source, said, bound, lambda plan: True)

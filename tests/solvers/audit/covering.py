"""What the package says that a bound covers, and what an answer says in words, as the audit takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

from penstock.schemas.coverage import Covers, claim
from penstock.solvers.bounds.coverage import allowed, features_of_candidate
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, SCHEDULE_SCOPE, Bound, JudgedPlan, Result
from penstock.solvers.solve.incumbent import Proofs


class Claim(NamedTuple):
    """No plan of the class takes less than the bound; None stands for every plan that the request allows."""

    source: str
    said: str
    bound: Bound
    plans: Covers | None


def features(problem: Problem, plan: JudgedPlan) -> Covers:
    """The plan's features."""
    return features_of_candidate(problem, plan)


def is_allowed(problem: Problem, plan: JudgedPlan) -> bool:
    """Whether the plan is in the class of all plans that the request allows."""
    return features(problem, plan) <= allowed(problem)


def of_class(source: str, bound: Bound) -> Claim:
    """A bound on the plans that it covers."""
    return Claim(source, f"{bound.scope}, {bound.model}: {bound.bound_ns} by {bound.method}", bound, bound.covers)


def sentences_of(source: str, result: Result) -> Iterator[Claim]:
    """What people read of an answer's bounds; where it says "this request", it has to be true of every plan of it."""
    for bound in result.bounds:
        if bound.scope != SCHEDULE_SCOPE:
            said = f"{claim(bound.scope, bound.covers)} takes less than {bound.bound_ns}"
            yield Claim(source, said, bound, None if bound.scope == REQUEST_SCOPE else bound.covers)


@contextmanager
def overheard(told: Callable[[Bound], None]) -> Iterator[None]:
    """Tells of every bound that any search proves in this process, whether an answer shows it or not."""
    add = Proofs.add

    def listening(proofs: Proofs, bound: Bound) -> bool:
        told(bound)
        return add(proofs, bound)

    with mock.patch.object(Proofs, "add", listening):
        yield

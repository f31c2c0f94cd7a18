"""Claims of bounds, for the audit: the class of plans that each bound covers, and the sentences that answers show."""

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
    """A bound that no plan of the class beats; ``plans`` is None for every plan that the request allows."""

    source: str
    sentence: str
    bound: Bound
    plans: Covers | None


def features(problem: Problem, plan: JudgedPlan) -> Covers:
    """Return the features of a plan."""
    return features_of_candidate(problem, plan)


def is_allowed(problem: Problem, plan: JudgedPlan) -> bool:
    """Return whether the plan is in the class of all plans that the request allows."""
    return features(problem, plan) <= allowed(problem)


def of_class(source: str, bound: Bound) -> Claim:
    """Return a bound as a claim about the plans that it covers."""
    return Claim(source, f"{bound.scope}, {bound.model}: {bound.bound_ns} by {bound.method}", bound, bound.covers)


def sentences_of(source: str, result: Result) -> Iterator[Claim]:
    """Yield the sentences about an answer's bounds that people read.

    A sentence that says "this request" must be true of every plan of the request.
    """
    for bound in result.bounds:
        if bound.scope != SCHEDULE_SCOPE:
            sentence = f"{claim(bound.scope, bound.covers)} takes less than {bound.bound_ns}"
            yield Claim(source, sentence, bound, None if bound.scope == REQUEST_SCOPE else bound.covers)


@contextmanager
def overheard(on_bound: Callable[[Bound], None]) -> Iterator[None]:
    """Call ``on_bound`` with every bound that any search proves in this process, whether an answer shows it or not."""
    add = Proofs.add

    def listening(proofs: Proofs, bound: Bound) -> bool:
        on_bound(bound)
        return add(proofs, bound)

    with mock.patch.object(Proofs, "add", listening):
        yield

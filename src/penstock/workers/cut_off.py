"""The answer of a solve that was ended from outside: the best plan found by then."""

from __future__ import annotations

import logging

from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.errors import PenstockError
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.request import PlanRequest

log = logging.getLogger("penstock.service")


def best_so_far(
    request: PlanRequest, best: Plan | None, because: str, seconds: float, *, verified: bool = False
) -> ResultOut:
    """Return ``best`` as the result, if it verifies; without one, ``time_limit``. ``because``: who ended the solve.

    ``verified``: it has been verified already.
    """
    plan = best
    if plan is not None and not verified:
        from penstock.planning.judge import refuse_unsound

        try:
            refuse_unsound(PlanFile(plan=plan, request=request))
        except PenstockError as error:
            log.error("the best plan so far is dropped: %s", error)
            plan = None
    outcome = "no plan had been found" if plan is None else "this is the best plan until then"
    return ResultOut(
        status="time_limit" if plan is None else "feasible",
        why=(f"the solver was stopped because {because}", outcome),
        plan=plan,
        plan_hash=None if plan is None else plan.content_hash(),
        certificates=() if plan is None else plan.certificates,
        seconds=seconds,
    )

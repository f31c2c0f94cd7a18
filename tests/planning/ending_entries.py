"""What a solve in a process of its own may do, for ``test_limits``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from penstock.convert import to_plan
from penstock.planning import solve as solving
from penstock.planning.solve import solve_here
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest
from penstock.solvers.compiled.progress import tell


def compile_for_ever(request: PlanRequest, found: Callable[[Plan], None], *_: Any) -> NoReturn:
    """Find a plan, then stay in the compiler."""
    plan = solve_here(request).plan
    assert plan is not None
    found(plan)
    tell("a.kernel")
    while True:
        pass


def compile_alone(*_: Any) -> NoReturn:
    """Stay in the compiler, without a plan."""
    tell("a.kernel")
    while True:
        pass


def find_unsound(request: PlanRequest, found: Callable[[Plan], None], *more: Any) -> ResultOut:
    """Find plans whose times are not those of the judge."""

    def understated(*given: Any) -> Plan:
        plan = to_plan(*given)
        assert plan.prediction is not None
        half = {"time_per_global_batch_ns": plan.prediction.time_per_global_batch_ns // 2}
        return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=half)})

    solving.to_plan = understated
    return solving.solve_verified(request, found, *more)


def refuse(*_: Any) -> ResultOut:
    """Refuse the request."""
    raise UnsupportedRequest("such stages are not supported", remedy="other stages")


def crash(*_: Any) -> ResultOut:
    """Meet an error of its own."""
    raise ZeroDivisionError("in the solver")

"""Entry points of solves in a separate process, for ``test_limits``."""

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


def compile_for_ever(request: PlanRequest, on_plan: Callable[[Plan], None], *_: Any) -> NoReturn:
    """Find a plan, then stay in the compiler."""
    plan = solve_here(request).plan
    assert plan is not None
    on_plan(plan)
    tell("a.kernel")
    while True:
        pass


def compile_alone(*_: Any) -> NoReturn:
    """Stay in the compiler, without a plan."""
    tell("a.kernel")
    while True:
        pass


def find_unsound(request: PlanRequest, on_plan: Callable[[Plan], None], *more: Any) -> ResultOut:
    """Find plans whose times differ from the simulator's."""

    def understated(*arguments: Any) -> Plan:
        plan = to_plan(*arguments)
        assert plan.prediction is not None
        half = {"time_per_global_batch_ns": plan.prediction.time_per_global_batch_ns // 2}
        return plan.model_copy(update={"prediction": plan.prediction.model_copy(update=half)})

    solving.to_plan = understated
    return solving.solve_verified(request, on_plan, *more)


def refuse(*_: Any) -> ResultOut:
    """Refuse the request."""
    raise UnsupportedRequest("such stages are not supported", remedy="other stages")


def crash(*_: Any) -> ResultOut:
    """Raise an error of the solver itself."""
    raise ZeroDivisionError("in the solver")

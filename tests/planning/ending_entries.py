"""What a solve in a process of its own may do, for ``test_limits``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

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


def refuse(*_: Any) -> ResultOut:
    """Refuse the request."""
    raise UnsupportedRequest("such stages are not supported", remedy="other stages")


def crash(*_: Any) -> ResultOut:
    """Meet an error of its own."""
    raise ZeroDivisionError("in the solver")

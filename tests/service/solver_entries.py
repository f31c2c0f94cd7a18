"""Solvers that misbehave, for the service to deal with; ``entry`` chooses one by the request's seed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from penstock.questions.solve import solve
from penstock.schemas.api.jobs import ResultOut
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.plan import Plan
from penstock.schemas.request import PlanRequest

Tell = Callable[[Plan], None]


def hang(request: PlanRequest, tell: Tell) -> NoReturn:
    """Ignore SIGTERM, and start a separate process that would outlive this one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    Path(os.environ["PIDS_FILE"]).write_text(f"{os.getpid()} {grandchild.pid}\n")
    tell_plan(request, tell)
    while True:
        signal.pause()


def hang_without_plan(request: PlanRequest, tell: Tell) -> NoReturn:
    """Wait without end, and report no plan."""
    hang(request, lambda plan: None)


def tell_plan(request: PlanRequest, tell: Tell) -> None:
    """Report the plan that a real planner finds."""
    plan = solve(request).plan
    assert plan is not None
    tell(plan)


def hang_first_time(request: PlanRequest, tell: Tell) -> ResultOut:
    """Wait without end, unless the solver was started before."""
    if not Path(os.environ["PIDS_FILE"]).exists():
        hang(request, tell)
    return solve(request, tell)


def die(request: PlanRequest, tell: Tell) -> NoReturn:
    """End as a broken native library does."""
    tell_plan(request, tell)
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def crash(request: PlanRequest, tell: Tell) -> NoReturn:
    """Fail with an internal error."""
    raise ZeroDivisionError("secret detail")


def refuse(request: PlanRequest, tell: Tell) -> NoReturn:
    """Refuse the request."""
    raise UnsupportedRequest("not this one", remedy="another")


def lie(request: PlanRequest, tell: Tell) -> ResultOut:
    """Claim a plan to be faster than it is."""
    result = solve(request)
    assert result.plan is not None
    assert result.plan.prediction is not None
    prediction = result.plan.prediction.model_copy(update={"time_per_global_batch_ns": 10**12})
    plan = result.plan.model_copy(update={"prediction": prediction})
    return result.model_copy(update={"plan": plan, "plan_hash": plan.content_hash()})


def answer_late(request: PlanRequest, tell: Tell) -> ResultOut:
    """Answer at a signal in the first process; later ones answer at once, in other words."""
    pids = Path(os.environ["PIDS_FILE"])
    if pids.exists():
        return solve(request).model_copy(update={"why": ("second",)})
    pids.write_text(f"{os.getpid()}\n")
    while not pids.with_suffix(".go").exists():
        time.sleep(0.02)
    result = solve(request).model_copy(update={"why": ("first",)})
    pids.with_suffix(".done").touch()
    return result


def eat(request: PlanRequest, tell: Tell) -> NoReturn:
    """Take all the memory that is available."""
    tell_plan(request, tell)
    eaten = []
    while True:
        eaten.append(bytearray(1 << 24))


def be_killed(request: PlanRequest, tell: Tell) -> NoReturn:
    """End as the kernel kills a process for lack of memory."""
    tell_plan(request, tell)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


ENTRIES = {
    1: hang,
    2: hang_without_plan,
    3: hang_first_time,
    4: die,
    5: crash,
    6: refuse,
    7: lie,
    8: answer_late,
    9: eat,
    10: be_killed,
}


def entry(request: PlanRequest, tell: Tell, on_progress: object, workers: int) -> ResultOut:
    """Run the solver that the seed stands for, or the real one."""
    return ENTRIES.get(request.seed, solve)(request, tell)

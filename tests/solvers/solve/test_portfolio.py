"""The portfolio: one answer whatever the number of processes and their speed; limits, deaths, and no orphans."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
import pytest
from drawn_problems import four_devices
from orphans import no_orphans
from portfolio_tasks import Dying, Failing, Hanging, Late, Refusing
from problems import OF_ANY_TRAINER, make_problem

from penstock.schemas.coverage import EVERY_PLAN
from penstock.solvers.bounds.coverage import planned_apart
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import (
    CLASS_SCOPE,
    REQUEST_SCOPE,
    SCHEDULE_SCOPE,
    Bound,
    JudgedPlan,
    Progress,
    Status,
)
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve import tasks
from penstock.solvers.solve import workers as crew
from penstock.solvers.solve.driver import run as run_rounds
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.incumbent import Proofs, State
from penstock.solvers.solve.tasks import Ask
from penstock.solvers.solve.workers import Here, Workers, Workforce


@pytest.fixture(scope="module")
def problem() -> Problem:
    return four_devices(5)


@pytest.fixture(scope="module")
def plans(problem: Problem) -> list[JudgedPlan]:
    """Plans of different planners, the slowest first."""
    heard: list[JudgedPlan] = []
    for name in ("gpipe", "dapple", "interleaved"):
        solve(problem, name, on_incumbent=heard.append)
    by_time = {plan.value_ns: plan for plan in heard}
    return [by_time[value_ns] for value_ns in sorted(by_time, reverse=True)]


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork although numpy keeps a thread, which waits: fresh interpreters would take a second each."""
    monkeypatch.setattr(crew, "one_thread", lambda: True)


def state_of(problem: Problem, limit_s: float | None = None, **settings: Any) -> State:
    on_progress = settings.pop("on_progress", None)
    deadline = Deadline(None if limit_s is None else int(limit_s * 1e9))
    return State(Setting(problem, deadline, **settings), on_progress=on_progress)


def run(state: State, tasks: Sequence[Any], workers: int) -> None:
    """Run tasks with so many processes; with 0, in this process."""
    workforce: Workforce = Workers(state.setting, workers) if workers else Here(state.setting)
    with no_orphans(), workforce as ready:
        run_rounds(state, [list(tasks)], ready)


def bound_of(problem: Problem, bound_ns: int) -> Bound:
    """Return a bound on every plan of the request."""
    return replace(Proofs(Setting(problem)).every_plan, bound_ns=bound_ns)


def plain(value: Any) -> Any:
    """Return a plan's values as tuples; pickles also show which parts are the same object."""
    if isinstance(value, np.ndarray):
        return value.tolist().__repr__()
    if is_dataclass(value):
        return tuple(plain(getattr(value, field.name)) for field in fields(value) if field.name != "simulated")
    if isinstance(value, tuple | list):
        return tuple(plain(each) for each in value)
    return value


def answer(state: State) -> tuple[object, ...]:
    best = None if state.best is None else plain(state.best)
    return best, tuple(state.proofs.by_class.values()), tuple(state.unfinished)


def bound_apart(problem: Problem, bound_ns: int) -> Bound:
    """Return a bound on plans with separate devices for each stage, whatever recomputes."""
    return Bound(CLASS_SCOPE, replace(planned_apart(problem), memory=frozenset({"fits"})), bound_ns, "told")


def orders_of_delays() -> list[tuple[float, ...]]:
    return [(0.0, 0.0, 0.0, 0.0), (0.08, 0.04, 0.0, 0.0), (0.0, 0.0, 0.04, 0.08)]


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("gap", [0.0, 0.5])
def test_the_answer_depends_on_neither_workers_nor_delays(
    problem: Problem, plans: list[JudgedPlan], gap: float
) -> None:
    """Ties go to the earlier task; with a gap the first task that reaches it decides, whatever the others have."""
    best, tied = plans[-1], replace(plans[-1], planner="tied")
    bound = bound_apart(problem, best.value_ns * 2 // 3)
    shares = (tuple(plans[:2]), (*plans[1:-1], best), (tied, best), (plans[0], plans[-1]))
    answers = set()
    for workers in (0, 1, 2, 4):
        for delays in orders_of_delays():
            tasks = [Late(f"task {i}", shares[i], delays[i], bound if i == 2 else None) for i in range(4)]
            state = state_of(problem, gap=gap, whole=bound_of(problem, plans[1].value_ns * 7 // 10))
            run(state, tasks, workers)
            best_found = state.best
            assert best_found is not None
            answers.add((best_found.planner, best_found.value_ns, None if gap else answer(state)))
    assert len(answers) == 1
    by_gap = {0.0: best.planner, 0.5: plans[1].planner}
    assert answers.pop()[0] == by_gap[gap]


@pytest.mark.tier("nightly")
@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize(("drawn", "changes", "workers"), [(0, {}, 4), (1, {"memory_bytes": 60_000_000}, 2)])
def test_auto_gives_the_same_bytes_with_any_number_of_workers(
    drawn: int, changes: dict[str, Any], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = four_devices(drawn, 5, global_batch_size=8, **changes)
    problem = replace(few, update_rules=frozenset(get_args(UpdateRule)))
    monkeypatch.setattr(crew, "SMALL", 0)
    among = solve(problem, "auto", workers=workers, options={"exclude": "closing"})
    assert not among.unfinished
    monkeypatch.setattr(crew, "SMALL", 10**9)
    alone = solve(problem, "auto", options={"exclude": "closing"})
    assert among.best is not None
    assert alone.best is not None
    assert plain(among.best) == plain(alone.best)
    assert (among.sentence, among.bounds, among.status) == (alone.sentence, alone.bounds, alone.status)


@pytest.mark.usefixtures("forking")
@pytest.mark.parametrize("workers", [1, 2])
def test_what_hangs_is_ended_at_the_limit_and_its_best_plan_kept(
    problem: Problem, plans: list[JudgedPlan], workers: int
) -> None:
    state = state_of(problem, limit_s=1.0)
    tasks = [Late("slow", (plans[0],)), Hanging("hanging", (plans[-1],)), Hanging("deaf", ())]
    run(state, tasks, workers)
    assert state.best is not None
    assert state.best.value_ns == plans[-1].value_ns
    assert list(state.unfinished) == ["hanging", "deaf"]


def test_a_limit_that_has_passed_asks_nobody(problem: Problem, plans: list[JudgedPlan]) -> None:
    state = state_of(problem, limit_s=0.0)
    run(state, [Late("late", (plans[0],))], 0)
    assert (state.best, list(state.unfinished)) == (None, ["late"])


@pytest.mark.usefixtures("forking")
def test_a_process_that_dies_is_named_and_the_others_go_on(problem: Problem, plans: list[JudgedPlan]) -> None:
    state = state_of(problem)
    run(state, [Dying("dying", (plans[1],)), Late("living", (plans[0],)), Dying("dead", ())], 1)
    assert state.best is not None
    assert state.best.value_ns == plans[1].value_ns
    assert list(state.unfinished) == ["dying", "dead"]
    assert state.lost == {"dying": "signal 9", "dead": "signal 9"}


@pytest.mark.usefixtures("forking")
def test_a_fault_in_a_task_is_raised_with_its_traceback(problem: Problem) -> None:
    with pytest.raises(RuntimeError, match="failing met an error of its own") as fault:
        run(state_of(problem), [Failing("failing", ())], 2)
    assert "a fault in a task" in str(fault.value)


def test_fresh_interpreters_take_refuse_and_tell(problem: Problem, plans: list[JudgedPlan]) -> None:
    """The tasks run without forking, as in a process with threads."""
    state = state_of(problem)
    run(state, [Late("late", tuple(plans)), Refusing("refusing", ())], 2)
    assert state.best is not None
    assert state.best.value_ns == plans[-1].value_ns
    assert [str(refused.remedy) for refused in state.refused.values()] == ["another"]


@pytest.mark.usefixtures("forking")
def test_progress_tells_of_plans_bounds_and_planners_at_work(problem: Problem, plans: list[JudgedPlan]) -> None:
    bound = Bound(REQUEST_SCOPE, EVERY_PLAN, plans[-1].value_ns // 2, "told")
    heard: list[Progress] = []
    state = state_of(problem, on_progress=heard.append, whole=bound_of(problem, 1))
    run(state, [Late("first", tuple(plans[:1]), proven=bound), Late("second", tuple(plans), 0.02)], 2)
    assert {name for progress in heard for name in progress.working} == {"first", "second"}
    values = [progress.value_ns for progress in heard if progress.value_ns is not None]
    assert values == sorted(values, reverse=True)
    assert values[-1] == plans[-1].value_ns
    assert bound in [progress.bound for progress in heard]
    assert heard[-1].gap is not None


def test_a_proof_for_one_pipeline_spares_only_those_planners(problem: Problem, plans: list[JudgedPlan]) -> None:
    """A bound never stops the search for plans of other kinds (contract of bounds)."""
    contiguous = next(plan for plan in plans if plan.planner == "dapple")
    bound = bound_apart(problem, contiguous.value_ns)
    state = state_of(problem, whole=bound_of(problem, 1))
    spared = Failing("spared", (), makes=planned_apart(problem))
    run(state, [Late("proving", (contiguous,), proven=bound), spared, Late("other", (plans[-1],))], 0)
    assert state.best is not None
    assert state.best.value_ns == plans[-1].value_ns


SOLVING = """
import os, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"
sys.path[:] = {paths!r}
from portfolio_tasks import Hanging
from test_portfolio import run, state_of
from drawn_problems import four_devices
run(state_of(four_devices(5)), [Hanging("one", (), pid_file={pids!r}), Hanging("two", (), pid_file={pids!r})], 2)
"""


@pytest.mark.cases(1)
@pytest.mark.parametrize("forks", [True, False], ids=["forked", "launched"])
def test_no_process_outlives_a_parent_that_is_killed(tmp_path: Path, forks: bool) -> None:
    pids = tmp_path / "pids"
    code = SOLVING.format(paths=sys.path, pids=str(pids))
    if not forks:
        code = code.replace(
            "run(", "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()\nrun(", 1
        )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    try:
        workers = _until(lambda: _listed(pids, 2))
        assert all(worker.ppid() == parent.pid for worker in workers)
        parent.send_signal(signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
    assert psutil.wait_procs(workers, 10)[1] == []


def _listed(pids: Path, count: int) -> list[psutil.Process] | None:
    numbers = pids.read_text().split() if pids.exists() else []
    return [psutil.Process(int(number)) for number in numbers] if len(numbers) == count else None


def _until(ready: Callable[[], list[psutil.Process] | None]) -> list[psutil.Process]:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        if (processes := ready()) is not None:
            return processes
        time.sleep(0.05)
    raise AssertionError("the workers did not come up")


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", [{"max_plans": 3}, {"effort": "quick"}, {"schedule": "gpipe"}, {"gap": 0.2}], ids=str)
def test_auto_is_never_worse_than_a_planner_with_the_same_limits(how: dict[str, Any]) -> None:
    problem = four_devices(2, 6, memory_bytes=70_000_000)
    best = solve(problem, "auto", **how).best
    assert best is not None
    for name, planner in OF_ANY_TRAINER.items():
        if how.get("schedule", "auto") in ("auto", *planner.accepts) and name not in ("auto", "exact"):
            if "synchronous" not in planner.supports:
                continue
            alone = solve(problem, planner.name, **how).best
            least = alone.value_ns if alone is not None else best.value_ns
            assert best.value_ns <= least * (1 + how.get("gap", 0.0))


@dataclass
class Knowing:
    """A link to a search elsewhere that has a plan of this time."""

    value_ns: int

    def best_ns(self) -> int:
        return self.value_ns

    def announce(self, plan: JudgedPlan) -> None:
        """Ignore the plan."""

    def proven(self, bound: Bound) -> None:
        """Ignore the bound."""


def test_what_is_judged_does_not_depend_on_what_is_known() -> None:
    """A better plan elsewhere rules out plans by proofs only: the best of the others stays the same."""
    for seed in range(3):
        problem = four_devices(seed, 6, memory_bytes=50_000_000)
        dapple = PLANNERS["dapple"]
        alone = solve(problem, dapple.name).best
        assert alone is not None
        task = Ask("dapple", dapple.check(problem.update_rules, "auto", {}))
        outcome = task.run(Setting(problem), Knowing(alone.value_ns))
        assert plain(outcome.best) == plain(alone)


def test_split_backwards_are_taken_where_they_fill_the_bubble() -> None:
    problem = make_problem(
        [1_000_000] * 4, nodes=(4,), parameter_bytes=50_000_000, global_batch_size=4, inside_bytes_per_s=10**8
    )
    whole = solve(problem, "auto", options={"exclude": "hetpipe,zero-bubble,chimera"}).best
    every = solve(problem, "auto").best
    assert whole is not None
    assert every is not None
    assert every.planner == "zero-bubble"
    assert every.value_ns < whole.value_ns


def test_a_closed_plan_has_its_proof_in_the_certificate() -> None:
    result = solve(four_devices(4, 5, global_batch_size=4), "auto")
    assert result.best is not None
    assert result.bounds[-1].scope == SCHEDULE_SCOPE
    assert result.bounds[-1].bound_ns <= result.best.value_ns
    without = solve(four_devices(4, 5, global_batch_size=4), "auto", options={"exclude": "closing"})
    assert without.best is not None
    assert result.best.value_ns <= without.best.value_ns
    assert result.status in (Status.OPTIMAL, Status.FEASIBLE)


def test_the_best_plain_plan_is_kept_beside_a_better_one_with_split_backwards(
    problem: Problem, plans: list[JudgedPlan]
) -> None:
    """Orders are optimised for both: the plain plan with its order optimised may be the better one."""
    (whole,) = [each for each in plans if each.is_plain][:1]
    split = solve(problem, "zero-bubble").best
    assert split is not None
    assert not split.is_plain
    state = state_of(problem)
    state.offer(whole)
    state.offer(replace(split, value_ns=whole.value_ns - 1))
    assert [each.is_plain for each in tasks._starts(state)] == [True, False]

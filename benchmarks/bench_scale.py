"""Large clusters, step by step: the cost of a request of 1,024 devices × 200 layers, and of 10,000 × 1,000.

CPU seconds of this process and its children, and the peak of the resident set, of each step from the documents to the
page of the report. ``--planner NAME`` runs another planner than ``auto``, ``--limit S`` limits it. Prints a Markdown
table for each size, and ``name value unit target ok|MISSED`` for each row that has a target.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line does: a process with one thread may fork

import multiprocessing
import resource
from collections.abc import Callable
from typing import TypedDict, TypeVar

from large_requests import SIZES, Size, request

from penstock.convert import to_problem
from penstock.convert.answers import to_plan
from penstock.planning.judge import judge
from penstock.report import plan_files
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.judge.operation_tables import cost_tables
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan, Result
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.warm import warm
from penstock.solvers.verify.verifier import verify

T = TypeVar("T")
WHOSE = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
TARGETS = {"small": (60.0, 2.0), "1k": (60.0, 2.0), "10k": (600.0, 4.0)}
"""The CPU seconds and GiB of everything."""


def main() -> None:
    """Run the requested sizes, each in a separate process: a peak of memory never falls."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=tuple(SIZES), action="append", help="one size; may be repeated")
    parser.add_argument("--planner", default="auto", choices=tuple(PLANNERS))
    parser.add_argument("--limit", type=float, help="seconds for the planner")
    arguments = parser.parse_args()
    warm()
    for name in arguments.size or ("1k", "10k"):
        process = multiprocessing.get_context("spawn").Process(
            target=_run, args=(name, arguments.planner, arguments.limit)
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)


def _run(name: str, planner: str, limit_s: float | None) -> None:
    seconds, gib = TARGETS[name]
    size = SIZES[name]
    steps = _Steps()
    plan_request = steps.take("documents", lambda: request(size, planner=planner, time_limit_s=limit_s))
    text = steps.take("written as canonical JSON", plan_request.canonical_json)
    steps.take(f"read, {len(text) / 1e6:.1f} MB", lambda: PlanRequest.parse_json(text))
    problem = steps.take("frozen as a problem", lambda: to_problem(plan_request))
    result = steps.take(f"planned by {planner}, with its bounds", lambda: _planned(problem, planner, limit_s))
    best = result.best
    assert best is not None
    plan = problem, best.allocation, best.schedule
    cost_tables.cache_clear()
    how: Settings = {"overlap": best.overlap_all_reduce, "update_rule": best.update_rule}
    steps.take("judged: time alone, costs computed again", lambda: makespan_ns(*plan, **how))
    timeline = steps.take("judged: times, memory, use", lambda: simulate(*plan, **how))
    steps.take("verified", lambda: verify(*plan, timeline, **how))
    steps.take("bound of its schedules", lambda: schedule_bound(*plan, best.update_rule))
    file = PlanFile(
        plan=steps.take("as a document", lambda: to_plan(problem, plan_request, best, result.bounds)),
        request=plan_request,
    )
    text = steps.take("plan file written", file.canonical_json)
    steps.take(f"plan file read, {len(text) / 1e6:.1f} MB", lambda: PlanFile.parse_json(text))
    steps.take("hash of the plan", file.plan.content_hash)
    judgement = steps.take("judged from the file, as `penstock verify` does", lambda: judge(file))
    assert not judgement.faults
    html = steps.take("`penstock report`", lambda: plan_files.page(file))
    steps.print(size, f"{len(html) / 1e6:.1f} MB of HTML")
    bound = result.bounds[-2]
    print(
        f"\n{best.planner}: {best.value_ns / 1e9:.3f} s on {_used(best)} devices, {len(best.allocation.stages)} stages;"
    )
    print(f"bound {bound.bound_ns / 1e9:.3f} s, gap {best.value_ns / bound.bound_ns - 1:.1%}: {bound.model}\n")
    _row(f"{size}: all of it", steps.cpu_s, "CPU s", seconds)
    _row(f"{size}: peak", steps.peak_gib, "GiB", gib)


class Settings(TypedDict):
    """The settings of a simulation."""

    overlap: bool
    update_rule: UpdateRule


class _Steps:
    """CPU seconds and the peak after each step."""

    def __init__(self) -> None:
        self._rows: list[str] = []
        self.cpu_s = 0.0

    @property
    def peak_gib(self) -> float:
        """The peak of this process, or of its largest child."""
        return max(_usage(who).ru_maxrss for who in WHOSE) / 2**20

    def take(self, name: str, step: Callable[[], T]) -> T:
        """Run a step, and note its CPU seconds."""
        before = _cpu_s()
        result = step()
        took = _cpu_s() - before
        self.cpu_s += took
        self._rows.append(f"| {name} | {took:.2f} | {self.peak_gib:.2f} |")
        return result

    def print(self, size: Size, note: str) -> None:
        """Print the steps as a table."""
        print(f"\n| {size}, M = {size.micro_batches}; {note} | CPU s | GiB |", "|---|---|---|", *self._rows, sep="\n")


def _planned(problem: Problem, planner: str, limit_s: float | None) -> Result:
    limit_ns = None if limit_s is None else int(limit_s * 1e9)
    return solve(problem, planner, time_limit_ns=limit_ns)


def _used(plan: JudgedPlan) -> int:
    return sum(stage.replicas for stage in plan.allocation.stages)


def _usage(who: int) -> resource.struct_rusage:
    return resource.getrusage(who)


def _cpu_s() -> float:
    return sum(_usage(who).ru_utime + _usage(who).ru_stime for who in WHOSE)


def _row(name: str, value: float, unit: str, target: float) -> None:
    print(f"{name} {value:.3g} {unit} {target:g} {'ok' if value <= target else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()

"""``auto`` compared with each of its planners under the same limit, its gaps, its first plan, and how limits are kept.

DAPPLE's models on its configurations A, B and C: no planner is better than ``auto`` where it runs all of them. Also the
gap of its plans to the bound of their allocation, and the gap to the bound of all plans of one pipeline, in the
settings of BOUNDS section 4.3. ``limits``: how long after its limit each planner answers on large requests. With
``--profiles DIR`` DAPPLE's published profile texts are used. Prints Markdown tables, and ``name value unit target
ok|MISSED`` for each row that has a target.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line does: a process with one thread may fork

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from dapple_models import MODELS, OTHER_KINDS, is_contiguous, models, tightened

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster, profile
from penstock.schemas.errors import UnsupportedRequest
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import NetworkModel, PlanRequest
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Result
from penstock.solvers.planners.catalogue import PLANNERS
from penstock.solvers.solve.driver import solve
from penstock.solvers.solve.warm import warm

CLUSTERS = ("dapple-config-a", "dapple-config-b", "dapple-config-c")
LIMITS_S = (0.0, 0.1, 1.0, 5.0)
Sharing = Literal["private", "shared"]
SECTIONS = ("planners", "gaps", "limits")


class Case(NamedTuple):
    """A request and its name."""

    name: str
    problem: Problem


class Measured(NamedTuple):
    """A result, the seconds until it came, and the seconds until its first plan."""

    result: Result | None
    seconds: float
    first_s: float | None


def main() -> None:
    """Run the requested sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, help="folder with DAPPLE's profile texts")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds for each solve")
    parser.add_argument("--quick", action="store_true", help="one model, and limits of at most a second")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="one section; may be repeated")
    arguments = parser.parse_args()
    names = ("bert-48",) if arguments.quick else tuple(MODELS)
    wanted = arguments.only or SECTIONS
    warm()
    if "planners" in wanted:
        _planners(list(_cases(names, "shared", False, arguments.profiles)), arguments.limit)
    if "gaps" in wanted:
        for name, sharing, tight, typical, most in (
            ("private", "private", False, 0.1, 3.0),
            ("private, binding memory", "private", True, 2.0, 8.0),
            ("shared", "shared", False, 5.0, None),
        ):
            _gaps(name, list(_cases(names, sharing, tight, arguments.profiles)), arguments.limit, typical, most)
    if "limits" in wanted:
        _limits([limit for limit in LIMITS_S if limit <= 1.0 or not arguments.quick])


def _planners(cases: Sequence[Case], limit_s: float) -> None:
    """Run every planner alone and ``auto`` with all of them."""
    names = [name for name in PLANNERS if name != "auto"]
    rows, gaps, firsts, worse = [], [], [], 0
    for case in cases:
        auto = _solved("auto", case.problem, limit_s)
        assert auto.result is not None
        best = auto.result.best
        assert best is not None
        alone = {name: _solved(name, case.problem, limit_s).result for name in names}
        values = {name: result.best.value_ns for name, result in alone.items() if result is not None and result.best}
        least = min(values.values())
        worse += best.value_ns > least
        gaps.append(100 * (best.value_ns / auto.result.bounds[-1].bound_ns - 1))
        firsts.append(auto.first_s or auto.seconds)
        next_best = min(values, key=lambda name: values[name])
        compared = f"{next_best} {100 * (least / best.value_ns - 1):+.2f} %"
        took = f"{firsts[-1]:.2f} s | {auto.seconds:.1f} s"
        rows.append(
            f"| {case.name} | {best.value_ns / 1e6:.1f} ms | {best.planner} | {compared} | {gaps[-1]:.2f} % | {took} |"
        )
        print(rows[-1], flush=True)
    _table("| request | auto | by | best planner alone | schedule gap | first plan | took |", rows)
    _row("auto worse than a planner", worse, "requests", 0)
    _row("schedule gap, median", median(gaps), "%", 0.5)
    _row("first plan, slowest", max(firsts), "s", 1.0)


def _gaps(name: str, cases: Sequence[Case], limit_s: float, typical: float, most: float | None) -> None:
    """Measure the gap of the best plan of one pipeline to the bound over all such plans."""
    gaps = []
    rows = []
    for case in cases:
        measured = _solved("auto", case.problem, limit_s, exclude=OTHER_KINDS)
        assert measured.result is not None
        best = measured.result.best
        if best is None or not is_contiguous(case.problem, best):
            rows.append(f"| {name} | {case.name} | – | – | {measured.seconds:.1f} s |")
            continue
        gaps.append(100 * (best.value_ns / measured.result.bounds[-2].bound_ns - 1))
        rows.append(f"| {name} | {case.name} | {best.planner} | {gaps[-1]:.2f} % | {measured.seconds:.1f} s |")
    _table("| network | request | by | gap | took |", rows)
    _row(f"{name}: median request gap", median(gaps), "%", typical)
    if most is not None:
        _row(f"{name}: largest request gap", max(gaps), "%", most)


def _limits(limits_s: Sequence[float]) -> None:
    """Measure how late each planner is on 64 and 1,024 devices."""
    rows, latest = [], 0.0
    for topology, batch in (("8x8xH100", 512), ("128x8xH100", 8192)):
        problem = _problem(profile("llama-3-70b"), topology, batch, NetworkModel(), "auto")
        for name in PLANNERS:
            late = []
            for limit_s in limits_s:
                measured = _solved(name, problem, limit_s)
                if measured.result is not None:
                    late.append(measured.seconds - limit_s)
            if late:
                latest = max(latest, *late)
                cells = [f"{max(0.0, each):.2f} s" for each in late] + ["refused"] * (len(limits_s) - len(late))
                rows.append(f"| {topology} | {name} | {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    _table("| cluster | planner | " + " | ".join(f"after {limit:g} s" for limit in limits_s) + " |", rows)
    _row("latest answer after its limit", latest, "s", 2.0)


def _solved(name: str, problem: Problem, limit_s: float, **options: Any) -> Measured:
    started = time.monotonic()
    first: list[float] = []
    on_incumbent: Callable[[object], None] = lambda _: first.append(time.monotonic() - started)  # noqa: E731
    try:
        result = solve(problem, name, time_limit_ns=int(limit_s * 1e9), options=options, on_incumbent=on_incumbent)
    except UnsupportedRequest:
        return Measured(None, 0.0, None)
    return Measured(result, time.monotonic() - started, first[0] if first else None)


def _cases(names: Sequence[str], sharing: Sharing, tight: bool, folder: Path | None) -> Iterator[Case]:
    for name, model, _rows, batch in models(folder, names):
        network = NetworkModel(sharing=sharing, transfer="spp") if sharing == "private" else NetworkModel()
        for topology in CLUSTERS:
            problem = _problem(model, topology, batch, network, "never")
            yield Case(f"{name} {topology[-1].upper()}", tightened(problem) if tight else problem)


def _problem(
    model: ModelProfile, topology: str, batch: int, network: NetworkModel, recompute: Literal["never", "auto"]
) -> Problem:
    request = PlanRequest(
        profile=model, topology=cluster(topology), global_batch_size=batch, network=network, recompute=recompute
    )
    return to_problem(request)


def _table(head: str, rows: Sequence[str]) -> None:
    print("\n".join([head, "|" + "---|" * (head.count("|") - 1), *rows]), flush=True)


def _row(name: str, value: float, unit: str, target: float) -> None:
    print(f"{name} {value:.3g} {unit} {target} {'ok' if value <= target else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()

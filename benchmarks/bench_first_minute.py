"""The first minute of `penstock plan`: every transformer by name on 8, 64 and 1,024 GPUs, in seconds of CPU.

Each request has a separate process, with compiled kernels from the warmed cache: all degrees and shardings, one sample
for each GPU, 64 at least. Seconds are measured in the call: until the first plan, until a plan within 5 % of the
answer, and in all. A gap is to the bound on every plan of the request. A gap above 5 % is split into parts:

- ``network``: the time that the plan saves where links are wide and have no latency;
- ``memory``: the time that it saves there if nothing is recomputed;
- ``fill``: the idle time of its GPUs on average even then;
- ``work``: what they compute beyond the bound, as slices or degrees that cost more.

A part is less than 0 where the bound counts memory or fill itself. Prints Markdown, and ``name value unit target
ok|MISSED`` for the targets. With ``--rows FILE`` rows are stored there as they come, and stored requests are not run
again.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command line does: a process with one thread may fork

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from penstock.convert import to_problem
from penstock.examples.catalogue import SHAPES, cluster, profile
from penstock.planning.inputs import with_open_degrees
from penstock.planning.solve import solve_problem
from penstock.schemas.request import PlanRequest, Termination
from penstock.solvers.explanation.changes import MOST, with_network
from penstock.solvers.explanation.what_if import retime
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.planners.effort import EFFORTS, NORMAL
from penstock.solvers.solve.choices import problem_of

CLUSTERS = ("1x8xA100", "8x8xH100", "128x8xH100")
SAMPLES = 64
NEAR = 1.05
SPLIT = 5.0
"""The gap in percent above which it is split into parts."""
PARTS = ("fill", "memory", "network", "work")
FIRST_S, NEAR_S, NONE_S, ALL_S = 2.0, 10.0, 5.0, 60.0
MEDIAN, WORST = 2.0, 15.0
"""The targets for seconds, and for gaps in percent."""


def main() -> None:
    """Run every requested case, then print the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=sorted(SHAPES), help="these models alone")
    parser.add_argument("--cluster", action="append", choices=CLUSTERS, help="these clusters alone")
    parser.add_argument("--effort", choices=sorted(EFFORTS), default=NORMAL.name)
    parser.add_argument("--rows", type=Path, help="file of rows, one line of JSON each")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models, clusters = arguments.model or sorted(SHAPES), arguments.cluster or CLUSTERS
    if arguments.child:
        print(json.dumps(row_of(models[0], clusters[0], arguments.effort)))
        return
    stored = list(_stored_rows(arguments.rows))
    print("| request | s | gap | " + " | ".join(PARTS) + " | first plan | within 5 % | all | |")
    print("|" + "---|" * (6 + len(PARTS) + 1))
    rows = []
    for topology in clusters:
        for model in models:
            key = {"model": model, "cluster": topology, "effort": arguments.effort}
            row = next((each for each in stored if key.items() <= each.items()), None)
            if row is None:
                row = _apart(key)
                if arguments.rows:
                    with arguments.rows.open("a") as kept:
                        kept.write(json.dumps(row) + "\n")
            rows.append(row)
            print(_line(row), flush=True)
    sys.exit(_summary(rows))


def row_of(model: str, topology: str, effort: str) -> dict[str, Any]:
    """Plan one request in this process and return its row; times in ns, gaps in percent."""
    where = cluster(topology)
    request = PlanRequest(
        profile=profile(model),
        topology=where,
        global_batch_size=max(SAMPLES, where.num_devices),
        termination=Termination(effort=effort),
    )
    came: list[tuple[float, int]] = []
    started = _cpu_s()
    request = with_open_degrees(request)
    problem = to_problem(request)

    def on_incumbent(plan: Any) -> None:
        came.append((_cpu_s() - started, plan.prediction.time_per_global_batch_ns))

    result = solve_problem(problem, request, on_incumbent, workers=1)
    row: dict[str, Any] = {"model": model, "cluster": topology, "effort": effort, "all_s": _cpu_s() - started}
    if result.best is None:
        return row | {"status": result.status.value, "why": result.sentence}
    best, bound = result.best, result.bounds[0]
    near = next(seconds for seconds, value in came if value <= NEAR * best.value_ns)
    row |= {"first_s": came[0][0], "near_s": near, "value_ns": best.value_ns, "bound_ns": bound.bound_ns}
    row |= {"planner": best.planner, "choice": str(result.choice), "method": bound.method, "why": result.sentence}
    row["gap"] = 100 * (best.value_ns / bound.bound_ns - 1)
    if row["gap"] > SPLIT:
        row["parts"] = dict(zip(PARTS, _parts(problem_of(problem, result), best, bound.bound_ns), strict=True))
    return row


def _parts(problem: Problem, plan: JudgedPlan, bound_ns: int) -> Iterator[float]:
    """Yield the parts of the gap, in percent of the bound."""
    wide = with_network(problem, Fraction(MOST), Fraction(0))
    network = retime(wide, plan)
    pipelines = [replace(each, stages=tuple(s.plain for s in each.stages)) for each in plan.allocation.pipelines]
    kept = retime(wide, plan, replace(plan.allocation, pipelines=tuple(pipelines)))
    busy_ns = sum(use.busy_ns for use in kept.timeline.uses.values()) / problem.num_devices
    for ns in (
        kept.value_ns - busy_ns,
        network.value_ns - kept.value_ns,
        plan.value_ns - network.value_ns,
        busy_ns - bound_ns,
    ):
        yield 100 * ns / bound_ns


def _stored_rows(path: Path | None) -> Iterator[dict[str, Any]]:
    if path is not None and path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def _apart(key: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", *(part for name in key for part in (f"--{name}", key[name]))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        return key | {"status": "failed", "why": run.stderr.strip().rpartition("\n")[2]}
    row: dict[str, Any] = json.loads(run.stdout)
    return row


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']} on {row['cluster']}"
    if "gap" not in row:
        return f"| {name} | – | – |" + " – |" * (len(PARTS) + 2) + f" {row.get('all_s', 0):.1f} | {row['status']} |"
    parts = row.get("parts")
    shares = [f"{parts[part]:.1f}" if parts else "" for part in PARTS]
    seconds = [f"{row[each]:.1f}" for each in ("first_s", "near_s", "all_s")]
    cells = [name, f"{row['value_ns'] / 1e9:.4g}", f"{row['gap']:.1f} %", *shares, *seconds]
    return f"| {' | '.join(cells)} | {row['choice']}; {row['planner']} |"


def _summary(rows: Sequence[dict[str, Any]]) -> int:
    """Print the targets and the worst values; return 1 if any target is missed, else 0."""
    planned = [row for row in rows if "gap" in row]
    none = [row for row in rows if "gap" not in row]
    wanted = [
        (f"none of {len(none)} that cannot fit answers later", [row.get("all_s", 1e9) for row in none], "s", NONE_S),
        (f"first plans of {len(planned)}", [row["first_s"] for row in planned], "s", FIRST_S),
        ("plans within 5 % of the answer", [row["near_s"] for row in planned], "s", NEAR_S),
        ("answers", [row["all_s"] for row in planned], "s", ALL_S),
        ("gaps", [row["gap"] for row in planned], "%", WORST),
    ]
    missed = 0
    for name, values, unit, target in wanted:
        if values:
            over = sum(value > target for value in values)
            missed += over > 0
            print(f"{name}: {over} over; the worst {max(values):.1f} {unit} {target} {'MISSED' if over else 'ok'}")
    if planned:
        median = statistics.median(row["gap"] for row in planned)
        missed += median > MEDIAN
        print(f"median gap {median:.2f} % {MEDIAN} {'MISSED' if median > MEDIAN else 'ok'}")
    return int(missed > 0)


def _cpu_s() -> float:
    """Return the seconds of CPU of this process and of its ended children."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    main()

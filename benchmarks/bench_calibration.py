"""Errors of a calibrated profile on other plans: other partitions, other micro-batches.

``python benchmarks/bench_calibration.py [--rounds N] [--steps N]``: one line per row: name, value, unit, target, ok or
MISSED. GPT with d = 256 on two CPU ranks; the profile is measured first, with both busy.

A round runs the reference plan, whose traces the calibration uses, before and after each of the other plans, since
absolute times drift with the load of the host. It compares the simulated time under costs calibrated from both
neighbours with the measured time (medians). The figure is the median over rounds of the error's size. The spread of
runs of one and the same plan is a row too: a difference below that spread is no error of the prediction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from penstock.calibration.calibrate import calibrate
from penstock.convert import to_plan, to_problem
from penstock.executor.profiling.profiler import measure_profile
from penstock.executor.run.local import run_locally
from penstock.planning.programs.lower import programs
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.trace import Trace
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.schedules.early_backward import early_backward

JOB = "penstock.examples.gpt:job"
LAYERS = 10
GLOBAL_BATCH = 32
SIZES = (2, 4, 8)
TARGET = 0.05


class Case(NamedTuple):
    """A plan: the last layer of its first stage, and its micro-batches."""

    name: str
    cut: int
    num_micro_batches: int


FROM = Case("calibrated from", 4, 8)
OTHERS = (Case("another partition", 6, 8), Case("another M", 4, 4), Case("another partition and M", 3, 16))
AGAIN = FROM._replace(name="the same plan again")


def cluster() -> ClusterTopology:
    """Return two CPU ranks of this machine; their link is assumed, and calibrated."""
    fabric = {"bandwidth_bytes_per_s": "2 GB/s", "latency_ns": "50 us"}
    uniform = {"nodes": 1, "devices_per_node": 2, "kind": "cpu", "memory_bytes": "8 GiB", "fabric": fabric}
    return ClusterTopology.parse({"name": "this machine", "uniform": uniform}, units=True)


def planned(profile: ModelProfile, topology: ClusterTopology, case: Case) -> PlanFile:
    """Return a plan with 1F1B over two stages."""
    request = PlanRequest(profile=profile, topology=topology, global_batch_size=GLOBAL_BATCH)
    problem = to_problem(request)
    stages = Stage(0, case.cut, (0,)), Stage(case.cut + 1, LAYERS - 1, (1,))
    allocation = single_pipeline(stages, case.num_micro_batches)
    orders = early_backward(problem, allocation)
    best = JudgedPlan.of("by-hand", allocation, orders, simulate(problem, allocation, orders), True, "synchronous")
    return PlanFile(plan=to_plan(problem, request, best, ()), request=request)


def predicted_ns(file: PlanFile) -> int:
    assert file.plan.prediction is not None
    return file.plan.prediction.time_per_global_batch_ns


def run(file: PlanFile, steps: int) -> Trace:
    """Train with a plan on this machine and trace every step but the first."""
    report = run_locally(programs(file), JOB, directory=Path.cwd(), steps=steps, seed=0, trace_steps=max(1, steps - 1))
    return Trace.parse(
        {
            "plan_hash": file.plan.content_hash(),
            "predicted_time_per_global_batch_ns": predicted_ns(file),
            "measured_times_per_global_batch_ns": report.step_times_ns,
            "ranks": report.rank_traces,
            "plan_file": file,
        }
    )


def row(name: str, value: float, target: float) -> bool:
    """Print one line of the summary."""
    verdict = "ok" if value <= target else "MISSED"
    print(f"{name:58s} {value:8.3f} {'error':6s} target <= {target:<6g} {verdict}", flush=True)
    return value <= target


def main(arguments: Sequence[str]) -> int:
    """Measure the profile, then run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5, help="neighbouring runs per row")
    parser.add_argument("--steps", type=int, default=8, help="steps of each run")
    options = parser.parse_args(arguments)
    profile = measure_profile(JOB, "cpu", SIZES, 2, device_kind="cpu")
    errors: dict[str, list[tuple[float, float]]] = {case.name: [] for case in (*OTHERS, AGAIN)}

    def compare(case: Case, measured: Trace, neighbours: Sequence[Trace]) -> None:
        calibration = calibrate(profile, neighbours)
        took = median(measured.measured_times_per_global_batch_ns)
        before, after = (
            predicted_ns(planned(*costs, case)) / took - 1
            for costs in ((profile, cluster()), (calibration.profile, calibration.topology))
        )
        errors[case.name].append((before, after))
        print(f"  {case.name}: {before:+.1%} before, {after:+.1%} after", flush=True)

    baseline = [run(planned(profile, cluster(), FROM), options.steps)]
    for _ in range(options.rounds):
        for case in OTHERS:
            other = run(planned(profile, cluster(), case), options.steps)
            baseline.append(run(planned(profile, cluster(), FROM), options.steps))
            compare(case, other, baseline[-2:])
    for i in range(1, len(baseline) - 1):
        compare(AGAIN, baseline[i], (baseline[i - 1], baseline[i + 1]))
    good = []
    for name, pairs in errors.items():
        sizes = [median(abs(pair[i]) for pair in pairs) for i in (0, 1)]
        print(f"{name + ', before calibration':58s} {sizes[0]:8.3f} error", flush=True)
        good.append(row(f"{name}, calibrated", sizes[1], TARGET))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The bounds of all plans: how far the best plan of some planners is above them, and how long they take.

DAPPLE's models on its configurations A, B and C, private half-duplex channels and the shared network, every number of
micro-batches. Measures the gap to the bound that holds for every plan (all work, or one slice through all layers), and
to the bound for plans of one pipeline, where the best plan has one. ``--seconds`` limits each planner. Then random
chains on 64 devices. CPU time of the bound, kernels warm. Prints ``name value unit target ok|MISSED`` for rows with a
target.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Literal, NamedTuple

from chains import chain, star, unequal
from papers.paper_models import profile

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.schemas.request import NetworkModel, PlanRequest
from penstock.solvers.bounds.coverage import features_of_candidate
from penstock.solvers.bounds.schedule_bound import one_pipeline_bound, request_bound
from penstock.solvers.model.problem import NetworkRules, Problem
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.solve.driver import solve

MODELS = {"vgg-19": 1024, "gnmt-16": 1024, "bert-48": 64, "xlnet-36": 128, "amoebanet-36": 128}
"""The global batch sizes."""
Sharing = Literal["private", "shared"]
PIPELINES = "dp,relax,interleaved"
"""The planners of one pipeline, without replicas in turn or split backwards."""


class Case(NamedTuple):
    """A request and its name."""

    name: str
    problem: Problem


def main() -> None:
    """Run every class of bounds, then the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="limit of each planner")
    parser.add_argument("--planners", default=PIPELINES, help=f"whose best plan is shown; default {PIPELINES}")
    arguments = parser.parse_args()
    one_pipeline_bound(_chain((2, 2), 4))
    sharings: tuple[Sharing, ...] = ("private", "shared")
    for sharing in sharings:
        before: list[float] = []
        after: list[float] = []
        slowest = 0.0
        for case in _cases(sharing):
            bound, seconds = _timed(one_pipeline_bound, case.problem)
            every = request_bound(case.problem)
            slowest = max(slowest, seconds)
            best = _best(case.problem, arguments.planners.split(","), arguments.seconds)
            if best is None:
                print(f"  {case.name}, {sharing}: no plan", flush=True)
                continue
            applicable = bound if features_of_candidate(case.problem, best) <= bound.covers else every
            before.append(100 * (best.value_ns / every.bound_ns - 1))
            after.append(100 * (best.value_ns / applicable.bound_ns - 1))
            gaps = f"{before[-1]:.1f} % above all work, {after[-1]:.1f} % above the bound of its class"
            print(f"  {case.name}, {sharing}: {best.value_ns / 1e6:.1f} ms by {best.planner}, {gaps}", flush=True)
        if before:
            print(f"{sharing}: median gap {median(before):.1f} -> {median(after):.1f} %, largest {max(after):.1f} %")
        _row(f"{sharing}: bound at 16 devices, slowest", slowest, 0.5)
    for nodes, layers in (((8,) * 8, 50), ((8,) * 8, 100), ((1,) * 64, 100)):
        _bound, seconds = _timed(one_pipeline_bound, _chain(nodes, layers))
        _row(f"{layers} layers on {len(nodes)}x{nodes[0]} devices: bound", seconds, 0.5)


def _cases(sharing: Sharing) -> Iterator[Case]:
    """Yield requests with default settings, except for recomputation and the private network's transfers."""
    network = NetworkModel(sharing=sharing, transfer="spp") if sharing == "private" else NetworkModel()
    for name, batch in MODELS.items():
        for letter in "abc":
            topology = cluster(f"dapple-config-{letter}")
            request = PlanRequest(
                profile=profile(name),
                topology=topology,
                global_batch_size=batch,
                network=network,
                recompute="never",
            )
            yield Case(f"{name} {letter.upper()}", to_problem(request))


def _chain(nodes: tuple[int, ...], layers: int) -> Problem:
    """Build unequal layers on servers around a switch, for every number of micro-batches."""
    forward, sent, parameters = unequal(layers, layers + len(nodes), boundary_spread=0.4)
    return chain(
        star(nodes, 130 * 10**9, 3_125_000_000, full_duplex=False),
        forward,
        sent,
        parameters,
        batch=16 * sum(nodes),
        sizes=(),
        rules=NetworkRules(False, "half", "spp", "flat", 25_000_000, False),
    )


def _best(problem: Problem, names: list[str], seconds: float) -> JudgedPlan | None:
    plans = [solve(problem, name, time_limit_ns=int(seconds * 1e9)).best for name in names]
    return min((best for best in plans if best is not None), key=lambda best: best.value_ns, default=None)


def _timed(bound_of: Callable[[Problem], Bound], problem: Problem) -> tuple[Bound, float]:
    began = time.thread_time()
    return bound_of(problem), time.thread_time() - began


def _row(name: str, seconds: float, target: float) -> None:
    print(f"{name} {seconds:.3g} s {target} {'ok' if seconds <= target else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()

"""The bound over all plans of one contiguous pipeline: how far the best plan is above it, how long the search takes.

DAPPLE's models on its configurations A (also with NVLink's sum, 130 GB/s), B and C, as in BOUNDS section 4.3. Private
half-duplex channels, one all-reduce after the last backward, slices no smaller than the measured ones; with ample
memory, and with so little that it binds. Then the shared network. The planner is ``relax`` alone or, with ``--auto``,
``auto`` without the planners of other kinds of plans. Then random chains on larger clusters, and chains whose memory
mostly forces a pipeline over servers with narrow cables: gaps with and without the stages' load on shared cables. CPU
time of the searches, kernels warm. With ``--profiles DIR`` DAPPLE's published profile texts are used. Prints ``name
value unit target ok|MISSED`` for each row that has a target.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from chains import chain, star, unequal
from dapple_models import OTHER_KINDS, is_contiguous, models, tightened
from papers.paper_models import profile

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import NetworkModel, PlanRequest
from penstock.solvers.model.problem import NetworkRules, Problem
from penstock.solvers.planners.contiguous_bound.planner import MILLION, Relaxation
from penstock.solvers.solve.driver import solve

CLUSTERS = ("A25", "A130", "B", "C")
NVLINK_SUM = 130 * 10**9
Sharing = Literal["private", "shared"]


class Case(NamedTuple):
    """A request and its name."""

    name: str
    problem: Problem


def main() -> None:
    """Run every class, then the sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, help="folder with DAPPLE's profile texts")
    parser.add_argument("--auto", action="store_true", help="the best plan of auto, not of relax alone")
    arguments = parser.parse_args()
    planner = "auto" if arguments.auto else "relax"
    solve(_request(profile("gnmt-16"), CLUSTERS[0], 64, 1024, "private"), planner)
    classes: list[tuple[str, Sharing, bool, float, float]] = [
        ("private", "private", False, 0.1, 3.0),
        ("private, binding memory", "private", True, 2.0, 8.0),
        ("shared", "shared", False, 5.0, float("inf")),
    ]
    for name, sharing, tight, typical, most in classes:
        gaps, slowest = [], 0.0
        for case in _cases(sharing, tight, arguments.profiles):
            gap, seconds = _solved(case, planner)
            gaps += [] if gap is None else [gap]
            slowest = max(slowest, seconds)
        _row(f"{name}: median gap", median(gaps), "%", typical)
        _row(f"{name}: largest gap", max(gaps), "%", most)
        _row(f"{name}: bound at 16 devices, all micro-batch numbers, slowest", slowest, "s", 5.0)
    for nodes, layers, target, seconds in (
        ((8,) * 4, 50, 5.0, 10.0),
        ((8,) * 8, 50, 1.0, 10.0),
        ((8,) * 8, 100, 1.0, 10.0),
        ((8,) * 32, 50, 15.0, 60.0),
    ):
        _size(nodes, layers, target, seconds)
    _narrow(80)


def _cases(sharing: Sharing, tight: bool, folder: Path | None) -> Iterator[Case]:
    for name, model, rows, batch in models(folder):
        for configuration in CLUSTERS:
            problem = _request(model, configuration, rows, batch, sharing)
            yield Case(f"{name} {configuration}", tightened(problem) if tight else problem)


def _request(model: ModelProfile, configuration: str, rows: int, batch: int, sharing: Sharing) -> Problem:
    topology = cluster(f"dapple-config-{configuration[0].lower()}")
    if configuration == "A130":
        uniform = topology.uniform
        assert uniform is not None
        fabric = uniform.fabric.model_copy(update={"bandwidth_bytes_per_s": NVLINK_SUM})
        topology = topology.model_copy(update={"uniform": uniform.model_copy(update={"fabric": fabric})})
    network = NetworkModel()
    if sharing == "private":
        network = NetworkModel(sharing=sharing, transfer="spp", all_reduce="flat", overlap_all_reduce=False)
    return to_problem(
        PlanRequest(
            profile=model,
            topology=topology,
            global_batch_size=batch,
            min_slice=rows,
            network=network,
            recompute="never",
        )
    )


def _solved(case: Case, planner: str) -> tuple[float | None, float]:
    """Return the gap of the planner's plan to the bound in percent, and the seconds of the search.

    The gap is None without a plan.
    """
    began = time.thread_time()
    relaxation = Relaxation(case.problem, 30 * MILLION)
    for _piece in relaxation.prove():
        pass
    seconds = time.thread_time() - began
    result = solve(case.problem, planner, options={"exclude": OTHER_KINDS} if planner == "auto" else {})
    if result.best is None or not is_contiguous(case.problem, result.best):
        print(f"  {case.name}: {'a plan of another kind' if result.best else result.status}", flush=True)
        return None, seconds
    bound = max(result.bounds[-2].bound_ns, relaxation.bound_ns)
    gap = 100 * (result.best.value_ns / bound - 1)
    stages = len(result.best.allocation.stages)
    print(f"  {case.name}: {gap:.2f} %, {stages} stages by {result.best.planner}, search {seconds:.2f} s", flush=True)
    return gap, seconds


def _size(nodes: tuple[int, ...], layers: int, target: float, most_seconds: float) -> None:
    """Run a random chain with one number of micro-batches."""
    problem = _chain(nodes, layers)
    began = time.thread_time()
    relaxation = Relaxation(problem, 100 * MILLION)
    for _piece in relaxation.prove():
        pass
    seconds = time.thread_time() - began
    label = f"{layers} layers on {len(nodes)}x{nodes[0]} devices"
    _row(f"{label}: gap", 100 * (relaxation.value_ns / relaxation.bound_ns - 1), "%", target)
    _row(f"{label}: search", seconds, "s", most_seconds)


def _chain(nodes: tuple[int, ...], layers: int) -> Problem:
    forward, sent, parameters = unequal(layers, layers + len(nodes), boundary_spread=0.4)
    devices = sum(nodes)
    return chain(
        star(nodes, 130 * 10**9, 3_125_000_000, full_duplex=False),
        forward,
        sent,
        parameters,
        batch=16 * devices,
        sizes=(devices,),
        rules=NetworkRules(False, "half", "spp", "flat", 25_000_000, False),
    )


def _narrow(count: int) -> None:
    """Run random requests in a shared network.

    Prints the gap to the bound of ``prove``, and to the label search's bound alone.
    """
    gaps: list[tuple[float, float]] = []
    slowest = 0.0
    for seed in range(count):
        relaxation = Relaxation(_narrow_request(seed), 20 * MILLION)
        for _piece in relaxation.prove():
            pass
        if relaxation.best is not None:
            alone = min(search.bound_ns for search in relaxation.searches if not search.empty)
            least = min(alone, relaxation.value_ns), relaxation.bound_ns
            gaps.append((relaxation.value_ns / least[0] - 1, relaxation.value_ns / least[1] - 1))
            began = time.thread_time()
            for search in relaxation.searches:
                search.carry(relaxation.value_ns)
            slowest = max(slowest, time.thread_time() - began)
    before, after = ([100 * gap[which] for gap in gaps] for which in range(2))
    raised = [(b, a) for b, a in zip(before, after, strict=True) if a < b]
    print(f"{len(gaps)} requests on narrow cables: median gap {median(before):.1f} -> {median(after):.1f} %")
    print(f"  raised in {len(raised)}: {', '.join(f'{b:.1f} -> {a:.1f}' for b, a in sorted(raised))} %")
    print(f"  all cables of a request, every number of micro-batches: {slowest:.3f} s at most", flush=True)


def _narrow_request(seed: int) -> Problem:
    """Return 12 or 24 layers on 3 to 6 servers of 2 to 8 devices.

    Transfers over a cut take ½ to 2 even shares of the work.
    """
    draw = np.random.default_rng(seed)
    each = int(draw.choice([2, 4, 8]))
    nodes = (each,) * int(draw.choice([3, 4] if each == 8 else [3, 4, 6]))
    layers, devices = int(draw.choice([12, 24])), sum(nodes)
    forward = draw.integers(500_000, 1_500_000, layers)
    sent = draw.uniform(0.5, 1.5, layers - 1) * draw.choice([0.5, 1.0, 2.0]) * 3 * forward.sum() / devices / 2
    kept = 10 ** int(draw.choice([5, 8, 8, 8]))
    room = 4 * kept * (-(-layers // devices) + int(draw.integers(0, 3))) + kept if kept > 10**5 else 2**50
    return chain(
        star(nodes, 10**12, 10**9, full_duplex=bool(draw.random() < 0.5)),
        forward,
        sent.astype(np.int64),
        np.full(layers, kept),
        batch=int(draw.choice([32, 64])),
        sizes=(1,) if draw.random() < 0.5 else (1, 2, 4),
        rules=NetworkRules(True, "full", "nic", "hierarchical", 25_000_000, True),
        memory_bytes=room,
    )


def _row(name: str, value: float, unit: str, target: float) -> None:
    print(f"{name} {value:.3g} {unit} {target} {'ok' if value <= target else 'MISSED'}", flush=True)


if __name__ == "__main__":
    main()

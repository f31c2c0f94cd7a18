"""Speed of the simulator: operations a second, warm, CPU time, best of seven.

Computes and transfers count once each. Prints ``name value unit target ok|MISSED`` for each row, ``-`` where there is
no target. Plans of 64 stages and 4,096 micro-batches unless the name says otherwise: one device per stage, warm-up
vectors of DAPPLE's policy A, stage times drawn once from a fixed seed, a transfer at every boundary in both directions.
The largest plan is simulated first: peak memory never falls, and the allocator then keeps what the other rows need.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
from chains import chain, star

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.improve.neighbourhood.batch import Catalogue
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import NetworkRules, Problem
from penstock.solvers.model.schedule import Orders, Pattern, PatternOperation, Row, Schedule
from penstock.solvers.model.unroll import unroll

REPETITIONS = 7
BULK = 2000
PLANS = 20_000
"""The target in plans a second that two cores simulate in bulk."""


def main() -> None:
    """Run every row."""
    simulate(*_case(4, 8, "full"))
    _peak_memory()
    full, shared, half = (_case(64, 4096, network) for network in ("full", "shared", "half"))
    _speed("starts, memory curves and use of every device, private full", simulate, full, 30)
    _speed("makespan, private full", makespan_ns, full, 100)
    _speed("the same, every curve kept", _with_curves, full, None)
    _speed("makespan, shared", makespan_ns, shared, 10)
    _speed("makespan, private half", makespan_ns, half, 30)
    _speed("starts, memory curves and use of every device, private half", simulate, half, 30)
    _speed("starts, memory curves and use of every device, shared", simulate, shared, None)
    _periodic()
    for stages, batches in ((16, 64), (64, 256)):
        for network in ("full", "shared"):
            case = _case(stages, batches, network)
            _speed(f"makespan, {network}, {stages} x {batches}", makespan_ns, case, None)
            _speed(f"everything, {network}, {stages} x {batches}", simulate, case, None)
    for network, target in (("none", PLANS), ("full", PLANS), ("half", PLANS), ("shared", PLANS)):
        _bulk(network, target)


Case = tuple[Problem, Allocation, Schedule]


def _speed(name: str, run: Callable[..., object], case: Case, target: int | None, rounds: int = 1) -> None:
    stages, batches = len(case[1].stages), case[1].num_micro_batches * rounds
    operations = 2 * stages * batches + 2 * (stages - 1) * batches
    run(*case)
    best = float("inf")
    for _ in range(REPETITIONS):
        began = time.process_time()
        run(*case)
        best = min(best, time.process_time() - began)
    _row(name, operations / best / 1e6, "Mops/s", target, target is None or operations / best / 1e6 >= target)


def _bulk(network: str, target: int) -> None:
    """Measure plans of 48 layers in 16 stages, 64 micro-batches, from rows of numbers.

    Each has different cuts and warm-ups.
    """
    draw = np.random.default_rng(1)
    forward = draw.integers(20_000, 50_000, 48)
    problem = _problem(forward, draw.integers(20_000, 120_000, 47), 64, network)
    catalogue = Catalogue(problem, 64)
    cuts = [np.sort(draw.choice(47, 15, replace=False)).tolist() for _ in range(BULK)]
    firsts = [[0, *(cut + 1 for cut in each), 48] for each in cuts]
    plans = [tuple(Stage(i, j - 1, (s,)) for s, (i, j) in enumerate(pairwise(each))) for each in firsts]
    rows = catalogue.rows(plans)
    warmups = np.sort(draw.integers(1, 33, (BULK, 16)), axis=1)[:, ::-1]
    catalogue.makespans_ns(rows, warmups)
    cpu, wall = float("inf"), float("inf")
    for _ in range(REPETITIONS):
        began = time.process_time()
        catalogue.makespans_ns(rows, warmups)
        cpu = min(cpu, time.process_time() - began)
        began = time.perf_counter()
        catalogue.makespans_ns(rows, warmups, threads=2)
        wall = min(wall, time.perf_counter() - began)
    _row(f"bulk, {network}, 16 x 64, a core", BULK / cpu, "plans/s", None, True)
    _row(f"bulk, {network}, 16 x 64, two threads", BULK / wall, "plans/s", target, BULK / wall >= target)


def _periodic() -> None:
    """Measure 1F1B without a flush, 32 x 512: unrolled once, then simulated; operations of all its rounds count."""
    problem, allocation, _orders = _case(32, 512, "full")
    pattern = _pattern(32)
    began = time.process_time()
    unrolled = unroll(problem, allocation, pattern, "weight_stashing")
    _row(f"unrolling {unrolled.rounds} rounds of 32 x 512", time.process_time() - began, "s", None, True)
    for rule in ("double_buffered", "weight_stashing"):
        for name, judge in (("makespan", makespan_ns), ("everything", simulate)):
            run = partial(judge, update_rule=rule)
            _speed(f"{name}, periodic, {rule}, 32 x 512", run, (problem, allocation, pattern), None, unrolled.rounds)


def _with_curves(problem: Problem, allocation: Allocation, orders: Orders) -> list[tuple[np.ndarray, np.ndarray]]:
    timeline = simulate(problem, allocation, orders)
    return [timeline.memory_curve(device) for device in timeline.uses]


def _peak_memory() -> None:
    case = _case(512, 8192, "full")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    timeline = simulate(*case)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert len(timeline.transfers.stage) == 2 * 511 * 8192
    _row("memory that judging 512 x 8192 adds", grown, "GiB", 1, grown <= 1)


def _row(name: str, value: float, unit: str, target: float | None, good: bool) -> None:
    verdict = "" if target is None else "ok" if good else "MISSED"
    print(f"{name:60s} {value:8.2f} {unit:7s} {'-' if target is None else target:>4} {verdict}".rstrip(), flush=True)


def _case(stages: int, batches: int, network: str) -> Case:
    draw = np.random.default_rng(0)
    forward = draw.integers(60_000, 140_000, stages)
    allocation = single_pipeline(tuple(Stage(s, s, (s,)) for s in range(stages)), batches)
    return (
        _problem(forward, draw.integers(20_000, 120_000, stages - 1), batches, network),
        allocation,
        _rows(allocation),
    )


def _problem(forward: np.ndarray, boundary: np.ndarray, batches: int, network: str) -> Problem:
    count = len(forward)
    channel: Literal["full", "half", "none"] = "half" if network == "half" else "none" if network == "none" else "full"
    servers = tuple(min(8, count - first) for first in range(0, count, 8))
    return chain(
        star(servers, 10**9, 2 * 10**9, form="ports"),
        forward,
        boundary,
        np.full(count, 1_000_000),
        batch=batches,
        sizes=(1,),
        rules=NetworkRules(network == "shared", channel, "madpipe", "flat", 25 * 10**6, True),
        stash_bytes=1000 * forward,
    )


def _pattern(count: int) -> Pattern:
    down = [PatternOperation(FORWARD, s, s % 3, s // 3) for s in range(count)]
    times = [count + 2 * (count - 1 - s) for s in range(count)]
    up = [PatternOperation(BACKWARD, s, t % 3, t // 3) for s, t in enumerate(times)]
    return Pattern("1f1b", 3, 1, (*down, *up))


def _rows(allocation: Allocation) -> Orders:
    count, batches = len(allocation.stages), allocation.num_micro_batches
    rows = []
    for s, stage in enumerate(allocation.stages):
        ahead = min(count - s, batches)
        steady = np.stack([np.arange(batches - ahead), np.arange(ahead, batches)], axis=1).reshape(-1)
        number = np.concatenate([np.arange(ahead), steady, np.arange(batches - ahead, batches)])
        kind = np.concatenate(
            [np.full(ahead, FORWARD), np.tile([BACKWARD, FORWARD], batches - ahead), np.full(ahead, BACKWARD)]
        )
        rows.append(Row(stage.devices, np.stack([kind, np.full(2 * batches, s), number], axis=1).astype(np.int32)))
    return Orders("dapple-A", tuple(rows), tuple(min(count - s, batches) for s in range(count)))


if __name__ == "__main__":
    main()

"""The quality of schedules of a given allocation, and the bounds proven for them (SOLVERS C, BOUNDS Part II).

Stages on separate devices, private half-duplex channels, equal or unequal times, with or without transfers; without
a memory limit, with the memory of 1F1B (S - s micro-batches on stage s), and with backwards in two parts in the memory
of S micro-batches on every stage. Each plan starts from the best usual order, which ``solvers.improve.order`` improves
with a counted effort. A plan is proven when the simulated time is the bound. CPU time, warm, and wall time. Prints
``name value unit target ok|MISSED``, ``-`` where there is no target. ``--quick``: one seed, nothing above (8, 32).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from chains import NO_BUCKETS, chain, star

from penstock.solvers.improve.order import optimise_order
from penstock.solvers.judge.simulate import makespan_ns, simulate
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import MemoryRules, NetworkRules, Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import depths, early_backward
from penstock.solvers.schedules.overtaking import overtaking

STASH = 10
SEEDS = 5
LARGE_SEEDS = 2


class Group(NamedTuple):
    """Plans of one kind: sizes, whether times differ, whether there are transfers, memory, effort, seeds, targets."""

    name: str
    stages: int
    batches: int
    unequal: bool
    transfers: bool
    memory: str
    effort: float
    seeds: int
    most_gap: float | None
    most_seconds: float | None


class Row(NamedTuple):
    """One optimised plan: the first order's time, the best time, the bound, seconds."""

    first_ns: int
    best_ns: int
    bound_ns: int
    cpu_s: float
    wall_s: float

    @property
    def gap(self) -> float:
        """The gap in percent of the bound."""
        return 100 * (self.best_ns / self.bound_ns - 1)


def groups() -> list[Group]:
    """Return the groups for schedule scope and zero bubble."""
    result = []
    for stages, batches in ((2, 4), (4, 8), (4, 16), (8, 16), (8, 32)):
        for unequal, transfers in ((False, False), (False, True), (True, False), (True, True)):
            seeds = SEEDS if unequal else 1
            result.append(Group("no limit", stages, batches, unequal, transfers, "none", 2.0, seeds, 0.0, 2.0))
    result.append(Group("no limit", 16, 64, True, True, "none", 10.0, LARGE_SEEDS, 0.05, 10.0))
    for stages, batches, seconds in ((4, 16, 5.0), (8, 16, 5.0), (8, 32, 15.0)):
        result.append(Group("S - s in flight", stages, batches, True, True, "1f1b", seconds, SEEDS, 0.0, seconds))
    result.append(Group("S - s in flight", 16, 64, True, True, "1f1b", 60.0, LARGE_SEEDS, 8.0, 60.0))
    result.append(Group("S - s in flight", 32, 128, True, True, "1f1b", 60.0, 1, None, None))
    result.append(Group("split, S in flight", 8, 16, False, False, "split", 10.0, 1, 0.0, 10.0))
    for stages, batches in ((4, 16), (8, 16), (8, 32)):
        for transfers in (False, True):
            result.append(Group("split, S in flight", stages, batches, True, transfers, "split", 10.0, 3, None, None))
    return result


def main() -> None:
    """Run all groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed, nothing above (8, 32)")
    quick = parser.parse_args().quick
    for memory in ("none", "1f1b", "split"):
        closed(Group("warm", 6, 30, True, True, memory, 1.0, 1, None, None), 0)
    for group in groups():
        if not quick or group.batches <= 32:
            report(group._replace(seeds=1) if quick else group)


def report(group: Group) -> None:
    """Improve the order of every plan of a group, and print the results."""
    rows = [closed(group, seed) for seed in range(group.seeds)]
    kind = f"{'unequal' if group.unequal else 'equal'} times{', transfers' if group.transfers else ''}"
    name = f"{group.name}, ({group.stages}, {group.batches}), {kind}, {len(rows)} plans"
    proven = sum(row.best_ns == row.bound_ns for row in rows)
    _print(f"{name}: proven", proven, "", len(rows) if group.most_gap == 0 else None, proven == len(rows))
    gap = max(row.gap for row in rows)
    _print(f"{name}: gap, most", gap, "%", group.most_gap, gap <= (group.most_gap or 0))
    seconds = max(row.cpu_s for row in rows)
    _print(f"{name}: seconds, most", seconds, "s", group.most_seconds, seconds <= (group.most_seconds or 0))
    _print(f"{name}: wall seconds, most", max(row.wall_s for row in rows), "s", None, True)
    gain = 100 * (1 - np.mean([row.best_ns / row.first_ns for row in rows]))
    _print(f"{name}: below the first order, mean", float(gain), "%", None, True)


def closed(group: Group, seed: int) -> Row:
    """Improve the order of one plan, from its best usual order."""
    problem, plan = instance(group, seed)
    orders = first_order(problem, plan, group.memory)
    value = makespan_ns(problem, plan, orders)
    wall, cpu = time.perf_counter(), time.process_time()
    optimised = optimise_order(problem, plan, orders, overlap=False, value_ns=value, effort=group.effort)
    spent = time.process_time() - cpu, time.perf_counter() - wall
    return Row(value, optimised.value_ns, optimised.bound.bound_ns, *spent)


def first_order(problem: Problem, plan: Allocation, memory: str) -> Orders:
    """Return the best usual order that fits."""
    if memory == "split":
        return overtaking(problem, plan)
    vectors = [[k, 2 * k - 1, 4 * k - 3] for k in depths(plan)]
    tried = [early_backward(problem, plan, warmup=[each[i] for each in vectors]) for i in range(3)]
    fitting = [orders for orders in tried if _fits(problem, plan, orders)]
    return min(fitting, key=lambda orders: makespan_ns(problem, plan, orders))


def _fits(problem: Problem, plan: Allocation, orders: Orders) -> bool:
    uses = simulate(problem, plan, orders).uses
    return all(use.memory.total <= problem.capacity_bytes(device) for device, use in uses.items())


def instance(group: Group, seed: int) -> tuple[Problem, Allocation]:
    """Return a problem and a plan of SOLVERS C.

    Forwards of 100 or 60 to 140, backwards twice as long or two parts, transfers of 60 or 20 to 120.
    """
    stages, draw = group.stages, np.random.default_rng(seed + 1000 * group.stages + group.batches)
    forward = draw.integers(60, 141, stages) if group.unequal else np.full(stages, 100)
    sent = draw.integers(20, 121, stages - 1) if group.unequal else np.full(stages - 1, 60)
    gradient, weight = forward.copy(), forward.copy()
    if group.memory == "split" and group.unequal:
        parts = np.random.default_rng(stages * group.batches + seed)
        gradient = (forward * parts.uniform(0.9, 1.3, stages)).astype(np.int64)
        weight = (forward * parts.uniform(0.6, 1.0, stages)).astype(np.int64)
    problem = chain(
        star((stages,), 10**9, 10**9),
        forward,
        sent if group.transfers else np.zeros(stages - 1, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        batch=group.batches,
        sizes=(1,),
        rules=NetworkRules(False, "half", "spp", "flat", NO_BUCKETS, False),
        backward_ns=gradient + weight,
        weight_ns=weight,
        stash_bytes=np.full(stages, STASH),
        memory=MemoryRules(1, 0, False, 0, False),
    )
    room: Callable[[int], int] = {
        "none": lambda s: group.batches,
        "1f1b": lambda s: stages - s,
        "split": lambda s: stages,
    }[group.memory]
    devices = tuple(replace(device, memory_bytes=STASH * room(s)) for s, device in enumerate(problem.devices))
    layers = tuple(Stage(s, s, (s,)) for s in range(stages))
    return replace(problem, devices=devices), single_pipeline(layers, group.batches)


def _print(name: str, value: float, unit: str, target: float | None, good: bool) -> None:
    shown = str(value) if isinstance(value, int) else f"{value:.3f}"
    verdict = "" if target is None else " ok" if good else " MISSED"
    print(f"{name} {shown} {unit} {'-' if target is None else target}{verdict}".replace("  ", " "), flush=True)


if __name__ == "__main__":
    main()

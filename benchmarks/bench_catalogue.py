"""Zero-bubble and V-shaped schedules: their makespans and peaks, and the overtaking generator with the same memory.

For each published schedule, ranks p, micro-batches m, equal or random costs, transfers of 0 or 0.1 of a forward: the
simulated makespan, the work of the busiest rank, the largest peak of a rank in micro-batches of a whole rank's stages
(1F1B's is p), and the best of the first orders of ``overtaking`` with exactly that peak as every rank's memory budget.
The published order itself is neither among its candidates nor a list that it starts from. Prints a row for each case,
then ``name value unit target ok|MISSED`` for the targets. ``--quick`` does p = 4 only.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from chains import chain, star

from penstock.solvers.judge.simulate import makespan_ns
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import MemoryRules, NetworkRules, Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.interleaved import interleaved, looped_bfs
from penstock.solvers.schedules.overtaking import found_overtaking
from penstock.solvers.schedules.support.chained import Chained
from penstock.solvers.schedules.v_shape import v_half, v_min, zb_v
from penstock.solvers.schedules.zero_bubble import zb_h1, zb_h2

UNIT = 1000
STASH = 1000
JUDGED = 12
PUBLISHED = {"zb-h1": zb_h1, "zb-h2": zb_h2, "zb-v": zb_v, "v-half": v_half, "v-min": v_min}


class Case(NamedTuple):
    """One comparison: makespans of the published order and of the generator's order."""

    name: str
    ranks: int
    number: int
    drawn: bool
    transfer_ns: int
    published_ns: int
    work_ns: int
    peak: float
    found_ns: int
    seconds: float


def main() -> None:
    """Run all cases, then print the sums."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only p = 4")
    arguments = parser.parse_args()
    _formulas()
    print("schedule p m costs transfer | published work peak | overtaking | seconds")
    cases = []
    for case in _cases((4,) if arguments.quick else (4, 8, 16), (8, 16, 32, 64)):
        costs = "drawn" if case.drawn else "equal"
        print(
            f"{case.name} {case.ranks} {case.number} {costs} {case.transfer_ns / UNIT:.1f} | {case.published_ns} "
            f"{case.work_ns} {case.peak:.2f} | {case.found_ns} | {case.seconds:.2f}",
            flush=True,
        )
        cases.append(case)
    _summary(cases)


def _formulas() -> None:
    """Compare spans of schedules for equal times with the formulas of ALGORITHMS 5.7, 7.5 and 7.6."""
    wrong = 0
    for p, m, v in ((4, 8, 2), (4, 64, 3), (8, 16, 2), (8, 64, 4), (16, 64, 2)):
        problem, allocation = _plan(p * v, p, m, False, 0, "loop")
        formula = 3 * UNIT * (m * v + p - 1)
        for generator in (interleaved, looped_bfs):
            wrong += makespan_ns(problem, allocation, generator(problem, allocation)) != formula
    print(f"interleaved and breadth first off their formula {wrong} plans 0 {'ok' if wrong == 0 else 'MISSED'}")


def _cases(ranks: tuple[int, ...], numbers: tuple[int, ...]) -> Iterator[Case]:
    for p in ranks:
        for m in numbers:
            for drawn in (False, True):
                for transfer_ns in (0, UNIT // 10):
                    for name in PUBLISHED:
                        if name != "zb-v" or m >= 2 * p:
                            yield _case(name, p, m, drawn, transfer_ns)


def _case(name: str, p: int, m: int, drawn: bool, transfer_ns: int) -> Case:
    shape = "line" if name.startswith("zb-h") else "v"
    stages = p if shape == "line" else 2 * p
    problem, allocation = _plan(stages, p, m, drawn, transfer_ns, shape)
    published = PUBLISHED[name](problem, allocation)
    chained = Chained(problem, allocation)
    peak = max(chained.peak_bytes(published))
    began = time.process_time()
    best_ns = _best(problem, allocation, published, peak)
    seconds = time.process_time() - began
    work = problem.costs(problem.devices[0].kind, 1)
    busy = [0] * p
    for stage in allocation.stages:
        i, j = stage.first, stage.last + 1
        busy[stage.devices[0]] += int(
            work.forward_ns[j] - work.forward_ns[i] + work.backward_ns[j] - work.backward_ns[i]
        )
    return Case(
        name,
        p,
        m,
        drawn,
        transfer_ns,
        makespan_ns(problem, allocation, published),
        m * max(busy),
        peak / STASH * p / stages,
        best_ns,
        seconds,
    )


def _best(problem: Problem, allocation: Allocation, published: Orders, peak: int) -> int:
    """Return the simulated makespan of the generator's best order without the published order; -1 if none fits."""
    room = [peak] * problem.num_devices
    candidates = found_overtaking(problem, allocation, room_bytes=room, excluded=published)
    chained = Chained(problem, allocation)
    fitting = [each.orders for each in candidates[:JUDGED] if chained.fits(each.orders, room)]
    return min((makespan_ns(problem, allocation, orders) for orders in fitting), default=-1)


def _summary(cases: list[Case]) -> None:
    longer = [case for case in cases if case.found_ns < 0 or case.found_ns > case.published_ns]
    uneven = [case for case in cases if case.drawn or case.transfer_ns]
    shorter = sum(0 <= case.found_ns < case.published_ns for case in uneven)
    mean = float(np.exp(np.mean([np.log(case.found_ns / case.published_ns) for case in cases if case.found_ns >= 0])))
    half = len(uneven) // 2
    good = "ok" if shorter >= half else "MISSED"
    print(f"longer than the published order {len(longer)} of-{len(cases)} 0 {'MISSED' if longer else 'ok'}")
    print(f"shorter with drawn costs or transfers {shorter} of-{len(uneven)} {half} {good}")
    print(f"geometric mean of the ratios {mean:.4f} - 1 {'ok' if mean <= 1 else 'MISSED'}")
    for name in PUBLISHED:
        group = [case for case in cases if case.name == name]
        signs = Counter(int(np.sign(case.found_ns - case.published_ns)) if case.found_ns >= 0 else 1 for case in group)
        ratio = float(np.exp(np.mean([np.log(c.found_ns / c.published_ns) for c in group if c.found_ns >= 0])))
        print(f"{name}: shorter {signs[-1]}, equal {signs[0]}, longer {signs[1]}, mean ratio {ratio:.3f}")


def _plan(stages: int, p: int, m: int, drawn: bool, transfer_ns: int, shape: str) -> tuple[Problem, Allocation]:
    """Build a problem and a plan with one layer a stage.

    Random costs are 0.7 to 1.3 of the unit, drawn for F, I and W separately; all stages' stashes are equal.
    """
    rng = random.Random(stages)
    forward, inputs, weights = (
        np.asarray([rng.randint(7 * UNIT // 10, 13 * UNIT // 10) if drawn else UNIT for _ in range(stages)])
        for _ in range(3)
    )
    place = {"line": lambda s: s, "v": lambda s: min(s, stages - 1 - s), "loop": lambda s: s % p}[shape]
    allocation = single_pipeline(tuple(Stage(s, s, (place(s),)) for s in range(stages)), m)
    problem = chain(
        star((p,), 10**9, 0),
        forward,
        np.full(stages - 1, transfer_ns, dtype=np.int64),
        np.zeros(stages, dtype=np.int64),
        batch=m,
        sizes=(1,),
        rules=NetworkRules(False, "full", "madpipe", "flat", 25_000_000, True),
        backward_ns=inputs + weights,
        weight_ns=weights,
        stash_bytes=np.full(stages, STASH),
        memory_bytes=2**40,
        memory=MemoryRules(1, 0, False, 0, False),
    )
    return problem, allocation


if __name__ == "__main__":
    main()

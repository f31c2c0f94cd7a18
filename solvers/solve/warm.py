"""A compilation of all numba kernels by solving a toy: ``python -m penstock.solvers.solve.warm`` at set-up and image
build.

The compiled kernels are kept on disk (``compiled.kept``), so that no user waits for the compiler.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple, get_args

import numpy as np

from penstock.schemas.machine.processors import available_processors
from penstock.solvers.bounds import suffix
from penstock.solvers.bounds.device_count.bound import bounds as count_devices
from penstock.solvers.compiled.kept import all_kept, declared, kept, note_all_kept, sole_compiler
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.grid.memory_cut import Demand
from penstock.solvers.improve import tabu
from penstock.solvers.improve.neighbourhood.batch import Catalogue
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.network import Cable, Inside, Network
from penstock.solvers.model.problem import Device, Measured, MemoryRules, NetworkRules, Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS, Planner
from penstock.solvers.planners.madpipe.chain import Chain
from penstock.solvers.planners.madpipe.labels import special_optimum
from penstock.solvers.planners.madpipe.paper import first_phase
from penstock.solvers.planners.wpipe.partition import partition
from penstock.solvers.solve.driver import solve

PLANS = 12
"""Plans simulated per planner during warm-up; enough to compile every kernel."""
REPORT_S = 5.0
"""Seconds between two reports of how many kernels are compiled."""


class WarmUp(NamedTuple):
    """A part of the warm-up; ``apart``: it may compile for minutes, and only its files on disk are of use."""

    run: Callable[[], object]
    apart: bool = False


def steps() -> Iterator[WarmUp]:
    """Yield short steps that load every kernel, after one that compiles those which are not on disk."""
    if not all_kept():
        yield WarmUp(warm, apart=True)
    yield from map(WarmUp, _toys())


def warm(*, backwards: bool = False) -> float:
    """Solve toys with every planner in each kind of network, lower and draw the plans; return the seconds taken."""
    started = time.perf_counter()
    for toy in reversed(_toys()) if backwards else _toys():
        toy()
    note_all_kept()
    return time.perf_counter() - started


def _toys() -> list[Callable[[], None]]:
    networks: tuple[tuple[bool, Literal["half", "full"]], ...] = ((True, "half"), (False, "half"), (False, "full"))
    toys: list[Callable[[], None]] = [_halves_too_large, _special_processor]
    for shared, channel in networks:
        problem = _toy(shared, channel)
        planners = [row for row in PLANNERS.values() if row.proposals is None or not row.target]
        toys += [partial(_planned, problem, row) for row in planners]
        toys += [partial(_suffixes, problem), partial(_in_bulk, problem)]
        toys.append(partial(_counted, problem))
    return toys


def main() -> None:
    """Compile every kernel that is not on disk, and report on standard error how many there are every few seconds."""
    started = time.perf_counter()
    with sole_compiler(lambda: _report("waiting for another installation that compiles the same kernels")):
        if not all_kept():
            _from_both_ends()
    cpu_s = sum(os.times()[:4])
    _report(f"{declared()} kernels are ready after {time.perf_counter() - started:.1f} s ({cpu_s:.0f} s of CPU)")


def _from_both_ends() -> None:
    """Start a second process with the last toys first, if there are processors for it; both fill the cache on disk."""
    other = os.fork() if available_processors() > 1 else None
    if other == 0:
        warm(backwards=True)
        os._exit(0)
    done = threading.Event()
    reporter = threading.Thread(target=_report_progress, args=(done,))
    reporter.start()
    try:
        warm()
        if other is not None:
            os.waitpid(other, 0)
    finally:
        done.set()
        reporter.join()


def _report_progress(done: threading.Event) -> None:
    """Report the number of compiled kernels every ``REPORT_S`` until ``done``."""
    total = declared()
    while not done.wait(REPORT_S):
        _report(f"{min(kept()[0], total)} of {total} kernels are compiled")


def _report(text: str) -> None:
    sys.stderr.write(f"kernels: {text}\n")


def _planned(problem: Problem, planner: Planner) -> None:
    best = solve(problem, planner.name, max_plans=PLANS).best
    if best is None:
        return
    if isinstance(best.schedule, Orders) and best.update_rule == "synchronous":
        tabu.improve(problem, best.allocation, best.schedule, steps=2)
    if isinstance(best.schedule, Orders) and len(best.allocation.pipelines) == 1:
        lower(problem, best.allocation, best.schedule)
    best.timeline.memory_curve(best.allocation.stages[0].devices[0])


def _counted(problem: Problem) -> None:
    count_devices(problem, 1, lambda _better: None)


def _suffixes(problem: Problem) -> None:
    suffix.prove(problem, _line(), NEVER_NS, 1000)


def _in_bulk(problem: Problem) -> None:
    in_bulk = Catalogue(problem, 4)
    rows = in_bulk.rows([_line().stages])
    in_bulk.makespans_ns(rows, in_bulk.limits(rows))
    in_bulk.bounds_ns(rows)


def _line() -> Allocation:
    return single_pipeline((Stage(0, 0, (0,)), Stage(1, 2, (1,)), Stage(3, 3, (2,))), 4)


def _special_processor() -> None:
    """Run MadPipe's label search and grid, because equal layers leave them nothing to search."""
    chain = Chain.of_layers(
        [1, 2, 1], [3, 4, 1], [1, 1, 1], [1, 1, 1, 1], bandwidth_bytes_per_s=10**10, memory_bytes=50, processors=2
    )
    special_optimum(chain)
    first_phase(chain)


def _toy(shared: bool, channel: Literal["half", "full"]) -> Problem:
    """Build a problem of four layers on two nodes of two devices."""
    layers, devices = 4, 4
    each = np.full(layers, 1000, dtype=np.int64)
    prefix = np.arange(layers + 1, dtype=np.int64) * 1000
    cuts = np.full(layers - 1, 100, dtype=np.int64)
    names = tuple(f"node{d // 2}/{d % 2}" for d in range(devices))
    inside = Inside("pairs", 10**10, 0, True)
    nodes = ("node0", "node1")
    return Problem(
        layer_names=tuple(f"layer{i}" for i in range(layers)),
        parameter_bytes=prefix,
        trainable_bytes=prefix,
        update_ns=prefix,
        forward_bytes=cuts,
        backward_bytes=cuts,
        boundary_tensors=tuple((("x", 100, 100),) for _ in range(layers - 1)),
        cuttable=np.ones(layers - 1, dtype=bool),
        shared_parameters=(),
        measured={"toy": (Measured(1, each, 2 * each, each, each, each),)},
        linear=True,
        kind_source={"toy": ("toy", 1.0)},
        devices=tuple(Device(names[d], d // 2, "toy", 10**9, 0, None) for d in range(devices)),
        network=Network(
            names, nodes, tuple(d // 2 for d in range(devices)), (inside, inside), (Cable(*nodes, 10**9, 1000, True),)
        ),
        global_batch_size=8,
        micro_batch_sizes=(1, 2),
        min_slice=1,
        memory=MemoryRules(1, 2, False, 0, True),
        rules=NetworkRules(shared, channel, "nic" if shared else "spp", "hierarchical", 25_000_000, True),
        recompute="auto",
        expected_error=0.1,
        update_rules=frozenset(get_args(UpdateRule)),
    )


def _halves_too_large() -> None:
    """Solve for two parts that each fit the device, but not together, in either place where they may meet."""
    time_ns = np.arange(4, dtype=np.int64)[None, :]
    demand = Demand(time_ns, 5 * time_ns[None, :, :])
    partition((demand, demand), np.full((1, 1), 10, dtype=np.int64))


if __name__ == "__main__":
    main()

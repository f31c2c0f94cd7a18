"""PipeDream's dynamic programs, warm: the paper's on levels of machines, and the one on placed devices.

Prints ``name value unit target ok|MISSED`` for each row, CPU seconds, the best of three.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from penstock.convert import to_problem
from penstock.examples.catalogue import cluster, profile
from penstock.schemas.request import PlanRequest
from penstock.solvers.grid.device_row import DeviceRow
from penstock.solvers.grid.row_partition import Settings, placed
from penstock.solvers.grid.slice_costs import Layers
from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.hetpipe.partitions import Partitions, groupings
from penstock.solvers.planners.pipedream.hierarchy import (
    Level,
    Rules,
    allocated,
    chain_of,
    device_order,
    levels_of,
    partition,
)
from penstock.solvers.solve.driver import solve

REPETITIONS = 3


def main() -> None:
    """Run every row; the row with a target comes first."""
    flat = request("resnet-101", "16x1xV100", 512)
    batch = batch_of(flat, 32)
    assert len(levels_of(flat)) == 1
    best_of("paper, ResNet-101, 16 flat devices", lambda: allocated(flat, batch, Rules()), 2.0)
    best_of("released, ResNet-101, 16 flat devices", lambda: allocated(flat, batch, Rules(released=True)), 2.0)
    best_of("placed, ResNet-101, 16 flat devices", lambda: on_devices(flat, 32), 2.0)
    best_of("planner, ResNet-101, 16 flat devices, every M", lambda: solve(flat, "pipedream"))
    stashing = replace(flat, update_rules=frozenset({"weight_stashing"}))
    best_of("planner without a flush", lambda: solve(stashing, "pipedream"))
    wide = request("bert-72", "8x8xV100", 1024)
    best_of("paper, BERT-72, 8 x 8 devices", lambda: allocated(wide, batch_of(wide, 16), Rules()))
    best_of("placed, BERT-72, 8 x 8 devices", lambda: on_devices(wide, 16))
    chain = chain_of(flat, batch)
    best_of("paper, ResNet-101, 64 machines in a row", lambda: partition(chain, (Level(64, 10**9),), Rules()))
    best_of("HetPipe, BERT-72, 8 x 8 devices, every grouping", lambda: workers(wide))


def request(model: str, shape: str, batch: int) -> Problem:
    """Return a shipped profile on a cluster of V100."""
    return to_problem(PlanRequest(profile=profile(model), topology=cluster(shape), global_batch_size=batch))


def on_devices(problem: Problem, rows: int) -> None:
    """Run the program on placed devices with its tables, for one number of micro-batches."""
    row = DeviceRow(problem, device_order(problem))
    placed(problem, row, Layers(problem), batch_of(problem, rows), Settings())


def workers(problem: Problem) -> None:
    """Partition all virtual workers, for one number of micro-batches."""
    partitions = Partitions(problem)
    for grouping in (*groupings(problem, "node"), *groupings(problem, "equal"), *groupings(problem, "hybrid")):
        partitions.allocation(grouping, batch_of(problem, 8), "one")


def best_of(name: str, run: Callable[[], object], target: float | None = None) -> None:
    """Print the CPU seconds of the quickest of some runs, after a first run that loads the compiled code."""
    run()
    seconds = []
    for _ in range(REPETITIONS):
        began = time.process_time()
        run()
        seconds.append(time.process_time() - began)
    quickest = min(seconds)
    verdict = "" if target is None else f" {target:.1f} {'ok' if quickest <= target else 'MISSED'}"
    print(f"{name} {quickest:.3f} s{verdict}", flush=True)


if __name__ == "__main__":
    main()

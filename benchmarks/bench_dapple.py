"""DAPPLE's search: how long it takes, and whether pruning keeps its value.

Prints ``name value unit target ok|MISSED`` for each row. Table V and the paper's other figures: ``papers/dapple.py``.
"""

from __future__ import annotations

import time

import numpy as np
from chains import chain, star, unequal

from penstock.solvers.model.micro_batches import Batch, batch_of
from penstock.solvers.model.problem import NetworkRules, Problem
from penstock.solvers.planners.dapple.search import Rules, search
from penstock.solvers.planners.dapple.tables import shape
from penstock.solvers.solve.driver import solve

REPETITIONS = 3


def main() -> None:
    """Measure speed first, then check that the value is the same without pruning."""
    _speed("search 60 layers x 16 devices (2x8)", _instance(60, (8, 8), 128), 8, 1.0)
    _speed("search 60 layers x 16 devices (16x1)", _instance(60, (1,) * 16, 128), 8, 1.0)
    _speed("search 50 layers x 32 devices (4x8)", _instance(50, (8,) * 4, 256), 8, 1.0)
    _speed("search 50 layers x 32 devices (32x1)", _instance(50, (1,) * 32, 256), 8, 1.0)
    _speed("search 50 layers x 64 devices (8x8)", _instance(50, (8,) * 8, 512), 8, 30.0)
    _speed("search 50 layers x 64 devices (64x1)", _instance(50, (1,) * 64, 512), 8, 30.0)
    for seed in range(4):
        _same_value(f"pruned = unpruned, 24 layers x 16 devices, seed {seed}", _instance(24, (8, 8), 64, seed))


def _speed(name: str, problem: Problem, micro_batches: int, target_s: float) -> None:
    """Measure the best of some runs of the search with its tables, warm.

    For one number of micro-batches and for a whole solve.
    """
    batch = batch_of(problem, problem.global_batch_size // micro_batches)
    base = shape(problem)
    search(problem, batch, None, base)
    best = min(_seconds(problem, batch) for _ in range(REPETITIONS))
    print(
        f"{name}, M = {batch.num_micro_batches} {best:.3f} s {target_s} {'ok' if best <= target_s else 'MISSED'}",
        flush=True,
    )
    began = time.process_time()
    solve(problem, "dapple")
    whole = time.process_time() - began
    print(f"{name}, planner dapple, every M {whole:.3f} s", flush=True)


def _seconds(problem: Problem, batch: Batch) -> float:
    began = time.process_time()
    search(problem, batch)
    return time.process_time() - began


def _same_value(name: str, problem: Problem) -> None:
    for micro_batches in (2, 8, 32):
        batch = batch_of(problem, problem.global_batch_size // micro_batches)
        base = shape(problem)
        values = [search(problem, batch, Rules(prune=prune), base).plans[0].latency_ns for prune in (True, False)]
        verdict = "ok" if values[0] == values[1] else "MISSED"
        print(f"{name}, M = {micro_batches} {values[0]} ns {values[1]} {verdict}", flush=True)


def _instance(layers: int, nodes: tuple[int, ...], batch: int, seed: int = 0) -> Problem:
    """Build a chain of unequal layers on servers of 25 GB/s inside and 3 GB/s between."""
    forward, sent, parameters = unequal(layers, seed)
    return chain(
        star(nodes, 25 * 10**9, 3 * 10**9),
        forward,
        sent,
        parameters,
        batch=batch,
        sizes=(),
        rules=NetworkRules(False, "half", "nic", "hierarchical", 25_000_000, True),
        stash_bytes=np.full(layers, sent.max()),
        memory_bytes=16 * 10**9,
        recompute="auto",
    )


if __name__ == "__main__":
    main()

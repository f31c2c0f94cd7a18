"""DAPPLE's search: how long it takes, and whether pruning keeps its value.

Prints ``name value unit target ok|MISSED`` for each row. Table V and the paper's other figures: ``papers/dapple.py``.
"""

from __future__ import annotations

import time

import numpy as np

from penstock.solvers.allocators.dapple.placement import POLICIES
from penstock.solvers.allocators.dapple.search import Rules, search
from penstock.solvers.allocators.dapple.tables import shape
from penstock.solvers.batches import Batch, batch_of
from penstock.solvers.network import Cable, Inside, Network
from penstock.solvers.problem import Device, Measured, MemoryRules, NetworkRules, Problem
from penstock.solvers.registry import PLANNERS

REPETITIONS = 3


def main() -> None:
    """Speed first, then the same value without pruning."""
    _speed("search 60 layers x 16 devices (2x8)", _instance(60, (8, 8), 128), 8, 1.0)
    _speed("search 60 layers x 16 devices (16x1)", _instance(60, (1,) * 16, 128), 8, 1.0)
    _speed("search 50 layers x 32 devices (4x8)", _instance(50, (8,) * 4, 256), 8, 1.0)
    _speed("search 50 layers x 32 devices (32x1)", _instance(50, (1,) * 32, 256), 8, 1.0)
    _speed("search 50 layers x 64 devices (8x8)", _instance(50, (8,) * 8, 512), 8, 30.0)
    _speed("search 50 layers x 64 devices (64x1)", _instance(50, (1,) * 64, 512), 8, 30.0)
    for seed in range(4):
        _same_value(f"pruned = unpruned, 24 layers x 16 devices, seed {seed}", _instance(24, (8, 8), 64, seed))


def _speed(name: str, problem: Problem, micro_batches: int, target_s: float) -> None:
    """Best of some runs of the search with its tables, warm, for one number of micro-batches and for a whole solve."""
    batch = batch_of(problem, problem.global_batch_size // micro_batches)
    base = shape(problem, POLICIES, False)
    search(problem, batch, None, base)
    best = min(_seconds(problem, batch) for _ in range(REPETITIONS))
    print(
        f"{name}, M = {batch.num_micro_batches} {best:.3f} s {target_s} {'ok' if best <= target_s else 'MISSED'}",
        flush=True,
    )
    began = time.process_time()
    PLANNERS["dapple"].solve(problem)
    whole = time.process_time() - began
    print(f"{name}, planner dapple, every M {whole:.3f} s", flush=True)


def _seconds(problem: Problem, batch: Batch) -> float:
    began = time.process_time()
    search(problem, batch)
    return time.process_time() - began


def _same_value(name: str, problem: Problem) -> None:
    for micro_batches in (2, 8, 32):
        batch = batch_of(problem, problem.global_batch_size // micro_batches)
        base = shape(problem, POLICIES, False)
        values = [search(problem, batch, Rules(prune=prune), base).plans[0].latency_ns for prune in (True, False)]
        verdict = "ok" if values[0] == values[1] else "MISSED"
        print(f"{name}, M = {micro_batches} {values[0]} ns {values[1]} {verdict}", flush=True)


def _instance(layers: int, nodes: tuple[int, ...], batch: int, seed: int = 0) -> Problem:
    """A chain of unequal layers on servers of 25 GB/s inside and 3 GB/s between."""
    draw = np.random.default_rng(seed)
    forward = np.exp(draw.normal(14.5, 0.4, layers)).astype(np.int64)
    parameters = np.exp(draw.normal(16.5, 0.6, layers)).astype(np.int64)
    boundary = np.exp(draw.normal(13.5, 0.3, layers - 1)).astype(np.int64)
    measured = Measured(1, forward, 2 * forward, forward, boundary.max() + 0 * forward, 0 * forward)
    names = tuple(f"n{i}/{j}" for i, size in enumerate(nodes) for j in range(size))
    hosts = tuple(f"n{i}" for i in range(len(nodes)))
    node_of = tuple(i for i, size in enumerate(nodes) for _ in range(size))
    network = Network(
        names,
        hosts,
        node_of,
        (Inside("pairs", 25 * 10**9, 0, True),) * len(nodes),
        tuple(Cable(host, "switch", 3 * 10**9, 0, True) for host in hosts),
    )
    prefix = np.concatenate(([0], np.cumsum(parameters)))
    return Problem(
        layer_names=tuple(f"layer{i}" for i in range(layers)),
        parameter_bytes=prefix,
        trainable_bytes=prefix,
        update_ns=np.zeros(layers + 1, dtype=np.int64),
        forward_bytes=boundary,
        backward_bytes=boundary,
        boundary_tensors=tuple((("x", int(b), int(b)),) for b in boundary),
        cuttable=np.ones(layers - 1, dtype=bool),
        shared_parameters=(),
        measured={"V100": (measured,)},
        linear=True,
        kind_source={"V100": ("V100", 1.0)},
        devices=tuple(Device(n, node_of[d], "V100", 16 * 10**9, 0, None) for d, n in enumerate(names)),
        network=network,
        global_batch_size=batch,
        micro_batch_sizes=(),
        min_slice=1,
        memory=MemoryRules(1, 2, False, 0, True),
        rules=NetworkRules(False, "half", "nic", "hierarchical", 25_000_000, True),
        recompute="auto",
        expected_error=0.0,
    )


if __name__ == "__main__":
    main()

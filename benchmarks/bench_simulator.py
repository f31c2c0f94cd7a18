"""Speed of the judge: operations a second (computes and transfers counted once each), warm, CPU time, best of five.

Prints ``name value unit target ok|MISSED`` for each row. Plans: one device per stage, warm-up vectors of DAPPLE's
policy A, stage times drawn once from a fixed seed, a transfer at every boundary in both directions.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Literal

import numpy as np

from penstock.schemas.program import BACKWARD, FORWARD
from penstock.solvers.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.network import Cable, Inside, Network
from penstock.solvers.problem import Device, Measured, MemoryRules, NetworkRules, Problem
from penstock.solvers.schedule import Orders, Row
from penstock.solvers.simulate import makespan_ns, simulate

REPETITIONS = 5


def main() -> None:
    """Run every row; the largest plan comes last, because peak memory never falls."""
    for stages, batches in ((16, 64), (64, 256), (64, 4096)):
        _speed("makespan only, private full", makespan_ns, _case(stages, batches, "full"), 100, stages, batches)
    for stages, batches in ((16, 64), (64, 256), (64, 4096)):
        _speed(
            "all starts and memory peaks, private full", simulate, _case(stages, batches, "full"), 30, stages, batches
        )
    _speed("the same with every memory curve", _with_curves, _case(64, 4096, "full"), 30, 64, 4096)
    for stages, batches in ((16, 64), (64, 256), (64, 4096)):
        _speed("all starts and memory peaks, shared", simulate, _case(stages, batches, "shared"), 10, stages, batches)
    _speed("all starts and memory peaks, private half", simulate, _case(64, 4096, "half"), 10, 64, 4096)
    _peak_memory()


Case = tuple[Problem, Allocation, Orders]


def _speed(name: str, run: Callable[..., object], case: Case, target: int, stages: int, batches: int) -> None:
    operations = 2 * stages * batches + 2 * (stages - 1) * batches
    run(*case)
    best = float("inf")
    for _ in range(REPETITIONS):
        began = time.process_time()
        run(*case)
        best = min(best, time.process_time() - began)
    _row(f"{name}, {stages} x {batches}", operations / best / 1e6, "Mops/s", target, operations / best / 1e6 >= target)


def _with_curves(problem: Problem, allocation: Allocation, orders: Orders) -> list[tuple[np.ndarray, np.ndarray]]:
    timeline = simulate(problem, allocation, orders)
    return [timeline.memory_curve(device) for device in timeline.uses]


def _peak_memory() -> None:
    case = _case(512, 8192, "full")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    timeline = simulate(*case)
    seconds = time.process_time() - began
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    _row("peak memory of simulate, 512 x 8192", grown, "GiB", 1, grown <= 1)
    operations = 2 * 512 * 8192 + len(timeline.transfers.stage)
    _row("speed of simulate, 512 x 8192", operations / seconds / 1e6, "Mops/s", 30, operations / seconds / 1e6 >= 30)


def _row(name: str, value: float, unit: str, target: float, good: bool) -> None:
    print(f"{name:58s} {value:8.2f} {unit:7s} {target:6g} {'ok' if good else 'MISSED'}", flush=True)


def _case(stages: int, batches: int, network: Literal["full", "half", "shared"]) -> Case:
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
    measured = Measured(1, forward, 2 * forward, forward, 1000 * forward, 0 * forward)
    names = tuple(f"n{i // 8}/{i % 8}" for i in range(count))
    hosts = tuple(f"n{i}" for i in range(-(-count // 8)))
    prefix = np.arange(count + 1, dtype=np.int64) * 1_000_000
    return Problem(
        layer_names=tuple(f"layer{i}" for i in range(count)),
        parameter_bytes=prefix,
        trainable_bytes=prefix,
        update_ns=0 * prefix,
        forward_bytes=boundary,
        backward_bytes=boundary,
        boundary_tensors=tuple((("x", int(b), int(b)),) for b in boundary),
        cuttable=np.ones(count - 1, dtype=bool),
        shared_parameters=(),
        measured={"gpu": (measured,)},
        linear=True,
        kind_source={"gpu": ("gpu", 1.0)},
        devices=tuple(Device(name, i // 8, "gpu", 2**50, 0, None) for i, name in enumerate(names)),
        network=Network(
            names,
            hosts,
            tuple(i // 8 for i in range(count)),
            (Inside("ports", 10**9, 0, True),) * len(hosts),
            tuple(Cable(host, "switch", 2 * 10**9, 0, True) for host in hosts),
        ),
        global_batch_size=batches,
        micro_batch_sizes=(1,),
        min_slice=1,
        memory=MemoryRules(1, 2, False, 0, True),
        rules=NetworkRules(
            network == "shared", "half" if network == "half" else "full", "madpipe", "flat", 25 * 10**6, True
        ),
        recompute="never",
        expected_error=0.0,
    )


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

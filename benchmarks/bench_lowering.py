"""Time and memory of lowering with its checks, and of the text of rows, at 1,024 ranks × 4,096 micro-batches.

Also for a periodic plan: the cost of 1,000 global batches in one program beyond 10. Prints
``name value unit target ok|MISSED`` for each row. Stages have one layer; early backward, policy A.
"""

from __future__ import annotations

import json
import resource
import time

from penstock.convert import to_problem
from penstock.schemas.profile import BoundaryTensor, Layer, LayerMeasurement, Measurement, ModelProfile, ProfileSource
from penstock.schemas.program import parse_row, print_row
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.lowering import lower, lower_arrays
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.periodic.eager import eager

RANKS, MICRO_BATCHES = 1024, 4096


def main() -> None:
    """Run every row; memory comes last, because its peak never falls."""
    _lower(*_case(8, 16, 1))
    for replicas in (1, 4):
        case = _case(RANKS // replicas, MICRO_BATCHES, replicas)
        name = f"{RANKS} ranks x {MICRO_BATCHES}, {replicas} per stage"
        _row(f"lowering and checks, {name}", _lower(*case), "s", 60)
    _periodic()
    _texts(_case(RANKS, MICRO_BATCHES, 1)[2])
    _row("peak memory of all this", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, "GiB", 4)


def _lower(problem: Problem, allocation: Allocation, orders: Orders) -> float:
    began = time.perf_counter()
    lower_arrays(problem, allocation, orders)
    return time.perf_counter() - began


def _periodic() -> None:
    """Measure PipeDream-2BW's order on 64 ranks with 64 micro-batches in a global batch.

    A long run is a short one with a loop.
    """
    problem, allocation, _ = _case(64, 64, 1)
    pattern = eager(problem, allocation, update_rule="double_buffered")
    took = {}
    for batches in (2, 10, 1000):
        began = time.process_time()
        programs = lower(problem, allocation, pattern, update_rule="double_buffered", batches=batches)
        took[batches] = time.process_time() - began, len(json.dumps([program.to_json() for program in programs]))
    _row("lowering of 1000 global batches x 64, against 10", took[1000][0] / took[10][0], "x", 1.5)
    _row("the text of 1000 global batches x 64, against 10", took[1000][1] / took[10][1], "x", 1.5)


def _texts(orders: Orders) -> None:
    rows = [list(map(tuple, row.operations.tolist())) for row in orders.rows[:: RANKS // 64]]
    began = time.perf_counter()
    texts = [print_row(row, s * (RANKS // 64)) for s, row in enumerate(rows)]
    printed = time.perf_counter()
    for s, text in enumerate(texts):
        parse_row(text, s * (RANKS // 64))
    parsed = time.perf_counter()
    _row(f"printing {RANKS} distinct rows x {MICRO_BATCHES} (64 of them, scaled)", 16 * (printed - began), "s", 60)
    _row(f"parsing {RANKS} distinct rows x {MICRO_BATCHES} (64 of them, scaled)", 16 * (parsed - printed), "s", 60)
    _row("their text (64 of them, scaled)", 16 * sum(map(len, texts)) / 1e6, "MB", 1)


def _row(name: str, value: float, unit: str, target: float) -> None:
    print(f"{name:62s} {value:8.2f} {unit:4s} {target:4g} {'ok' if value <= target else 'MISSED'}", flush=True)


def _case(num_stages: int, num_micro_batches: int, replicas: int) -> tuple[Problem, Allocation, Orders]:
    layer = LayerMeasurement(forward_ns=1000, backward_ns=2000, stash_bytes=1000)
    profile = ModelProfile(
        name="even",
        layers=tuple(Layer(name=f"layer{i}", parameter_bytes=1000) for i in range(num_stages)),
        boundaries=((BoundaryTensor(name="x", bytes_per_sample=8, gradient_bytes_per_sample=8),),) * (num_stages - 1),
        measurements=(Measurement(device_kind="gpu", micro_batch_size=1, layers=(layer,) * num_stages),),
        scaling="linear",
        source=ProfileSource(method="analytic", expected_error=0.0),
    )
    fabric = Fabric(bandwidth_bytes_per_s=10**9)
    cluster = UniformCluster(
        nodes=num_stages, devices_per_node=replicas, kind="gpu", memory_bytes=2**40, fabric=fabric, nic=fabric
    )
    request = PlanRequest(
        profile=profile,
        topology=ClusterTopology(name="even", uniform=cluster),
        global_batch_size=replicas * num_micro_batches,
        micro_batch_sizes=(replicas,),
    )
    problem = to_problem(request)
    stages = tuple(Stage(s, s, tuple(range(s * replicas, (s + 1) * replicas))) for s in range(num_stages))
    allocation = single_pipeline(stages, num_micro_batches)
    warmup = [min(num_stages - s, num_micro_batches) for s in range(num_stages)]
    return problem, allocation, early_backward(problem, allocation, warmup=warmup)


if __name__ == "__main__":
    main()

"""SPP's search: ordering of devices, partition for every number of stages, first call of a fresh process.

Prints ``name value unit target ok|MISSED`` for each row; CPU time. The partition rows include the tables, count every
number of stages that the table holds, and say how far the values of W may be from their floors. ``--long`` adds the
order of 1,024 devices on an arbitrary matrix.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import numpy as np
from chains import chain, star, unequal

from penstock.solvers.model.micro_batches import batch_of
from penstock.solvers.model.problem import NetworkRules, Problem
from penstock.solvers.planners.spp.ordering import Graph, device_order, graph_of, merged
from penstock.solvers.planners.spp.partition import pruned_replicas, search, stages_that_fit
from penstock.solvers.planners.spp.tables import chain_of, windows

MICRO_BATCHES = 32
FIRST_CALL = """
import time
from penstock.solvers.solve import warm
from penstock.solvers.solve.driver import solve
problem = warm._toy(True, "half")
began = time.process_time()
solve(problem, "spp")
print(time.process_time() - began)
"""


def main() -> None:
    """Measure order, partition and a fresh process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also order 1,024 devices on an arbitrary matrix")
    arguments = parser.parse_args()
    device_order(_matrix(8, 0))
    _order("order of 256 devices, any matrix", 256, 3.0)
    began = time.process_time()
    device_order(graph_of(_instance(2, (8,) * 128)))
    _row("order of 1,024 devices on 128 equal servers", time.process_time() - began, 60.0)
    _partition(20, (4, 4), 60.0)
    _partition(200, (8,) * 32, 2.0)
    _partition(500, (8,) * 128, 15.0)
    fresh = subprocess.run([sys.executable, "-c", FIRST_CALL], check=True, capture_output=True, text=True)
    _row("planner spp, first call of a fresh process", float(fresh.stdout), 1.0)
    if arguments.long:
        _order("order of 1,024 devices, any matrix", 1024, 300.0)


def _row(name: str, seconds: float, target: float, more: str = "") -> None:
    print(f"{name} {seconds:.3f} s {target} {'ok' if seconds <= target else 'MISSED'}{more}", flush=True)


def _order(name: str, devices: int, target: float) -> None:
    graph = _matrix(devices, 1)
    began = time.process_time()
    device_order(graph)
    _row(name, time.process_time() - began, target)


def _matrix(devices: int, seed: int) -> Graph:
    """Return a graph in which every link has a different bandwidth: nothing is equal, nothing contracts."""
    draw = np.triu(np.random.default_rng(seed).integers(10**9, 10**11, (devices, devices)), 1)
    return merged(draw + draw.T, [(d,) for d in range(devices)])


def _partition(layers: int, nodes: tuple[int, ...], target: float) -> None:
    problem = _instance(layers, nodes)
    devices = problem.num_devices
    counts = pruned_replicas(problem)
    most = stages_that_fit(layers, devices, len(counts))
    began = time.process_time()
    chain = chain_of(problem, windows(problem, range(devices)), batch_of(problem, devices), counts, most, unused=True)
    partitions = search(chain, most)
    seconds = time.process_time() - began
    gap = max((p.value_ns - 1 - p.floor_ns) / p.value_ns for p in partitions.values())
    exact = sum(p.exact for p in partitions.values())
    _row(
        f"partition of {layers} layers x {devices} devices into 1 to {max(partitions)} stages",
        seconds,
        target,
        f"; {len(counts)} replica counts, {exact} of {len(partitions)} exact, the others within {100 * gap:.3f} %",
    )


def _instance(layers: int, nodes: tuple[int, ...]) -> Problem:
    """Build a chain of unequal layers on servers of 25 GB/s inside and 3 GB/s between, in SPP's network."""
    forward, sent, parameters = unequal(layers, 0)
    devices = sum(nodes)
    return chain(
        star(nodes, 25 * 10**9, 3 * 10**9),
        forward,
        sent,
        parameters,
        batch=MICRO_BATCHES * devices,
        sizes=(devices,),
        rules=NetworkRules(False, "half", "spp", "flat", 25_000_000, False),
        stash_bytes=np.full(layers, sent.max()),
        memory_bytes=2**40,
    )


if __name__ == "__main__":
    main()

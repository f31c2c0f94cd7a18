"""The count of devices where devices are unlike and links are slow: what it proves, and in how much CPU time.

512 devices × 100 layers, M = 128 (``large_requests.py``). The devices are all H100 of 80 GiB, or the last two of each
four nodes have less memory, are slower by a factor, or both; then each device alone in its node, with a link of
25 Gbit/s. Prints a Markdown table with the load bound and, with ``--plans``, the time of ``spread``.
"""

from __future__ import annotations

import argparse
import time

from large_requests import GBIT, Size, request

from penstock.convert import to_problem
from penstock.schemas.profile import LayerMeasurement, Measurement, ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Link, Node
from penstock.solvers.bounds.device_count.bound import bounds
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.model.problem import Problem
from penstock.solvers.solve.driver import solve

NODES, ALONE = Size(2, 32, 100, 128, 32), Size(16, 32, 100, 128, 32)
SLOWER, SMALLER = 2.2, 40 * 2**30
CASES = {
    "alike": (NODES, False, False),
    "half with 40 GiB": (NODES, True, False),
    "half 2.2 times as slow": (NODES, False, True),
    "half with 40 GiB and 2.2 times as slow": (NODES, True, True),
    "alike, alone at 25 Gbit/s": (ALONE, False, False),
    "half with 40 GiB and 2.2 times as slow, alone at 25 Gbit/s": (ALONE, True, True),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", action="store_true", help="plan each request, too")
    plans = parser.parse_args().plans
    print(
        "| 512 devices × 100 layers | load bound, s | count of devices, s | CPU s | spread, s |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for name, (size, small, slow) in CASES.items():
        problem = _problem(size, small=small, slow=slow)
        known_ns = request_bound(problem).bound_ns
        bounds(problem, known_ns, lambda _: None)  # compiles
        before = time.process_time()
        proven = bounds(problem, known_ns, lambda _: None)
        took = time.process_time() - before
        best = solve(problem, "spread").best if plans else None
        planned = f"{best.value_ns / 1e9:.2f}" if best is not None else ""
        print(f"| {name} | {known_ns / 1e9:.2f} | {proven.bound_ns / 1e9:.2f} | {took:.2f} | {planned} |", flush=True)


def _problem(size: Size, *, small: bool, slow: bool) -> Problem:
    base = request(size, planner="spread")
    topology = _second_half(base.topology, small=small, slow=slow)
    return to_problem(
        PlanRequest(
            profile=_with_slower(base.profile) if slow else base.profile,
            topology=_alone(topology) if size is ALONE else topology,
            global_batch_size=base.global_batch_size,
            micro_batch_sizes=base.micro_batch_sizes,
            planner="spread",
        )
    )


def _with_slower(profile: ModelProfile) -> ModelProfile:
    """Return the profile measured on a second kind, too."""
    measurement = profile.measurements[0]
    layers = tuple(
        LayerMeasurement(
            forward_ns=int(layer.forward_ns * SLOWER),
            backward_ns=int(layer.backward_ns * SLOWER),
            stash_bytes=layer.stash_bytes,
            workspace_bytes=layer.workspace_bytes,
        )
        for layer in measurement.layers
    )
    slower = Measurement(device_kind="slower", micro_batch_size=measurement.micro_batch_size, layers=layers)
    return profile.model_copy(update={"measurements": (measurement, slower)})


def _second_half(topology: ClusterTopology, *, small: bool, slow: bool) -> ClusterTopology:
    """Return the cluster with the last two of each four nodes smaller, slower or both."""

    def changed(node: Node) -> Node:
        other = ({"memory_bytes": SMALLER} if small else {}) | ({"kind": "slower"} if slow else {})
        return node.model_copy(update={"devices": tuple(device.model_copy(update=other) for device in node.devices)})

    nodes = tuple(changed(node) if number % 4 >= 2 else node for number, node in enumerate(topology.nodes))
    return topology.model_copy(update={"nodes": nodes})


def _alone(topology: ClusterTopology) -> ClusterTopology:
    """Return the cluster with the first device of each node, with a link of 25 Gbit/s."""
    names = {node.name for node in topology.nodes}

    def narrow(link: Link) -> Link:
        return link.model_copy(update={"bandwidth_bytes_per_s": 25 * GBIT}) if link.a in names else link

    nodes = tuple(node.model_copy(update={"fabric": None, "devices": node.devices[:1]}) for node in topology.nodes)
    return topology.model_copy(update={"nodes": nodes, "links": tuple(map(narrow, topology.links))})


if __name__ == "__main__":
    main()

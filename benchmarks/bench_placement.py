"""The time of a 1,024-GPU placement over 4,096 free devices, and its quality: CPU and wall seconds.

``python benchmarks/bench_placement.py [--quick]``. Llama-3 70B (82 layers), global batches of 2,048 samples. H100
nodes of eight in trees of two and three levels with oversubscribed switches, some of them busy at random (seed 0);
``--quick`` has a quarter of the nodes.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from typing import Any

from penstock.examples import catalogue
from penstock.placing import place
from penstock.schemas.api.placement import Placement
from penstock.schemas.topology import ClusterTopology, Link

GBIT = 10**9 // 8
NIC = 8 * 400 * GBIT
BATCH = 2048


def tree(levels: int, nodes: int, *, per_leaf: int = 32, leaves_per_pod: int = 6) -> ClusterTopology:
    """Build nodes below leaves, below pods with three levels; each level upwards has half of the bandwidth below it."""
    expanded = catalogue.cluster(f"{nodes}x8xH100").expanded()
    names = [node.name for node in expanded.nodes]
    links, switches = [], ["core"]
    leaves = [names[at : at + per_leaf] for at in range(0, nodes, per_leaf)]
    for number, members in enumerate(leaves):
        leaf, above = f"leaf{number}", "core"
        if levels == 3:
            above = f"pod{number // leaves_per_pod}"
            if above not in switches:
                switches.append(above)
                links.append(_link("core", above, per_leaf * leaves_per_pod * NIC // 4))
        switches.append(leaf)
        links.append(_link(above, leaf, len(members) * NIC // 2))
        links += [_link(leaf, name, NIC) for name in members]
    update = {"name": f"{nodes}x8 in {levels} levels", "switches": tuple(switches), "links": tuple(links)}
    return expanded.model_copy(update=update)


def _link(a: str, b: str, bandwidth: int) -> Link:
    return Link(a=a, b=b, bandwidth_bytes_per_s=bandwidth, latency_ns=1_000)


def timed(topology: ClusterTopology, free: int, **more: Any) -> tuple[Placement, float, float]:
    """Place a job with ``free`` nodes free; return its CPU seconds, children included, and wall seconds too."""
    names = [node.name for node in topology.nodes]
    busy = random.Random(0).sample(names, len(names) - free)
    started, used = time.monotonic(), _cpu_s()
    placement = place("llama-3-70b", topology, global_batch_size=BATCH, busy=busy, **more)
    return placement, _cpu_s() - used, time.monotonic() - started


def _cpu_s() -> float:
    each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in each)


def show(what: str, placement: Placement, cpu_s: float, wall_s: float) -> None:
    """Print a line of the table."""
    step = "–" if placement.time_per_global_batch_ns is None else f"{placement.time_per_global_batch_ns / 1e9:.2f} s"
    classes = f"{placement.planned} of {placement.considered}"
    print(f"| {what} | {len(placement.nodes)} | {classes} | {step} | {cpu_s:.1f} | {wall_s:.1f} |", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    share = 4 if parser.parse_args().quick else 1
    all_nodes, free, wanted = 576 // share, 512 // share, 128 // share
    print(f"{free} of {all_nodes} nodes free, {wanted} nodes wanted at most\n")
    print("| question | nodes | classes planned | step | CPU s | wall s |\n|---|--:|--:|--:|--:|--:|")
    timed(tree(2, 8), 4, nodes={"min": 4})
    for levels in (2, 3):
        topology = tree(levels, all_nodes)
        exactly = {"min": wanted, "max": wanted}
        show(f"{levels} levels, exactly {wanted} nodes", *timed(topology, free, nodes=exactly))
        show(f"{levels} levels, up to {wanted} nodes", *timed(topology, free, nodes={"max": wanted}))
    per_device = {"objective": "throughput_per_device", "nodes": {"max": wanted}}
    show(f"3 levels, up to {wanted}, per device", *timed(topology, free, **per_device))
    budget = {"time_per_global_batch_ns": 100 * share * 10**9}
    deadline = {"objective": "fastest_within_budget", "budget": budget, "nodes": {"max": wanted}}
    show(f"3 levels, a step within {100 * share} s", *timed(topology, free, **deadline))


if __name__ == "__main__":
    main()

"""The ranks of a plan in a Ray cluster: ``ray job submit --working-dir . -- python ray_job.py``.

``launch.json``, next to this script, has the nodes and resources of the plan. A placement group gets one bundle per
node, in the order of the stages, and in each bundle the node's ranks run as processes of `penstock rank`. Penstock is
needed where ranks run.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

HERE = Path(__file__).resolve().parent
STOP_S = 120
POLL_S = 0.5
TELL_S = 30


def main() -> None:
    """Reserve the nodes, start their ranks, and wait; exit code 1 when one fails."""
    launch = json.loads((HERE / "launch.json").read_text(encoding="utf-8"))
    bundle = (HERE / "job.json").read_text(encoding="utf-8")
    ray.init()
    nodes = launch["nodes"]
    group = placement_group(
        bundles=[node["resources"] for node in nodes],
        strategy="STRICT_SPREAD",
        name=launch["name"],
        bundle_label_selector=selectors(launch),
    )
    try:
        while not group.wait(TELL_S):
            sys.stderr.write(f"waiting until Ray has free, each on a node of its own: {wanted(nodes)}\n")
        address = ray.get(meeting_place.options(**placed(group, nodes, 0)).remote(launch["port"]))
        stored = ray.put(bundle)
        left = [
            run_node.options(**placed(group, nodes, number)).remote(launch, number, stored, address)
            for number in range(len(nodes))
        ]
        while left:
            done, left = ray.wait(left)
            ray.get(done)
    finally:
        remove_placement_group(group)


def selectors(launch: dict[str, Any]) -> list[dict[str, str]] | None:
    """Return the node that each bundle wants; None where any node will do. Ends the script with the missing nodes."""
    if launch["any_nodes"]:
        return None
    ids = {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    missing = [node["name"] for node in launch["nodes"] if node["name"] not in ids]
    if missing:
        sys.exit(f"the plan runs on {', '.join(missing)}, and Ray has only {', '.join(sorted(ids))}")
    return [{"ray.io/node-id": ids[node["name"]]} for node in launch["nodes"]]


def wanted(nodes: list[dict[str, Any]]) -> str:
    """Describe how many nodes of which resources the plan needs."""
    kinds = Counter(", ".join(f"{count} {name}" for name, count in node["resources"].items()) for node in nodes)
    return "; ".join(f"{number} times {kind}" for kind, number in kinds.items())


def placed(group: Any, nodes: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """Return the options of a task that has the whole bundle of a node."""
    bundle = nodes[number]["resources"]
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    return {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "scheduling_strategy": strategy}


@ray.remote(max_retries=0)
def meeting_place(port: int | None) -> tuple[str, int]:
    """Return the address of this node, and the requested port or a free one."""
    with socket.socket() as probe:
        probe.bind(("", port or 0))
        return get_node_ip_address(), probe.getsockname()[1]


@ray.remote(max_retries=0)
def run_node(launch: dict[str, Any], number: int, bundle: str, address: tuple[str, int]) -> None:
    """Run a node's ranks to their end; the first that fails ends the others. Raises RuntimeError naming it."""
    node = launch["nodes"][number]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.json"
        path.write_text(bundle, encoding="utf-8")
        command = [*launch["command"], "rank", str(path), "--node", node["name"], *launch["options"]]
        started = {}
        try:
            for local, rank in enumerate(node["ranks"]):
                variables = {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(len(node["ranks"])),
                    "WORLD_SIZE": str(sum(len(other["ranks"]) for other in launch["nodes"])),
                    "MASTER_ADDR": address[0],
                    "MASTER_PORT": str(address[1]),
                }
                started[rank] = subprocess.Popen(command, env=os.environ | launch["environment"] | variables)
            while any(process.poll() is None for process in started.values()):
                refuse_failed(started)
                time.sleep(POLL_S)
            refuse_failed(started)
        finally:
            stop(list(started.values()))


def refuse_failed(started: dict[int, subprocess.Popen[bytes]]) -> None:
    """Raise RuntimeError naming the ranks that ended with an error."""
    failed = [f"rank {rank} ended with {process.returncode}" for rank, process in started.items() if process.poll()]
    if failed:
        raise RuntimeError("; ".join(failed))


def stop(processes: list[subprocess.Popen[bytes]]) -> None:
    """Request running ranks to save and end, and end them after a while."""
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.terminate()
    until = time.monotonic() + STOP_S
    for process in running:
        try:
            process.wait(max(until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()

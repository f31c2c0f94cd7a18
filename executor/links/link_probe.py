"""Bandwidth and latency between local gloo processes, measured as pipelines use them: tagged sends of whole tensors.

Pairs of processes play ping-pong with messages of growing size, all pairs at once;
`penstock.executor.links.link_fit` fits bandwidth and latency to their times.

Started for each rank as ``python -m penstock.executor.links.link_probe RANK SIZE ADDRESS``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from penstock.executor.links.link_fit import fit
from penstock.schemas.errors import InvalidDocument, RunFailed
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster

SIZES_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_ROUNDS = 20
_TIMEOUT = timedelta(seconds=60)


class LinkMeasurement(NamedTuple):
    """What one pair of processes reaches; ``one_way_ns`` holds the median of each message size in bytes."""

    bandwidth_bytes_per_s: int
    latency_ns: int
    one_way_ns: dict[int, int]

    def fabric(self) -> Fabric:
        """As a node's fabric: a channel between any two of its processes."""
        return Fabric(form="pairs", bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_ns=self.latency_ns)


def measure_links(
    processes: int = 2, *, rounds: int = _ROUNDS, progress: Callable[[str], None] | None = None
) -> LinkMeasurement:
    """Measure pairs of ``processes`` local processes at once. Raises RunFailed when a process does not come through."""
    if processes < 2 or processes % 2:
        raise InvalidDocument(f"links are measured between pairs of processes; {processes} is an odd number")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    command = [sys.executable, "-m", "penstock.executor.links.link_probe"]
    threads = os.environ | {"OMP_NUM_THREADS": "1"}
    if progress is not None:
        progress(f"measuring links between {processes} processes")
    children = [
        subprocess.Popen(
            [*command, str(rank), str(processes), str(store.port), str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=threads,
            text=True,
        )
        for rank in range(processes)
    ]
    times: dict[int, list[int]] = {}
    try:
        for rank, child in enumerate(children):
            out, err = child.communicate(timeout=_TIMEOUT.total_seconds())
            if child.returncode:
                last = " | ".join(err.strip().splitlines()[-3:])
                raise RunFailed(f"link process {rank} ended with exit code {child.returncode}: {last}")
            for size, one_way_ns in json.loads(out).items():
                times.setdefault(int(size), []).append(one_way_ns)
    except subprocess.TimeoutExpired:
        raise RunFailed(f"the link processes did not finish within {_TIMEOUT.total_seconds():g} s") from None
    finally:
        for child in children:
            child.kill()
            child.wait()
    medians = {size: round(statistics.median(found)) for size, found in sorted(times.items())}
    bandwidth_bytes_per_s, latency_ns = fit(medians)
    return LinkMeasurement(bandwidth_bytes_per_s, latency_ns, medians)


def measured_cluster(
    link: LinkMeasurement,
    *,
    nodes: int,
    devices_per_node: int,
    memory_bytes: int,
    kind: str = "cpu",
    name: str = "measured",
    node_names: str = "node{}",
) -> ClusterTopology:
    """A topology of equal hosts whose processes reach each other as ``link`` says, inside a host and between hosts.

    From host to host it is two links, each with half of the latency.
    """
    half_way = link._replace(latency_ns=link.latency_ns // 2)
    return ClusterTopology(
        name=name,
        uniform=UniformCluster(
            nodes=nodes,
            devices_per_node=devices_per_node,
            kind=kind,
            memory_bytes=memory_bytes,
            fabric=link.fabric() if devices_per_node > 1 else None,
            nic=half_way.fabric() if nodes > 1 else None,
            node_names=node_names,
        ),
        assumptions=("links measured between processes of one machine",),
        links_from="measured",
    )


def _ping_pong(rank: int, sizes: Sequence[int], rounds: int) -> dict[int, int]:
    peer = rank ^ 1
    medians = {}
    for size in sizes:
        message = torch.zeros(size, dtype=torch.uint8)
        taken = []
        for number in range(rounds + 2):
            start = time.perf_counter_ns()
            for sends in (True, False) if rank < peer else (False, True):
                if sends:
                    distributed.isend(message, peer, tag=number).wait()  # type: ignore[union-attr]
                else:
                    distributed.irecv(message, peer, tag=number).wait()  # type: ignore[union-attr]
            taken.append((time.perf_counter_ns() - start) // 2)
        medians[size] = round(statistics.median(taken[2:]))
    return medians


def _main(rank: int, size: int, port: int, rounds: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    medians = _ping_pong(rank, SIZES_BYTES, rounds)
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.write(json.dumps(medians))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:5]))

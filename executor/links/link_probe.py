"""Bandwidth and latency between local gloo processes, measured as pipelines use them: tagged sends of whole tensors.

Pairs of processes exchange messages of growing size in ping-pong, all pairs at once.
`penstock.executor.links.link_fit` fits bandwidth and latency to their times.

Each rank is started as ``python -m penstock.executor.links.link_probe RANK RANKS STORE ROUNDS``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import distributed

from penstock.executor.links.link_fit import fit
from penstock.executor.links.local_ranks import join, leave, measured_here
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import ClusterTopology, Fabric, MeasuredCollective, UniformCluster

SIZES_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
_ROUNDS = 20


class LinkMeasurement(NamedTuple):
    """The measurement of a pair of processes; ``one_way_ns`` holds the median of each message size in bytes."""

    bandwidth_bytes_per_s: int
    latency_ns: int
    one_way_ns: dict[int, int]

    def fabric(self) -> Fabric:
        """Return it as a node's fabric: a channel between any two of its processes."""
        return Fabric(form="pairs", bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, latency_ns=self.latency_ns)


def measure_links(
    processes: int = 2, *, rounds: int = _ROUNDS, progress: Callable[[str], None] | None = None
) -> LinkMeasurement:
    """Measure pairs of ``processes`` local processes at once. Raises RunFailed when a process fails."""
    if processes < 2 or processes % 2:
        raise InvalidDocument(f"links are measured between pairs of processes; {processes} is an odd number")
    if progress is not None:
        progress(f"measuring links between {processes} processes")
    times: dict[int, list[int]] = {}
    for output in measured_here("penstock.executor.links.link_probe", processes, str(rounds)):
        for size, one_way_ns in json.loads(output).items():
            times.setdefault(int(size), []).append(one_way_ns)
    medians = {size: round(statistics.median(each)) for size, each in sorted(times.items())}
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
    collectives: tuple[MeasuredCollective, ...] | None = None,
) -> ClusterTopology:
    """Build a topology of equal hosts whose processes reach each other over ``link``, also between hosts.

    A path between hosts consists of two links, each with half of the latency.
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
        assumptions=(f"links{' and collectives' if collectives else ''} measured between processes of one machine",),
        links_from="measured",
        collectives=collectives,
    )


def _ping_pong(rank: int, sizes: Sequence[int], rounds: int) -> dict[int, int]:
    peer = rank ^ 1
    medians = {}
    for size in sizes:
        message = torch.zeros(size, dtype=torch.uint8)
        times = []
        for number in range(rounds + 2):
            start = time.perf_counter_ns()
            for sends in (True, False) if rank < peer else (False, True):
                if sends:
                    distributed.isend(message, peer, tag=number).wait()  # type: ignore[union-attr]
                else:
                    distributed.irecv(message, peer, tag=number).wait()  # type: ignore[union-attr]
            times.append((time.perf_counter_ns() - start) // 2)
        medians[size] = round(statistics.median(times[2:]))
    return medians


def _main(rank: int, ranks: int, store: str, rounds: int) -> None:
    join(rank, ranks, store)
    medians = _ping_pong(rank, SIZES_BYTES, rounds)
    leave()
    sys.stdout.write(json.dumps(medians))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

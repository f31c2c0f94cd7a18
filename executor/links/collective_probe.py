"""Times of collectives, by operation, span and size: over gloo, in a process per device.

Collectives of one size run one after another; their total time on the slowest rank, divided by their number, counts.
Groups are the first 2, 4, … and all devices of each node (all nodes at once), the first device of each node, and all
devices.

Each rank is started as ``python -m penstock.executor.links.collective_probe RANK RANKS STORE NODES``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, get_args

import torch
from torch import distributed

from penstock.executor.links.local_ranks import join, leave, measured_here
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.topology import MeasuredCollective
from penstock.schemas.transformers.degrees import Operation

SIZES_BYTES = (1 << 14, 1 << 18, 1 << 22)
MOST_RANKS = 64
_BATCHES = 5
_IN_A_BATCH = 3
_FLOAT_BYTES = 4


class Span(NamedTuple):
    """The devices of each node that take part, and the number of nodes."""

    devices_per_node: int
    nodes: int


def spans(devices_per_node: int, nodes: int) -> list[Span]:
    """Return the spans to measure on a cluster of equal nodes."""
    doubled = [1 << power for power in range(1, devices_per_node.bit_length())]
    inside = [Span(devices, 1) for devices in sorted({*doubled, devices_per_node}) if devices > 1]
    if nodes == 1:
        return inside
    return [*inside, *dict.fromkeys([Span(1, nodes), Span(devices_per_node, nodes)])]


def measure_collectives(
    devices_per_node: int, nodes: int, *, progress: Callable[[str], None] | None = None
) -> tuple[MeasuredCollective, ...]:
    """Measure with a local process for each device. Raises InvalidDocument for too few or too many."""
    refuse_ranks(devices_per_node, nodes)
    ranks = devices_per_node * nodes
    if progress is not None:
        progress(f"measuring collectives among {ranks} processes")
    outputs = measured_here("penstock.executor.links.collective_probe", ranks, str(nodes))
    return rows_of(json.loads(each) for each in outputs)


def refuse_ranks(devices_per_node: int, nodes: int) -> None:
    """Raise InvalidDocument for a single device, which has no collectives, and above ``MOST_RANKS`` devices."""
    if not 2 <= devices_per_node * nodes <= MOST_RANKS:
        raise InvalidDocument(
            f"collectives can be measured among 2 to {MOST_RANKS} devices, not {nodes * devices_per_node} "
            f"(nodes × devices per node: {nodes} × {devices_per_node})",
            remedy="give fewer nodes or devices: the times also apply to groups of this size in larger clusters",
        )


def rows_of(outputs: Iterable[Sequence[Sequence[Any]]]) -> tuple[MeasuredCollective, ...]:
    """Build the rows of a topology from the output of all ranks: the median over batches of the slowest rank's time."""
    batches: dict[tuple[Any, ...], list[list[int]]] = {}
    for output in outputs:
        for *row, times in output:
            batches.setdefault(tuple(row), []).append(times)
    return tuple(
        MeasuredCollective(
            operation=operation,
            devices_per_node=devices_per_node,
            nodes=nodes,
            size_bytes=size_bytes,
            time_ns=max(1, round(statistics.median(map(max, zip(*times, strict=True))))),
        )
        for (operation, devices_per_node, nodes, size_bytes), times in sorted(batches.items())
    )


# ---- in a rank -------------------------------------------------------------------------------------------------------


def _measured(rank: int, devices_per_node: int, nodes: int) -> Iterator[tuple[Any, ...]]:
    """Yield operation, span, size and the times of all batches of the groups that the rank is in."""
    for span in spans(devices_per_node, nodes):
        groups = [(distributed.new_group(members), members) for members in _groups(span, devices_per_node, nodes)]
        distributed.barrier()
        for group, members in groups:
            if rank in members:
                for operation, size in product(get_args(Operation), SIZES_BYTES):
                    collective = _Collective(group, members, rank, operation, size)
                    yield (operation, *span, collective.size_bytes, collective.batches())


def _groups(span: Span, devices_per_node: int, nodes: int) -> list[list[int]]:
    """Return the ranks of each node's first devices, or the ranks of all nodes together."""
    each = [[node * devices_per_node + place for place in range(span.devices_per_node)] for node in range(nodes)]
    return each if span.nodes == 1 else [[rank for ranks in each for rank in ranks]]


class _Collective:
    """One operation of one size in one group, on fp32; sizes are defined as in ``MeasuredCollective``."""

    def __init__(self, group: Any, members: list[int], rank: int, operation: Operation, size_bytes: int) -> None:
        n, self.group, self.members, self.at = len(members), group, members, members.index(rank)
        part = -(-size_bytes // (n * _FLOAT_BYTES))
        self.operation, self.size_bytes = operation, part * n * _FLOAT_BYTES
        self.part, self.whole, self.other = torch.zeros(part), torch.zeros(part * n), torch.zeros(part * n)

    def batches(self) -> list[int]:
        """Return the time of one collective in each batch, after a batch that does not count."""
        run: Callable[[], None] = getattr(self, f"_{self.operation}")
        times = []
        for _ in range(_BATCHES + 1):
            distributed.barrier(self.group)
            start = time.perf_counter_ns()
            for _ in range(_IN_A_BATCH):
                run()
            times.append((time.perf_counter_ns() - start) // _IN_A_BATCH)
        return times[1:]

    def _all_reduce(self) -> None:
        distributed.all_reduce(self.whole, group=self.group)

    def _all_gather(self) -> None:
        distributed.all_gather_single(self.whole, self.part, group=self.group)

    def _reduce_scatter(self) -> None:
        distributed.reduce_scatter_single(self.part, self.whole, group=self.group)

    def _all_to_all(self) -> None:
        distributed.all_to_all_single(self.other, self.whole, group=self.group)

    def _send(self) -> None:
        after = self.members[(self.at + 1) % len(self.members)]
        before = self.members[self.at - 1]
        sent = distributed.isend(self.whole, after, group=self.group)
        received = distributed.irecv(self.other, before, group=self.group)
        for work in (sent, received):
            assert work is not None
            work.wait()


def _main(rank: int, ranks: int, store: str, nodes: int) -> None:
    join(rank, ranks, store)
    rows = list(_measured(rank, ranks // nodes, nodes))
    leave()
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

"""Times of collectives, by operation, span and size: over gloo, in a process per device.

Collectives of one size run one after another; what one took is that time by their number, on the slowest rank. Groups
are the first 2, 4, … and all devices of each node (all nodes at once), the first device of each node, and all devices.

Started for each rank as ``python -m penstock.executor.links.collective_probe RANK RANKS STORE NODES``.
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
    """How many devices of each node take part, and of how many nodes."""

    devices_per_node: int
    nodes: int


def spans(devices_per_node: int, nodes: int) -> list[Span]:
    """Return what is measured on a cluster of equal nodes."""
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
    found = measured_here("penstock.executor.links.collective_probe", ranks, str(nodes))
    return rows_of(json.loads(each) for each in found)


def refuse_ranks(devices_per_node: int, nodes: int) -> None:
    """Raise InvalidDocument for a single device, which has no collectives, and for more than are measured."""
    if not 2 <= devices_per_node * nodes <= MOST_RANKS:
        raise InvalidDocument(
            f"collectives are measured among 2 to {MOST_RANKS} devices; {nodes} × {devices_per_node} are "
            f"{nodes * devices_per_node}",
            remedy="fewer nodes or devices; what is measured of some counts for groups of that size in larger clusters",
        )


def rows_of(outputs: Iterable[Sequence[Sequence[Any]]]) -> tuple[MeasuredCollective, ...]:
    """Return the rows of a topology from what all ranks wrote: of each batch the slowest rank, the median of these."""
    batches: dict[tuple[Any, ...], list[list[int]]] = {}
    for output in outputs:
        for *row, taken in output:
            batches.setdefault(tuple(row), []).append(taken)
    return tuple(
        MeasuredCollective(
            operation=operation,
            devices_per_node=devices_per_node,
            nodes=nodes,
            size_bytes=size_bytes,
            time_ns=max(1, round(statistics.median(map(max, zip(*taken, strict=True))))),
        )
        for (operation, devices_per_node, nodes, size_bytes), taken in sorted(batches.items())
    )


# ---- in a rank -------------------------------------------------------------------------------------------------------


def _measured(rank: int, devices_per_node: int, nodes: int) -> Iterator[tuple[Any, ...]]:
    """Yield operation, span, size and the times of all batches of the groups that the rank is in."""
    for span in spans(devices_per_node, nodes):
        made = [(distributed.new_group(members), members) for members in _groups(span, devices_per_node, nodes)]
        distributed.barrier()
        for group, members in made:
            if rank in members:
                for operation, size in product(get_args(Operation), SIZES_BYTES):
                    own = _Collective(group, members, rank, operation, size)
                    yield (operation, *span, own.size_bytes, own.batches())


def _groups(span: Span, devices_per_node: int, nodes: int) -> list[list[int]]:
    """Return the ranks of each node's first devices, or those of all nodes together."""
    each = [[node * devices_per_node + place for place in range(span.devices_per_node)] for node in range(nodes)]
    return each if span.nodes == 1 else [[rank for own in each for rank in own]]


class _Collective:
    """One operation of one size in one group, on fp32; sizes are those that ``MeasuredCollective`` has."""

    def __init__(self, group: Any, members: list[int], rank: int, operation: Operation, size_bytes: int) -> None:
        n, self.group, self.members, self.at = len(members), group, members, members.index(rank)
        part = -(-size_bytes // (n * _FLOAT_BYTES))
        self.operation, self.size_bytes = operation, part * n * _FLOAT_BYTES
        self.part, self.whole, self.other = torch.zeros(part), torch.zeros(part * n), torch.zeros(part * n)

    def batches(self) -> list[int]:
        """Return what one collective took in each batch, after one that does not count."""
        run: Callable[[], None] = getattr(self, f"_{self.operation}")
        taken = []
        for _ in range(_BATCHES + 1):
            distributed.barrier(self.group)
            start = time.perf_counter_ns()
            for _ in range(_IN_A_BATCH):
                run()
            taken.append((time.perf_counter_ns() - start) // _IN_A_BATCH)
        return taken[1:]

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
    found = list(_measured(rank, ranks // nodes, nodes))
    leave()
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))

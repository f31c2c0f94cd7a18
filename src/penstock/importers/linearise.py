"""A dataflow graph as a topological chain, in which every position is a possible cut (design, section 4).

Unlike PipeDream's antichains or the merging of parallel branches, no node is merged: a tensor with later readers
crosses every cut between its writer and its last reader, hop by hop.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

from penstock.schemas.errors import InvalidDocument


class Tensor(NamedTuple):
    """Output number ``output`` of node ``writer``."""

    writer: int
    output: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Numbered nodes; ``outputs[node][k]`` lists the readers of output k, ``output_bytes[node][k]`` is its size."""

    name: str
    outputs: dict[int, tuple[tuple[int, ...], ...]]
    output_bytes: dict[int, tuple[int, ...]]


def linearise(graph: Dataflow) -> tuple[list[int], list[list[Tensor]]]:
    """Return the nodes in topological order, and for each cut the tensors that cross it, oldest writer first.

    Kahn's algorithm; of the nodes that are ready the smallest number comes first, which is the order in which a
    profiler met them. O((V + E) log V + crossing tensors). Raises InvalidDocument naming the nodes of a cycle.
    """
    after = {node: sorted({reader for readers in outs for reader in readers}) for node, outs in graph.outputs.items()}
    waits = dict.fromkeys(after, 0)
    for readers in after.values():
        for reader in readers:
            waits[reader] += 1
    ready = [node for node, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(node := heapq.heappop(ready))
        for reader in after[node]:
            waits[reader] -= 1
            if waits[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(after):
        cycle = _cycle(after, {node for node, count in waits.items() if count})
        raise InvalidDocument(
            f"the edges of {graph.name!r} form a cycle: {' -- '.join(f'node{node}' for node in cycle)}; "
            "a profile cannot have cycles"
        )
    return order, _crossing(graph, order)


def _crossing(graph: Dataflow, order: list[int]) -> list[list[Tensor]]:
    position = {node: i for i, node in enumerate(order)}
    cuts: list[list[Tensor]] = [[] for _ in order[1:]]
    for i, node in enumerate(order):
        for k, (readers, size) in enumerate(zip(graph.outputs[node], graph.output_bytes[node], strict=True)):
            last = max((position[reader] for reader in readers), default=i)
            for cut in range(i, last):
                cuts[cut].append(Tensor(node, k, size))
    return cuts


def _cycle(after: dict[int, list[int]], stuck: set[int]) -> list[int]:
    before: dict[int, int] = {}
    for node in sorted(stuck):
        for reader in after[node]:
            if reader in stuck:
                before.setdefault(reader, node)
    node, seen = min(before), list[int]()
    while node not in seen:
        seen.append(node)
        node = before[node]
    return [node, *reversed(seen[seen.index(node) :])]

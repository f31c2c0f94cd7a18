"""Cost of transferring a micro-batch between two stages, and the resources that it uses (ALGORITHMS 1.5)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import CODEC_HEADER_BYTES
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import slice_bounds
from penstock.solvers.model.problem import NetworkRules, Problem


def transfer_ns(size_bytes: int, bandwidth_bytes_per_s: int) -> int:
    """Return ``ceil(bytes × 1e9 / bandwidth)``, exact; 0 for 0 bytes, never-ending for bandwidth 0."""
    if size_bytes == 0:
        return 0
    if bandwidth_bytes_per_s == 0:
        return NEVER_NS
    return -(-size_bytes * 1_000_000_000 // bandwidth_bytes_per_s)


def transfers_ns(sizes: np.ndarray, bandwidth_bytes_per_s: int) -> np.ndarray:
    """Return ``transfer_ns`` of every entry, int64 of the same shape; each distinct size is computed once."""
    each, places = np.unique(sizes, return_inverse=True)
    times = [transfer_ns(size, bandwidth_bytes_per_s) for size in each.tolist()]
    return np.asarray(times, dtype=np.int64)[places].reshape(sizes.shape)


class Transfer(NamedTuple):
    """The transfer of one micro-batch over one edge in one direction: its duration and its resources."""

    duration_ns: int
    resources: tuple[int, ...]
    bytes: int


def boundary_bytes(problem: Problem, cut: int, rows: int, direction: int) -> int:
    """Return the bytes of ``rows`` samples over the cut after layer ``cut``; direction 0 forward, 1 backward."""
    per_sample = problem.forward_bytes if direction == 0 else problem.backward_bytes
    return int(per_sample[cut]) * rows


def message_bytes(problem: Problem, cut: int, rows: int, direction: int, *, coded: bool) -> int:
    """Return the bytes sent for ``rows`` samples, one message per tensor; encoding halves them and adds a header."""
    size = boundary_bytes(problem, cut, rows, direction)
    if not coded or size == 0:
        return size
    encodable, tensors = problem.encodable[cut]
    return size - min(size, encodable * rows) // 2 + CODEC_HEADER_BYTES * tensors


def transfer(problem: Problem, allocation: Allocation, stage: int, rows: int, direction: int) -> Transfer | None:
    """Return the transfer of a micro-batch of ``rows`` from ``stage`` to its next (0) or previous (1) stage.

    Return None where nothing is sent: no such stage, zero bytes, or both sides on the same single device.
    """
    other = allocation.next(stage) if direction == 0 else allocation.previous(stage)
    if other is None:
        return None
    source, target = allocation.stages[stage], allocation.stages[other]
    cut = source.last if direction == 0 else target.last
    size = message_bytes(problem, cut, rows, direction, coded=source.coded[1 - direction])
    same_way = source.dispatch == target.dispatch or source.replicas == 1
    if size == 0 or (source.devices == target.devices and same_way):
        return None
    mode = "nic" if problem.rules.shared else problem.rules.transfer
    if mode == "nic":
        return _nic_transfer(problem, source, target, rows, direction)
    return Transfer(_paper_transfer_ns(problem, source.devices, target.devices, size, mode), (), size)


def channels(rules: NetworkRules, resources: tuple[int, ...], edge: int, direction: int) -> tuple[int, ...]:
    """Return the resources that a transfer takes: its ``resources`` in a shared network, or its edge's private channel.

    Edges are numbered by the stage before them.
    """
    if rules.shared:
        return resources
    return {"half": (edge,), "full": (2 * edge + direction,), "none": ()}[rules.channel]


def round_trips_ns(
    problem: Problem, cuts: Sequence[int], source: tuple[int, ...], target: tuple[int, ...], rows: int
) -> np.ndarray:
    """Return (n,) int64: the round-trip time of a micro-batch over each cut, between ``source`` and ``target``.

    Values are at most ``NEVER_NS``; cuts with the same number of bytes are computed once.
    """
    sizes = [(int(problem.forward_bytes[cut]), int(problem.backward_bytes[cut])) for cut in cuts]
    cut_of = dict(zip(sizes, cuts, strict=True))
    times = {size: _round_trip_ns(problem, cut, source, target, rows) for size, cut in cut_of.items()}
    return np.asarray([times[size] for size in sizes], dtype=np.int64)


def _round_trip_ns(problem: Problem, cut: int, source: tuple[int, ...], target: tuple[int, ...], rows: int) -> int:
    pair = single_pipeline((Stage(0, cut, source), Stage(cut + 1, problem.num_layers - 1, target)), 1)
    moves = transfer(problem, pair, 0, rows, 0), transfer(problem, pair, 1, rows, 1)
    return min(NEVER_NS, sum(0 if move is None else move.duration_ns for move in moves))


@lru_cache(maxsize=2**13)
def _nic_transfer(problem: Problem, source: Stage, target: Stage, rows: int, direction: int) -> Transfer | None:
    """Return the transfer in mode ``nic``: each resource carries the row slices of all replica pairs that use it."""
    cut, coded = (source.last if direction == 0 else target.last), source.coded[1 - direction]
    size = message_bytes(problem, cut, rows, direction, coded=coded)
    per_sample = size // rows
    load: dict[int, int] = {}
    latency = 0
    for u, v, count in row_pairs(source, target, rows):
        if u == v:
            continue
        route = problem.network.route(u, v)
        if route is None:
            return Transfer(NEVER_NS, (), size)
        latency = max(latency, route.latency_ns)
        amount = message_bytes(problem, cut, count, direction, coded=True) if coded else count * per_sample
        for resource in route.resources:
            load[resource] = load.get(resource, 0) + amount
    if not load:
        return None
    slowest = max(transfer_ns(amount, problem.network.resources[r].bandwidth_bytes_per_s) for r, amount in load.items())
    return Transfer(latency + slowest, tuple(sorted(load)), size)


def row_pairs(source: Stage, target: Stage, rows: int) -> list[tuple[int, int, int]]:
    """Return (sending device, receiving device, rows) of one micro-batch: the slices' intersections (DAPPLE V-B2).

    With round-robin dispatch on a side, the whole micro-batch goes through one replica; the pair with the widest
    spread of devices is not known here, so the first replica represents all.
    """
    receivers = _holders(target, rows)
    pairs = []
    begin = 0
    for u, low, high in _holders(source, rows):
        while begin < len(receivers) and receivers[begin][2] <= low:
            begin += 1
        for v, other_low, other_high in islice(receivers, begin, None):
            if other_low >= high:
                break
            count = min(high, other_high) - max(low, other_low)
            if count > 0:
                pairs.append((u, v, count))
    return pairs


def _holders(stage: Stage, rows: int) -> list[tuple[int, int, int]]:
    if stage.dispatch == "round_robin":
        return [(stage.devices[0], 0, rows)]
    return [(device, *slice_bounds(rows, stage.replicas, i)) for i, device in enumerate(stage.devices)]


def _paper_transfer_ns(problem: Problem, source: Sequence[int], target: Sequence[int], size: int, mode: str) -> int:
    network = problem.network
    pairs = [(u, v) for u in source for v in target if u != v]
    narrowest = min(network.bandwidth(u, v) for u, v in pairs)
    if mode == "spp":
        return transfer_ns(size, narrowest * len(source) * len(target))
    if mode == "madpipe":
        return transfer_ns(size, narrowest)
    inside = len(network.nodes_of(target)) == 1
    if inside:
        outside = sum(network.node_of[u] != network.node_of[target[0]] for u in source)
        if outside == 0:
            return transfer_ns(size, narrowest)
        slowest = min(network.bandwidth(u, v) for u, v in pairs if network.node_of[u] != network.node_of[v])
        return transfer_ns(-(-size * outside // len(source)), slowest)
    return transfer_ns(size, narrowest)

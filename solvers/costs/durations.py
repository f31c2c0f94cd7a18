"""What stages, transfers, all-reduces and updates cost in time: the one place where bytes become nanoseconds.

ALGORITHMS 1.4 (stage time), 1.5 (transfers), 1.6 (ring all-reduce), 1.8 (recomputation).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from penstock.schemas.program import CODEC_HEADER_BYTES
from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.network import Network
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.slices import largest_slice, slice_bounds

UNREACHABLE_NS = 2**62
"""Duration of a transfer between devices that nothing connects; no makespan reaches it."""


def transfer_ns(size_bytes: int, bandwidth_bytes_per_s: int) -> int:
    """``ceil(bytes × 1e9 / bandwidth)``, exact; nothing takes no time, no bandwidth takes for ever."""
    if size_bytes == 0:
        return 0
    if bandwidth_bytes_per_s == 0:
        return UNREACHABLE_NS
    return -(-size_bytes * 1_000_000_000 // bandwidth_bytes_per_s)


class StageCosts(NamedTuple):
    """One stage, one micro-batch, its slowest replica: times in ns, what stays alive from F to B, workspace.

    ``kept_bytes`` has the input of each recomputed segment, but for a stage's own input where that counts as a receive
    buffer. An input is a whole cut: profiles do not tell that two cuts carry the same tensor.
    """

    forward_ns: int
    backward_ns: int
    weight_ns: int
    recompute_ns: int
    kept_bytes: int
    workspace_bytes: int


class Transfer(NamedTuple):
    """One micro-batch over one edge in one direction: how long, and on which resources."""

    duration_ns: int
    resources: tuple[int, ...]
    bytes: int


class Bucket(NamedTuple):
    """A part of a stage's gradients: layers [first, last], ready ``lead_ns`` before the last backward ends."""

    first: int
    last: int
    bytes: int
    lead_ns: int
    duration_ns: int
    resources: tuple[int, ...]


def stage_rows(stage: Stage, rows: int) -> int:
    """Rows that the busiest replica computes of a micro-batch of ``rows``."""
    return rows if stage.dispatch == "round_robin" else largest_slice(rows, stage.replicas)


def stage_costs(problem: Problem, stage: Stage, rows: int) -> StageCosts:
    """Costs of a micro-batch of ``rows`` samples on the stage's slowest device (its largest slice)."""
    share = stage_rows(stage, rows)
    kinds = {problem.devices[d].kind for d in stage.devices}
    each = [_slice_costs(problem, stage, kind, share) for kind in sorted(kinds)]
    return StageCosts(*(max(column) for column in zip(*each, strict=True)))


def _slice_costs(problem: Problem, stage: Stage, kind: str, rows: int) -> StageCosts:
    costs = problem.costs(kind, rows)
    coding = conversion_ns(problem, stage, kind, rows)
    i, j = stage.first, stage.last + 1
    kept = int(costs.stash_bytes[j] - costs.stash_bytes[i])
    workspace = int(costs.workspace_bytes[i:j].max())
    again, rebuilt = 0, 0
    for first, last in stage.recompute:
        part = int(costs.stash_bytes[last + 1] - costs.stash_bytes[first])
        again += int(costs.forward_ns[last + 1] - costs.forward_ns[first])
        kept -= part
        if first > i or not problem.memory.count_buffers:
            kept += input_bytes(problem, first, rows)
        rebuilt = max(rebuilt, part)
    return StageCosts(
        int(costs.forward_ns[j] - costs.forward_ns[i]) + coding[0],
        int(costs.backward_ns[j] - costs.backward_ns[i]) + coding[1],
        int(costs.weight_ns[j] - costs.weight_ns[i]),
        again,
        kept,
        workspace + rebuilt,
    )


def input_bytes(problem: Problem, first: int, rows: int) -> int:
    """What ``rows`` samples bring over the cut before layer ``first``; 0 for the model's own input, whose size no
    profile has.
    """
    return int(problem.forward_bytes[first - 1]) * rows if first > 0 else 0


def recomputed_inputs(problem: Problem, stage: Stage, rows: int) -> int:
    """The inputs of the stage's recomputed segments that ``kept_bytes`` has."""
    own = not problem.memory.count_buffers
    return sum(input_bytes(problem, first, rows) for first, _last in stage.recompute if own or first > stage.first)


def update_ns(problem: Problem, stage: Stage) -> int:
    """One optimizer step over the stage's layers."""
    return int(problem.update_ns[stage.last + 1] - problem.update_ns[stage.first])


def boundary_bytes(problem: Problem, cut: int, rows: int, direction: int) -> int:
    """Bytes of ``rows`` samples over the cut after layer ``cut``; direction 0 forward, 1 backward."""
    per_sample = problem.forward_bytes if direction == 0 else problem.backward_bytes
    return int(per_sample[cut]) * rows


def message_bytes(problem: Problem, cut: int, rows: int, direction: int, *, coded: bool) -> int:
    """What travels of ``rows`` samples in one message per tensor; an encoded one has half the bytes and a header."""
    size = boundary_bytes(problem, cut, rows, direction)
    if not coded or size == 0:
        return size
    encodable, tensors = problem.encodable[cut]
    return size - min(size, encodable * rows) // 2 + CODEC_HEADER_BYTES * tensors


def conversion_ns(problem: Problem, stage: Stage, kind: str, rows: int) -> tuple[int, int]:
    """What encoding and decoding ``rows`` samples adds to a stage's forward and to its backward (WPipe, appendix A.3).

    On an encoded edge a forward decodes what it reads or encodes what it makes, a backward the other way round.
    """
    before, behind = stage.coded
    if not (before or behind):
        return 0, 0
    speed, (_, faster) = problem.codec_speeds[kind], problem.kind_source[kind]
    incoming = problem.encodable[stage.first - 1][0] * rows if before else 0
    outgoing = problem.encodable[stage.last][0] * rows if behind else 0
    rates = int(speed.encode_bytes_per_s * faster), int(speed.decode_bytes_per_s * faster)
    forward = transfer_ns(outgoing, rates[0]) + transfer_ns(incoming, rates[1])
    return forward, transfer_ns(incoming, rates[0]) + transfer_ns(outgoing, rates[1])


def transfer(problem: Problem, allocation: Allocation, stage: int, rows: int, direction: int) -> Transfer | None:
    """The transfer of a micro-batch of ``rows`` from ``stage`` to its next (0) or previous (1) stage.

    None where nothing travels: no such stage, zero bytes, or both sides on the same single device.
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


@lru_cache(maxsize=2**13)
def _nic_transfer(problem: Problem, source: Stage, target: Stage, rows: int, direction: int) -> Transfer | None:
    """Mode ``nic``: the row slices of all replica pairs, each resource carrying what passes through it."""
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
            return Transfer(UNREACHABLE_NS, (), size)
        latency = max(latency, route.latency_ns)
        amount = message_bytes(problem, cut, count, direction, coded=True) if coded else count * per_sample
        for resource in route.resources:
            load[resource] = load.get(resource, 0) + amount
    if not load:
        return None
    slowest = max(transfer_ns(amount, problem.network.resources[r].bandwidth_bytes_per_s) for r, amount in load.items())
    return Transfer(latency + slowest, tuple(sorted(load)), size)


def row_pairs(source: Stage, target: Stage, rows: int) -> list[tuple[int, int, int]]:
    """(sending device, receiving device, rows) of one micro-batch: the intersections of the slices (DAPPLE V-B2).

    With round-robin dispatch on a side, the whole micro-batch goes through one replica; the pair with the widest
    spread of devices is not known here, so the first replica stands for all.
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


def all_reduce_ns(problem: Problem, size_bytes: int, devices: Sequence[int]) -> int:
    """Ring all-reduce of ``size_bytes`` over ``devices`` (SPP equation 1; hierarchical over nodes)."""
    k = len(devices)
    if k == 1 or size_bytes == 0:
        return 0
    network = problem.network
    mode = problem.rules.all_reduce
    nodes = network.nodes_of(devices)
    if mode == "hierarchical" and 1 < len(nodes) < k:
        return _hierarchical_ns(problem, size_bytes, devices)
    if mode == "dapple" and len(nodes) == 1:
        return transfer_ns(2 * (k - 1) * size_bytes, k * network.min_bandwidth(devices) * (k // 2))
    return _ring(network, devices).all_reduce_ns(size_bytes)


class Ring(NamedTuple):
    """Devices, their narrowest bandwidth, and the longest latency from one to the next."""

    size: int
    bytes_per_s: int
    latency_ns: int

    def all_reduce_ns(self, size_bytes: int, lanes: int = 1) -> int:
        """Of so many bytes, shared by ``lanes`` rings side by side."""
        moved = transfer_ns(2 * (self.size - 1) * size_bytes, self.size * lanes * self.bytes_per_s)
        return moved + 2 * (self.size - 1) * self.latency_ns


def _hierarchical_ns(problem: Problem, size_bytes: int, devices: Sequence[int]) -> int:
    insides, outside, lanes = _rings(problem.network, tuple(devices))
    return max((ring.all_reduce_ns(size_bytes) for ring in insides), default=0) + outside.all_reduce_ns(
        size_bytes, lanes
    )


@lru_cache(maxsize=2**12)
def _rings(network: Network, devices: tuple[int, ...]) -> tuple[tuple[Ring, ...], Ring, int]:
    """The unlike rings within nodes, the ring of one device of each node, and how many of these run side by side."""
    groups: dict[int, list[int]] = {}
    for device in devices:
        groups.setdefault(network.node_of[device], []).append(device)
    insides = dict.fromkeys(_ring(network, group) for group in groups.values() if len(group) > 1)
    lanes = min(len(group) for group in groups.values()) if all(network.has_own_nic[d] for d in devices) else 1
    return tuple(insides), _ring(network, [group[0] for group in groups.values()]), lanes


def _ring(network: Network, devices: Sequence[int]) -> Ring:
    latency = max(_latency(network, u, v) for u, v in network.ring(devices))
    return Ring(len(devices), network.min_bandwidth(devices), latency)


def _latency(network: Network, u: int, v: int) -> int:
    route = network.route(u, v)
    return 0 if route is None else route.latency_ns


def buckets(problem: Problem, stage: Stage, rows: int) -> tuple[Bucket, ...]:
    """The stage's gradients in buckets, last layers first, as the last backward makes them ready.

    ``rows``: size of the last micro-batch, whose backward readies them. Without overlap every bucket is ready
    only when that backward has ended (``lead_ns`` 0).
    """
    if stage.replicas == 1:
        return ()
    costs = problem.costs(problem.devices[stage.devices[0]].kind, stage_rows(stage, rows))
    resources = ring_resources(problem, stage.devices) if problem.rules.shared else ()
    held = bucket_bytes(problem, stage.first, stage.last)
    made: list[Bucket] = []
    high = stage.last
    for low in range(stage.last, stage.first - 1, -1):
        size = int(held[high + 1] - held[low])
        if size >= problem.rules.bucket_bytes or (low == stage.first and size > 0):
            lead = int(costs.backward_ns[low] - costs.backward_ns[stage.first])
            if not problem.rules.overlap_all_reduce:
                lead = 0
            made.append(Bucket(low, high, size, lead, all_reduce_ns(problem, size, stage.devices), resources))
            high = low - 1
    return tuple(made)


def bucket_bytes(problem: Problem, first: int, last: int) -> np.ndarray:
    """Prefix sums (L + 1,) of the gradients in the buckets of layers ``first`` to ``last``.

    A parameter tied with layers elsewhere is in no bucket: it is summed on its own (``ties``).
    """
    held = problem.trainable_bytes
    for _name, layers, size in problem.shared_parameters:
        if first <= layers[0] <= last and not first <= min(layers) <= max(layers) <= last:
            own = int(held[layers[0] + 1] - held[layers[0]])
            held = held - np.where(np.arange(len(held)) > layers[0], min(size, own), 0)
    return held


def ring_resources(problem: Problem, devices: Sequence[int]) -> tuple[int, ...]:
    """Every resource that the ring of the devices passes, in both directions."""
    used: set[int] = set()
    for u, v in problem.network.ring(devices):
        for a, b in ((u, v), (v, u)):
            route = problem.network.route(a, b)
            if route is not None:
                used.update(route.resources)
    return tuple(sorted(used))

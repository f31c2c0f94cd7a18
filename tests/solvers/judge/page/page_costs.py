"""Sections 1 to 3 of docs/theory/judge.md in plain Python: the costs of a plan's operations, transfers and all-reduces.

Written from the page alone. Only the fields of the inputs are read; no function of ``penstock.solvers`` is called.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from page_network import Links

from penstock.solvers.model.allocation import Allocation, Stage
from penstock.solvers.model.problem import MeasuredCollective, Problem

UNREACHABLE = 2**61
F, B, I, W, R, STEP = range(6)  # noqa: E741
FORWARD, BACKWARD = 0, 1

Operation = tuple[int, int, int]


class Invalid(Exception):
    """The error where the page defines no prediction of a plan."""


class StageCosts(NamedTuple):
    """Costs of a stage for one micro-batch (3.2), and the time to recompute all its segments (8.3)."""

    forward: int
    backward: int
    weight: int
    again: int
    kept: int
    work: int
    inside: int
    whole: int


class Transfer(NamedTuple):
    """A transfer's duration and the resources that it occupies (3.3)."""

    duration: int
    resources: frozenset[Hashable]


class Tie(NamedTuple):
    """A summed tie (5): its number, stages, devices, and the duration and resources of its all-reduce."""

    number: int
    stages: list[int]
    devices: list[int]
    duration: int
    resources: frozenset[Hashable]


class Bucket(NamedTuple):
    """A bucket (3.6): the group's index, the first layer, the bucket number, duration and resources."""

    group: int
    first: int
    number: int
    duration: int
    resources: frozenset[Hashable]


class Group(NamedTuple):
    """A gradient group (3.6)."""

    first: int
    last: int
    stages: list[int]
    devices: list[int]
    buckets: list[Bucket]


def up(a: int, b: int) -> int:
    """Return ceil(a / b), exactly."""
    return -(-a // b)


def time(size: int, width: int) -> int:
    """Return the time of some bytes at some bytes per second (section 1)."""
    if size == 0:
        return 0
    return up(size * 1_000_000_000, width) if width else UNREACHABLE


class Collectives:
    """Section 3.5; halves of all-reduces and messages between two devices follow docs/degrees.md."""

    def __init__(self, links: Links, mode: str, measured: Sequence[MeasuredCollective]) -> None:
        self.links, self.mode, self.measured = links, mode, measured

    def time(self, operation: str, size: int, devices: Sequence[int], count: int = 1) -> int:
        """Return the time of ``count`` collectives that move ``size`` bytes together."""
        k = len(devices)
        if k == 1 or size == 0:
            return 0
        if (measured_ns := self._by_entries(operation, up(size, count), devices)) is not None:
            return count * measured_ns
        if operation == "send":
            return time(size, self.links.ring_width(devices)) + count * self._late(devices)
        rounds = 2 if operation == "all_reduce" else 1
        if operation == "all_to_all":
            return self._ring(devices, size, self.links.ring_width(devices), rounds, count)
        by_node = self._by_node(devices)
        if self.mode == "hierarchical" and len(by_node) > 1 and max(map(len, by_node)) > 1:
            inside = [
                self._ring(part, size, self.links.ring_width(part), rounds, count) for part in by_node if len(part) > 1
            ]
            across = self.links.across(devices)
            return max(inside) + self._ring([part[0] for part in by_node], size, across, rounds, count)
        if self.mode == "dapple" and len(by_node) == 1:
            return time(rounds * (k - 1) * size, k * self.links.ring_width(devices) * (k // 2))
        return self._ring(devices, size, self.links.ring_width(devices), rounds, count)

    def _by_node(self, devices: Sequence[int]) -> list[list[int]]:
        parts: dict[int, list[int]] = {}
        for d in devices:
            parts.setdefault(self.links.node(d), []).append(d)
        return list(parts.values())

    def _by_entries(self, operation: str, size: int, devices: Sequence[int]) -> int | None:
        """Return the measured time; None where the measurements do not cover the devices."""
        sizes = {len(part) for part in self._by_node(devices)}
        if len(sizes) > 1 or self.links.ring_width(devices) == 0 or not self.is_alone(devices):
            return None
        times = {
            name: curve(
                [
                    (each.size_bytes, each.time_ns)
                    for each in self.measured
                    if (each.operation, each.devices_per_node) == (name, *sizes)
                    and each.nodes * each.devices_per_node == len(devices)
                ],
                size,
            )
            for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
        }
        if operation == "all_reduce" and times["all_reduce"] is None:
            halves = times["reduce_scatter"], times["all_gather"]
            return None if halves[0] is None or halves[1] is None else halves[0] + halves[1]
        return times[operation]

    def is_alone(self, devices: Sequence[int]) -> bool:
        """Return whether no other traffic shares the devices' links."""
        return True

    def _ring(self, devices: Sequence[int], size: int, width: int, rounds: int, count: int) -> int:
        k = len(devices)
        moving = time(rounds * (k - 1) * size, k * width)
        return moving + count * rounds * (k - 1) * self._late(devices)

    def _late(self, devices: Sequence[int]) -> int:
        routes = [self.links.route(u, v) for u, v in self.links.ring(devices)]
        return max(route[1] if route else 0 for route in routes)


def curve(entries: list[tuple[int, int]], size: int) -> int | None:
    """Interpolate the time of some bytes between measurements; None without any."""
    if not entries:
        return None
    entries = sorted(entries)
    points = [(s, max(t for _s, t in entries[: i + 1])) for i, (s, _t) in enumerate(entries)]
    if size <= points[0][0]:
        return points[0][1]
    grown = 0, 0
    for (a, before), (b, after) in pairwise(points):
        if size <= b:
            return before + up((size - a) * (after - before), b - a)
        grown = (after - before, b - a) if after > before else grown
    last, most = points[-1]
    slope = grown if grown[0] else (most, last)
    return most + up((size - last) * slope[0], slope[1])


class Costs:
    """Section 3 for one plan.

    ``long_run``: a plan without a flush, whose micro-batches all have the same rows. ``O``: the part of ``Q`` that a
    device sums and keeps states of; less than ``Q`` where GPUs of a group hold copies (docs/degrees.md).
    """

    def __init__(self, problem: Problem, allocation: Allocation, overlap: bool | None, long_run: bool = False) -> None:
        self.problem, self.long_run = problem, long_run
        self.overlap = problem.rules.overlap_all_reduce if overlap is None else overlap
        self.links = Links(problem.network)
        self.collectives = Collectives(self.links, problem.rules.all_reduce, problem.collectives)
        self.M = allocation.num_micro_batches
        self.stages: list[Stage] = [stage for pipeline in allocation.pipelines for stage in pipeline.stages]
        self.pipeline = [p for p, pipeline in enumerate(allocation.pipelines) for _ in pipeline.stages]
        self.ranges = [pipeline.micro_batches for pipeline in allocation.pipelines]
        self.P, self.Q, self.U = (
            [int(b) - int(a) for a, b in pairwise(prefix)]
            for prefix in (problem.parameter_bytes, problem.trainable_bytes, problem.update_ns)
        )
        self.O = self.Q
        self.A, self.G = ([int(x) for x in each] for each in (problem.forward_bytes, problem.backward_bytes))
        self.value, self.stage, self.transfer = cache(self._value), cache(self._stage), cache(self._transfer)
        self.groups = self._groups()

    # 2.4

    def neighbour(self, s: int, direction: int) -> int | None:
        """Return next(s) for direction 0, prev(s) for direction 1."""
        t = s + 1 if direction == FORWARD else s - 1
        return t if 0 <= t < len(self.stages) and self.pipeline[t] == self.pipeline[s] else None

    def rows(self, m: int) -> int:
        """Return the samples of a micro-batch."""
        samples = self.problem.global_batch_size
        return up(samples, self.M) if self.long_run else samples // self.M + (m < samples % self.M)

    def share(self, s: int, rows: int) -> int:
        """Return the rows that the busiest replica of a stage computes."""
        stage = self.stages[s]
        return rows if stage.dispatch == "round_robin" else up(rows, len(stage.devices))

    def slices(self, s: int, rows: int) -> list[tuple[int, int, int]]:
        """List (device, first row, end) of the replicas; a round-robin stage counts as its first device (3.3)."""
        stage, r = self.stages[s], len(self.stages[s].devices)
        if stage.dispatch == "round_robin":
            return [(stage.devices[0], 0, rows)]
        return [(d, rows * q // r, rows * (q + 1) // r) for q, d in enumerate(stage.devices)]

    # 3.1

    def _value(self, name: str, kind: str, layer: int, z: int) -> int:
        source, speed = self.problem.kind_source[kind]
        x = {point.rows: int(getattr(point, name)[layer]) for point in self.problem.measured[source]}
        number = self._at(x, z)
        return math.ceil(number / speed) if speed != 1 and name.endswith("_ns") else number

    def _at(self, x: dict[int, int], z: int) -> int:
        if z == 0:
            return 0
        if z in x:
            return x[z]
        above, below = [size for size in x if size > z], [size for size in x if size < z]
        if self.problem.linear or not above:
            base = min(above) if above else max(x)
            return up(x[base] * z, base)
        if not below:
            return x[min(x)]
        a, b = max(below), min(above)
        return x[a] + up((x[b] - x[a]) * (z - a), b - a)

    def total(self, name: str, kind: str, layers: Iterable[int], z: int) -> int:
        """Return a sum over layers."""
        return sum(self.value(name, kind, layer, z) for layer in layers)

    # 3.2 and 8.3

    def _stage(self, s: int, rows: int) -> StageCosts:
        stage, z = self.stages[s], self.share(s, rows)
        layers = range(stage.first, stage.last + 1)
        segments = [range(a, b + 1) for a, b in stage.recompute]
        again = [layer for segment in segments for layer in segment]
        inputs = sum(self._input_bytes(stage.first, a, z) for a, _b in stage.recompute)
        columns: list[tuple[int, ...]] = []
        plain = []
        for kind in {self.problem.devices[d].kind for d in stage.devices}:
            encode_in, decode_in, encode_out, decode_out = self._conversions(stage, kind, z)
            stash = self.total("stash_bytes", kind, layers, z)
            redone = [self.total("stash_bytes", kind, segment, z) for segment in segments]
            freed = {layer: self._freed(stage, kind, layer, z) for layer in layers}
            workspace = max(self.value("workspace_bytes", kind, layer, z) for layer in layers)
            plain.append(stash)
            columns.append(
                (
                    self.total("forward_ns", kind, layers, z) + encode_out + decode_in,
                    self.total("backward_ns", kind, layers, z) + encode_in + decode_out,
                    self.total("weight_ns", kind, layers, z),
                    self.total("forward_ns", kind, again, z)
                    + sum(self._module(module, 0, kind, layer, z) for module in stage.modules for layer in layers),
                    stash - sum(redone) - sum(freed.values()) + inputs,
                    workspace,
                    workspace + max([*redone, *freed.values()]),
                )
            )
        forward, backward, weight, repeat, kept, work, most = (max(column) for column in zip(*columns, strict=True))
        return StageCosts(forward, backward, weight, repeat, kept, work, most - work, max(plain) - kept + inputs)

    def _freed(self, stage: Stage, kind: str, layer: int, z: int) -> int:
        """Return the bytes of a layer's stash that its recomputed modules free."""
        freed = sum(self._module(module, 1, kind, layer, z) for module in stage.modules)
        return min(freed, self.value("stash_bytes", kind, layer, z))

    def _module(self, module: str, which: int, kind: str, layer: int, z: int) -> int:
        """Return a module's time (0), rounded up, or its freed bytes (1), rounded down."""
        source, speed = self.problem.kind_source[kind]
        sign = 1 if which == 0 else -1
        x = {point.rows: sign * int(point.modules[module][which][layer]) for point in self.problem.measured[source]}
        number = sign * self._at(x, z)
        return math.ceil(number / speed) if speed != 1 and which == 0 else number

    def _input_bytes(self, first: int, a: int, z: int) -> int:
        if a == 0 or (a == first and self.problem.memory.count_buffers):
            return 0
        return self.A[a - 1] * z

    def duration(self, operation: Operation, apart: bool) -> int:
        """Return the duration of an operation, from the table of durations."""
        kind, s, m = operation
        if kind == STEP:
            return self.step(s)
        costs = self.stage(s, self.rows(m))
        again = 0 if apart else costs.again
        if kind == F:
            return costs.forward
        if kind == B:
            return costs.backward + again
        if kind == I:
            return costs.backward - costs.weight + again
        return costs.weight if kind == W else costs.again

    def step(self, s: int) -> int:
        """Return the time of an optimizer step."""
        stage, summed = self.stages[s], self.step_sums(s)
        whole = sum(self.U[stage.first : stage.last + 1])
        return summed + up(whole - summed, len(stage.devices) if self.problem.memory.shard_states else 1)

    def step_sums(self, s: int) -> int:
        """Return the part of a step's time in which the GPUs of a group sum gradients among themselves."""
        return 0

    # 3.3

    def size(self, s: int, direction: int, rows: int) -> int:
        """Return the plain bytes of some rows that stage s sends; the cut is the last layer of the lower stage."""
        return rows * (self.A if direction == FORWARD else self.G)[self.cut(s, direction)]

    def cut(self, s: int, direction: int) -> int:
        """Return the cut over which stage s sends."""
        return self.stages[s].last if direction == FORWARD else self.stages[s].first - 1

    def message(self, s: int, direction: int, rows: int) -> int:
        """Return the bytes of some rows on the wire."""
        plain = self.size(s, direction, rows)
        coded = self.stages[s].coded[1 if direction == FORWARD else 0]
        return self.encoded(self.cut(s, direction), rows, plain) if coded else plain

    def _transfer(self, s: int, direction: int, rows: int) -> Transfer | None:
        t = self.neighbour(s, direction)
        if t is None or self.message(s, direction, rows) == 0:
            return None
        source, target = self.stages[s], self.stages[t]
        same = source.dispatch == target.dispatch or len(source.devices) == 1
        if source.devices == target.devices and same:
            return None
        rules = self.problem.rules
        if rules.shared or rules.transfer == "nic":
            transfer = self._on_wires(s, t, direction, rows)
            if transfer is None or rules.shared:
                return transfer
            return Transfer(transfer.duration, self._channel(s, direction))
        return Transfer(self._of_papers(source, target, self.message(s, direction, rows)), self._channel(s, direction))

    def _channel(self, s: int, direction: int) -> frozenset[Hashable]:
        edge = s if direction == FORWARD else s - 1
        channel = self.problem.rules.channel
        names = {"half": [("edge", edge)], "full": [("edge", edge, direction)], "none": []}
        return frozenset(names[channel])

    def _on_wires(self, s: int, t: int, direction: int, rows: int) -> Transfer | None:
        load: dict[Hashable, int] = {}
        latency = 0
        for u, a, b in self.slices(s, rows):
            for v, c, d in self.slices(t, rows):
                k = min(b, d) - max(a, c)
                if k <= 0 or u == v:
                    continue
                route = self.links.route(u, v)
                if route is None:
                    return Transfer(UNREACHABLE, frozenset())
                latency = max(latency, route[1])
                for resource in route[0]:
                    load[resource] = load.get(resource, 0) + self.message(s, direction, k)
        if not load:
            return None
        longest = max(time(size, self.links.bandwidth[resource]) for resource, size in load.items())
        return Transfer(latency + longest, frozenset(load))

    def _of_papers(self, source: Stage, target: Stage, size: int) -> int:
        links, mode = self.links, self.problem.rules.transfer
        pairs = [(u, v) for u in source.devices for v in target.devices if u != v]
        width = min(links.width(u, v) for u, v in pairs)
        if mode == "spp":
            return time(size, width * len(source.devices) * len(target.devices))
        nodes = {links.node(v) for v in target.devices}
        away = sum(links.node(u) not in nodes for u in source.devices)
        if mode == "dapple" and len(nodes) == 1 and away:
            between = min(links.width(u, v) for u, v in pairs if links.node(u) != links.node(v))
            return time(up(size * away, len(source.devices)), between)
        return time(size, width)

    # 3.4

    def encodable(self, cut: int) -> tuple[int, int]:
        """Return the bytes per sample and the number of the tensors that can be encoded."""
        return self.problem.encodable[cut] if self.problem.encodable else (0, 0)

    def encoded(self, cut: int, rows: int, plain: int) -> int:
        """Return the bytes of a message of some rows on an encoded edge."""
        size, number = self.encodable(cut)
        return plain - min(plain, size * rows) // 2 + 5 * number if plain else 0

    def _conversions(self, stage: Stage, kind: str, z: int) -> tuple[int, int, int, int]:
        """Return the times of encode(in), decode(in), encode(out), decode(out)."""
        if not any(stage.coded):
            return 0, 0, 0, 0
        _source, faster = self.problem.kind_source[kind]
        speed_of_codec = self.problem.codec_speeds[kind]
        speeds = [speed_of_codec.encode_bytes_per_s, speed_of_codec.decode_bytes_per_s]
        if faster != 1:
            speeds = [math.floor(speed * faster) for speed in speeds]
        sizes = [
            self.encodable(cut)[0] * z if coded else 0
            for cut, coded in zip((stage.first - 1, stage.last), stage.coded, strict=True)
        ]
        before, behind = ([time(n, w) for w in speeds] for n in sizes)
        return before[0], before[1], behind[0], behind[1]

    # 3.5

    def all_reduce(self, size: int, devices: Sequence[int]) -> int:
        """Return the time in which devices exchange parameters of ``size`` bytes (3.5)."""
        memory = self.problem.memory
        gathered = 1 if memory.shard_states else memory.gradient_factor
        return self.collectives.time("all_reduce", -(-size * (memory.gradient_factor + gathered) // 2), devices)

    def ring_resources(self, devices: Sequence[int]) -> frozenset[Hashable]:
        """Return the resources that an all-reduce occupies."""
        if not self.problem.rules.shared or len(devices) == 1:
            return frozenset()
        pairs = [pair for u, v in self.links.ring(devices) for pair in ((u, v), (v, u))]
        routes = [self.links.route(u, v) for u, v in pairs]
        return frozenset(resource for route in routes if route for resource in route[0])

    # 3.6

    def _groups(self) -> list[Group]:
        """List the gradient groups, the one with the last layers first."""
        bounds = [*sorted({stage.first for stage in self.stages}), len(self.P)]
        groups = []
        met: dict[int, int] = {}
        for number in reversed(range(len(bounds) - 1)):
            first, last = bounds[number], bounds[number + 1] - 1
            stages = [s for s, stage in enumerate(self.stages) if stage.first <= first and last <= stage.last]
            devices = list(dict.fromkeys(d for s in stages for d in self.stages[s].devices))
            buckets = []
            for low, size, inside in self._walk(first, last) if len(devices) > 1 or self.inside(first, last) else ():
                duration, used = inside + self.all_reduce(size, devices), self.ring_resources(devices)
                pieces = self._pieces(size, duration)
                for k in range(pieces):
                    place = met.get(stages[0], 0)
                    met[stages[0]] = place + 1
                    piece_ns = duration * (k + 1) // pieces - duration * k // pieces
                    buckets.append(Bucket(len(groups), low, place, piece_ns, used))
            groups.append(Group(first, last, stages, devices, buckets))
        return groups

    def _pieces(self, size: int, duration: int) -> int:
        """Return in how many pieces a bucket occupies shared links."""
        if not self.problem.rules.shared or duration >= UNREACHABLE:
            return 1
        return max(1, min(16, size // self.problem.rules.bucket_bytes))

    def inside(self, first: int, last: int) -> int:
        """Return the time in which the GPUs of a group sum some layers among themselves."""
        return 0

    def summed_bytes(self, tied: int) -> int:
        """Return the bytes of a tied parameter that a device sums and keeps states of."""
        return tied

    def _walk(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """List (first layer, bytes, time inside) of a group's buckets, bucket 0 first."""
        size = dict(enumerate(self.O))
        for _name, layers, tied in self.problem.shared_parameters:
            if any(not first <= layer <= last for layer in layers):
                size[layers[0]] = max(0, size[layers[0]] - self.summed_bytes(tied))
        buckets, collected, inside = [], 0, 0
        for layer in range(last, first - 1, -1):
            collected += size[layer]
            inside += self.inside(layer, layer)
            if collected >= self.problem.rules.bucket_bytes or (layer == first and collected + inside > 0):
                buckets.append((layer, collected, inside))
                collected = inside = 0
        return buckets

    # 5, tied parameters

    def ties(self, update_rule: str) -> list[Tie]:
        """List the ties that are summed, numbered."""
        sums: list[Tie] = []
        if update_rule not in ("synchronous", "double_buffered"):
            return sums
        for _name, layers, size in self.problem.shared_parameters:
            stages = [
                s for s, stage in enumerate(self.stages) if any(stage.first <= layer <= stage.last for layer in layers)
            ]
            pipelines = [self.pipeline[s] for s in stages]
            if size == 0 or self.Q[layers[0]] == 0 or len(set(pipelines)) == len(pipelines):
                continue
            devices = sorted({d for s in stages for d in self.stages[s].devices})
            used = self.ring_resources(devices)
            sums.append(Tie(len(sums), stages, devices, self.all_reduce(self.summed_bytes(size), devices), used))
        return sums

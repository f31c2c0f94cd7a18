"""Costs of a plan with degrees, from its documents and the real GPUs in plain Python: the oracle of GPU groups.

No function of ``penstock.solvers.degrees`` and ``penstock.solvers.costs`` is called. Every GPU of a replica is a lane.
The lanes of a stage send at the same time, over their routes in the real topology. All other rules are in the
simulator that is written from docs/theory/judge.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

from page_clock import Lane as Row
from page_clock import Run
from page_costs import Collectives, Costs, StageCosts, Transfer, time, up
from page_documents import read_request
from page_network import Links, Rings

from penstock.schemas.program import parse_row
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage
from penstock.solvers.model.problem import Device, Measured

Json = dict[str, Any]
GPUs = tuple[int, ...]


class Lane(NamedTuple):
    """A message from one GPU to another: the resources of its route, its latency, and its bytes."""

    route: list[Hashable]
    latency: int
    bytes: int


def degrees_of(plan: Json) -> dict[str, int]:
    """Return the degrees that a plan states."""
    names = ("tensor", "context", "expert", "expert_tensor")
    return {name: (plan.get("degrees") or {}).get(name, 1) for name in names}


def cell_of(degrees: dict[str, int]) -> int:
    """Return the number of GPUs that hold a replica together."""
    return max(degrees["tensor"] * degrees["context"], degrees["expert"] * degrees["expert_tensor"])


def replicas(topology: SimpleNamespace, size: int) -> list[GPUs]:
    """List all neighbouring GPUs of one kind, ``size`` at a time: in nodes, or several whole nodes of equal size."""
    nodes: dict[int, list[int]] = {}
    for gpu, node in enumerate(topology.network.node_of):
        nodes.setdefault(node, []).append(gpu)
    groups: list[GPUs] = []
    if size <= max(map(len, nodes.values())):
        for inside in nodes.values():
            groups += [tuple(inside[at : at + size]) for at in range(0, len(inside) - size + 1, size)]
    else:
        run: list[list[int]] = []
        for inside in nodes.values():
            run = [*run, inside] if not run or len(run[0]) == len(inside) else [inside]
            if len(run) * len(inside) == size:
                groups.append(tuple(gpu for node in run for gpu in node))
                run = []
    return [gpus for gpus in groups if len({topology.devices[gpu].kind for gpu in gpus}) == 1]


class LaneLinks(Rings):
    """Routes between replicas: the resources that their lanes use together."""

    def __init__(self, plain: Links, cells: Sequence[GPUs]) -> None:
        self.plain, self.cells, self.network = plain, cells, plain.network
        self.bandwidth = plain.bandwidth
        self.route, self.width = cache(self._route), cache(self._width)

    def lanes(self, u: int, v: int) -> Iterator[tuple[list[Hashable], int] | None]:
        """Yield the route of each lane from one replica to another."""
        for one, other in zip(self.cells[u], self.cells[v], strict=True):
            yield self.plain.route(one, other)

    def _route(self, u: int, v: int) -> tuple[list[Hashable], int] | None:
        routes = [route for route in self.lanes(u, v) if route is not None]
        if len(routes) < len(self.cells[u]):
            return None
        used = dict.fromkeys(resource for route in routes for resource in route[0])
        return list(used), max(route[1] for route in routes)

    def _width(self, u: int, v: int) -> int:
        """Return the width of one lane, while all lanes send."""
        routes = [route[0] for route in self.lanes(u, v) if route is not None]
        if len(routes) < len(self.cells[u]):
            return 0
        every = [resource for route in routes for resource in route]
        return min(self.bandwidth[resource] // every.count(resource) for resource in every)

    def node(self, cell: int) -> int:
        """Return the node of the first GPU."""
        return self.plain.node(self.cells[cell][0])

    def card(self, cell: int) -> Hashable:
        """Return the cards of all GPUs."""
        return frozenset((self.plain.node(gpu) - self.node(cell), self.plain.card(gpu)) for gpu in self.cells[cell])

    def together(self, pairs: Sequence[tuple[int, int]]) -> int:
        """Return the width of one lane, while all lanes of all pairs send."""
        routes = [route for u, v in pairs for route in self.lanes(u, v)]
        if None in routes:
            return 0
        used = [resource for route in routes if route for resource in route[0]]
        return min(self.bandwidth[each] * len(pairs) // used.count(each) for each in used)


class LaneCollectives(Collectives):
    """Collectives between replicas, on all of their lanes at once."""

    def is_alone(self, devices: Sequence[int]) -> bool:
        """Return whether all lanes together are as wide as the narrowest lane alone."""
        links: Any = self.links
        lanes = zip(*(links.cells[cell] for cell in devices), strict=True)
        return bool(links.ring_width(devices) == min(links.plain.ring_width(lane) for lane in lanes))


class LaneCosts(Costs):
    """Section 3 of the page between replicas of several GPUs."""

    def __init__(self, problem: Any, allocation: Allocation, overlap: bool | None) -> None:
        super().__init__(problem, allocation, overlap)
        self.O = problem.owned
        self.groups = self._groups()

    def inside(self, first: int, last: int) -> int:
        """Return the time of sums inside a replica, over all layers."""
        return sum(self.problem.inside[first : last + 1])  # type: ignore[attr-defined]

    def step_sums(self, s: int) -> int:
        """Return the time of sums inside a replica in a step, over all layers of the stage."""
        return sum(self.problem.step_sums[self.stages[s].first : self.stages[s].last + 1])  # type: ignore[attr-defined]

    def summed_bytes(self, tied: int) -> int:
        """Return the bytes of a tied parameter per GPU; a tied parameter belongs to no expert."""
        return up(tied, self.problem.holders)  # type: ignore[attr-defined]

    @property
    def links(self) -> LaneLinks:  # type: ignore[override]
        """Routes between replicas."""
        return self._links

    @links.setter
    def links(self, plain: Links) -> None:
        self._links = LaneLinks(plain, self.problem.cells)

    @property
    def collectives(self) -> Collectives:  # type: ignore[override]
        """Collectives between replicas."""
        return self._collectives

    @collectives.setter
    def collectives(self, plain: Collectives) -> None:
        self._collectives = LaneCollectives(plain.links, plain.mode, plain.measured)

    def _on_wires(self, s: int, t: int, direction: int, rows: int) -> Transfer | None:
        """Add up the load of all lanes on each resource."""
        lanes = list(self.lanes(s, t, direction, rows))
        load: dict[Hashable, int] = {}
        for lane in lanes:
            for resource in lane.route:
                load[resource] = load.get(resource, 0) + lane.bytes
        if not load:
            return None
        longest = max(time(size, self.links.bandwidth[resource]) for resource, size in load.items())
        return Transfer(max(lane.latency for lane in lanes) + longest, frozenset(load))

    def lanes(self, s: int, t: int, direction: int, rows: int) -> Iterator[Lane]:
        """Yield every message from the GPUs of a stage to the GPUs of another stage."""
        for u, a, b in self.slices(s, rows):
            for v, c, d in self.slices(t, rows):
                k = min(b, d) - max(a, c)
                if k <= 0 or u == v:
                    continue
                for route in self.links.lanes(u, v):
                    assert route is not None
                    yield Lane(*route, self.message(s, direction, k))


# ---- documents -------------------------------------------------------------------------------------------------------


def read_file(file: Json) -> Run:
    """Read the plan of a plan file, before its clock runs: rows, and the costs of all stages."""
    plan = file["plan"]
    degrees = degrees_of(plan)
    size = cell_of(degrees)
    real = read_request(file["request"])
    cells = replicas(real, size)
    problem = at_degrees(real, file["request"], degrees, plan.get("sharding"), cells)
    together = plan.get("sharding") in ("gradients", "parameters")
    if together:
        problem = shared_out(problem, real, file["request"], plan, cells)
        cells = problem.cells
        size = len(cells[0])
    names = [device.name for device in real.devices]
    first_of = {names[gpus[0]]: number for number, gpus in enumerate(cells)}

    def cells_of(devices: list[str]) -> tuple[int, ...]:
        numbers = [first_of[name] for name in devices[::size]]
        assert [names[gpu] for cell in numbers for gpu in cells[cell]] == devices
        return tuple(numbers)

    pipelines = []
    for pipeline in plan["pipelines"]:
        stages = []
        for each in pipeline["stages"]:
            first, last = each["layers"]
            again = {"none": (), "full": ((first, last),)}.get(str(each["recompute"]), each["recompute"])
            modules = tuple(again["modules"]) if isinstance(again, dict) else ()
            ranges = tuple((a, b) for a, b in again) if not modules else ()
            stages.append(Stage(first, last, cells_of(each["devices"]), each["dispatch"], ranges, modules=modules))
        pipelines.append(Pipeline(tuple(stages), tuple(pipeline["micro_batches"])))
    allocation = Allocation(tuple(pipelines), plan["num_micro_batches"])
    costs = (SharedCosts if together else LaneCosts)(problem, allocation, plan["overlap_all_reduce"])
    lanes = []
    for row in plan["schedule"]["rows"]:
        alike: dict[tuple[int, ...], list[int]] = {}
        for cell in (first_of[name] for name in row["devices"]):
            indices = tuple(s for s, stage in enumerate(costs.stages) if cell in stage.devices)
            alike.setdefault(indices if len(indices) == 1 else (), []).append(cell)
        for indices, several in alike.items():
            lanes.append(Row(tuple(several), [tuple(each) for each in parse_row(row["text"], *indices)]))  # type: ignore[misc]
    return Run(costs, "synchronous", [costs.M] * len(costs.stages), lanes, tied=costs.ties("synchronous"))


def at_degrees(
    real: SimpleNamespace, request: Json, degrees: dict[str, int], sharding: str | None, cells: list[GPUs]
) -> SimpleNamespace:
    """Return the problem of one GPU of each replica: its computation, memory and messages."""
    profile = request["profile"]
    variant = next(each for each in profile["variants"] if degrees_of(each) == degrees)
    parts = [variant["layers"][number] for number in profile["classes"]]
    size = [each["parameter_bytes"] for each in parts]
    trained = [p if x["trainable"] else 0 for p, x in zip(size, profile["layers"], strict=True)]
    experts = [(h["expert_bytes"] or 0) if x["trainable"] else 0 for h, x in zip(parts, profile["layers"], strict=True)]
    alike = cell_of(degrees) // degrees["tensor"]
    alike_experts = cell_of(degrees) // (degrees["expert"] * degrees["expert_tensor"])
    meshes = cell_of(degrees) // (degrees["tensor"] * degrees["context"])
    assert real.global_batch_size % meshes == 0
    lanes = degrees["context"] * (degrees["tensor"] if variant["boundary"] == "sharded" else 1)
    collectives = Collectives(Links(real.network), real.rules.all_reduce, real.collectives)
    inner = Inner(collectives, degrees, cells, profile["classes"])
    points = sorted(variant["measurements"], key=lambda each: each["micro_batch_size"])
    steps = inner.exposed(points[0], "step")
    shared = real.memory.shard_states if sharding is None else sharding != "none"
    kept = sharding == "parameters_kept"
    owned = [up(t - e, alike) + up(e, alike_experts) for t, e in zip(trained, experts, strict=True)]
    own_updates = [
        up(h["update_ns"] * part, t) if shared and t else h["update_ns"]
        for h, part, t in zip(parts, owned, trained, strict=True)
    ]
    return SimpleNamespace(
        **{name: getattr(real, name) for name in ("num_layers", "network", "rules", "collectives")},
        global_batch_size=real.global_batch_size // meshes,
        holders=alike,
        owned=owned,
        step_sums=steps,
        inside=[
            inner.summed(d - e, e, real.memory.gradient_factor, shared) for d, e in zip(trained, experts, strict=True)
        ],
        cells=cells,
        parameter_bytes=list(accumulate((p + (p - t) * kept for p, t in zip(size, trained, strict=True)), initial=0)),
        trainable_bytes=list(accumulate(trained, initial=0)),
        update_ns=list(accumulate((part + t for part, t in zip(own_updates, steps, strict=True)), initial=0)),
        forward_bytes=[sum(up(t["bytes_per_sample"], lanes) for t in cut) for cut in profile["boundaries"]],
        backward_bytes=[sum(up(t["gradient_bytes_per_sample"], lanes) for t in cut) for cut in profile["boundaries"]],
        shared_parameters=[
            (tie["name"], tie["layers"], up(tie["bytes"], degrees["tensor"])) for tie in profile["shared_parameters"]
        ],
        measured={
            kind: tuple(inner.measured(each, speed) for each in points if each["device_kind"] == source)
            for kind, (source, speed) in real.kind_source.items()
            if any(each["device_kind"] == source for each in points)
        },
        linear=False,
        kind_source={kind: (kind, 1) for kind in real.kind_source},
        encodable=[],
        devices=[
            Device(
                real.devices[gpus[0]].name,
                real.devices[gpus[0]].node,
                real.devices[gpus[0]].kind,
                min(real.devices[gpu].memory_bytes for gpu in gpus),
                max(real.devices[gpu].context_bytes for gpu in gpus),
                None,
            )
            for gpus in cells
        ],
        memory=SimpleNamespace(
            **{name: getattr(real.memory, name) for name in ("gradient_factor", "headroom_bytes", "count_buffers")},
            state_factor=real.memory.state_factor + (real.memory.shard_factor if sharding == "parameters_kept" else 0),
            shard_states=shared,
        ),
        pipeline_run=None,
        update_workspace_bytes=None,
        update_in_turn=False,
    )


class Shared(NamedTuple):
    """Traffic of each layer of a stage that all GPUs share out, and whether it may overlap computation.

    ``whole_bytes``: the bytes of gathered layers and of gradients that are not yet summed; independent of the rows.
    """

    gather: list[int]
    scatter: list[int]
    parameters: bool
    overlap: bool
    whole_bytes: int

    def forward(self, computing: list[int]) -> int:
        """Return the time of a forward: one stream computes a layer while the other gathers the next one."""
        if not self.parameters:
            return sum(computing)
        at = self.gather[0]
        for layer, duration in enumerate(computing):
            following = self.gather[layer + 1] if layer + 1 < len(computing) else 0
            at = self.after(at, duration, following)
        return at

    def backward(self, computing: list[int]) -> int:
        """Return the time of a backward: one stream sums the last layer's gradients, then gathers the next layer."""
        last = len(computing) - 1
        at = self.gather[last] if self.parameters else 0
        for layer in range(last, -1, -1):
            moved = self.scatter[layer + 1] if layer < last else 0
            moved += self.gather[layer - 1] if layer and self.parameters else 0
            at = self.after(at, computing[layer], moved)
        return at + self.scatter[0]

    def again(self, layer: int, computing: int) -> int:
        """Return the time to recompute a layer's forward, while the layer after it is gathered again."""
        if not self.parameters:
            return computing
        first = self.gather[0] if layer == 0 else 0
        following = self.gather[layer + 1] if layer + 1 < len(self.gather) else 0
        return first + self.after(0, computing, following)

    def after(self, start: int, computing: int, moving: int) -> int:
        """Return the time when both streams have ended."""
        if not self.overlap:
            return start + computing + moving
        ends = start + computing, start + moving
        return max(ends)


class SharedCosts(LaneCosts):
    """Costs of one stage on all GPUs, which are one GPU group."""

    def _stage(self, s: int, rows: int) -> StageCosts:
        stage, shared = self.stages[s], self.problem.shared  # type: ignore[attr-defined]
        kinds = sorted(self.problem.apart.kind_source)  # type: ignore[attr-defined]
        used = {device.kind for device in self.problem.apart.devices}  # type: ignore[attr-defined]
        layers = range(len(self.P))

        def slowest(name: str) -> list[int]:
            return [max(self.value(name, kind, layer, rows) for kind in kinds if kind in used) for layer in layers]

        forward = slowest("forward_ns")
        plain = super()._stage(s, rows)
        again = sum(shared.again(layer, forward[layer]) for a, b in stage.recompute for layer in range(a, b + 1))
        again += sum(
            max(self._module(module, 0, kind, layer, rows) for kind in kinds if kind in used)
            for module in stage.modules
            for layer in layers
        )
        return plain._replace(
            forward=shared.forward(forward),
            backward=shared.backward(slowest("backward_ns")),
            weight=sum(slowest("weight_ns")),
            again=again,
            work=plain.work + shared.whole_bytes,
        )


def shared_out(apart: SimpleNamespace, real: SimpleNamespace, request: Json, plan: Json, cells: list[GPUs]) -> Any:
    """Return the problem of one GPU of the stage that all replicas of ``apart`` share out."""
    degrees, parameters = degrees_of(plan), plan["sharding"] == "parameters"
    number, meshes = len(cells), len(cells) * cell_of(degrees) // (degrees["tensor"] * degrees["context"])
    assert real.global_batch_size % meshes == 0
    profile = request["profile"]
    variant = next(each for each in profile["variants"] if degrees_of(each) == degrees)
    parts = [variant["layers"][each] for each in profile["classes"]]
    size = [each["parameter_bytes"] for each in parts]
    trained = [p if x["trainable"] else 0 for p, x in zip(size, profile["layers"], strict=True)]
    experts = [(h["expert_bytes"] or 0) if x["trainable"] else 0 for h, x in zip(parts, profile["layers"], strict=True)]
    tied = [0] * len(size)
    for _name, layers, more in apart.shared_parameters:
        for layer in layers[1:]:
            tied[layer] += more
    plain = Collectives(Links(real.network), real.rules.all_reduce, real.collectives)
    inner = Inner(plain, degrees, cells, profile["classes"])
    outer = LaneCollectives(LaneLinks(Links(real.network), cells), real.rules.all_reduce, real.collectives)
    every = list(range(number))
    frozen = [up(p - t, apart.holders) for p, t in zip(size, trained, strict=True)]
    factor = real.memory.gradient_factor

    def moved(half: str, whole: list[int], shares: list[int], width: int) -> list[int]:
        times = []
        for each, expert, part in zip(whole, experts, shares, strict=True):
            inside = [
                max(plain.time(half, bytes_ * width, group) for group in groups)
                for groups, bytes_ in zip(inner.alike, (each - expert, expert), strict=True)
            ]
            times.append(sum(inside) + outer.time(half, part * width, every))
        return times

    gathered = [o + f + t for o, f, t in zip(apart.owned, frozen, tied, strict=True)]
    gather = moved("all_gather", [p + t for p, t in zip(size, tied, strict=True)], gathered, 1)
    scatter = moved("reduce_scatter", trained, apart.owned, factor)
    shares = [up(each, number) for each in apart.owned]
    kept = [up(o * real.memory.shard_factor + f, number) for o, f in zip(apart.owned, frozen, strict=True)]
    plain_steps = [b - a - s for (a, b), s in zip(pairwise(apart.update_ns), apart.step_sums, strict=True)]
    sums = [s + (0 if parameters else g) for s, g in zip(apart.step_sums, gather, strict=True)]
    unit = (2 * max(size) if parameters else 0) + factor * max(trained)
    devices = apart.devices
    whole = SimpleNamespace(**vars(apart))
    whole.apart = apart
    whole.shared = Shared(gather, scatter, parameters, real.rules.overlap_all_reduce, unit)
    whole.cells = [tuple(gpu for cell in cells for gpu in cell)]
    whole.global_batch_size = real.global_batch_size // meshes
    whole.parameter_bytes = list(accumulate(kept if parameters else size, initial=0))
    whole.trainable_bytes = list(accumulate(shares, initial=0))
    whole.owned, whole.holders, whole.inside = shares, 1, [0] * len(shares)
    whole.step_sums = sums
    whole.update_ns = list(accumulate((up(u, number) + s for u, s in zip(plain_steps, sums, strict=True)), initial=0))
    whole.devices = [
        replace(
            devices[0],
            memory_bytes=min(each.memory_bytes for each in devices),
            context_bytes=max(each.context_bytes for each in devices),
        )
    ]
    return whole


class Inner:
    """Collectives inside replicas: the slowest group's time, beyond what computation hides."""

    def __init__(
        self, collectives: Collectives, degrees: dict[str, int], cells: list[GPUs], classes: list[int]
    ) -> None:
        self.collectives, self.classes = collectives, classes
        t, c, x = degrees["tensor"], degrees["context"], degrees["expert"] * degrees["expert_tensor"]
        self.groups = {
            "tensor": [gpus[at : at + t] for gpus in cells for at in range(0, len(gpus), t)],
            "context": [
                gpus[mesh + lane : mesh + t * c : t]
                for gpus in cells
                for mesh in range(0, len(gpus), t * c)
                for lane in range(t)
            ],
            "expert": [gpus[at : at + x] for gpus in cells for at in range(0, len(gpus), x)],
        }
        self.alike = [[gpus[lane::apart] for gpus in cells for lane in range(apart)] for apart in (t, x)]

    def summed(self, dense: int, experts: int, gradient: int, shared: bool) -> int:
        """Return the time in which GPUs with the same parameters sum a layer in parts, and gather it.

        ``gradient``: bytes of a gradient per byte of parameters. ``shared``: the parameters are gathered, not the
        gradients.
        """
        return sum(
            max(self.collectives.time(half, size * width, group) for group in groups)
            for groups, size in zip(self.alike, (dense, experts), strict=True)
            for half, width in (("reduce_scatter", gradient), ("all_gather", 1 if shared else gradient))
        )

    def exposed(self, measurement: Json, phase: str) -> list[int]:
        """Return the time that the collectives of a phase add to each layer."""
        times = []
        for number in self.classes:
            in_phase = [each for each in measurement["layers"][number]["collectives"] if each["phase"] == phase]
            times.append(self.added(in_phase, 1 if phase == "step" else measurement["micro_batch_size"]))
        return times

    def added(self, collectives: list[Json], rows: int) -> int:
        """Return the time that some collectives add."""
        return sum(max(0, self.duration(each, rows) - each["hidden_ns"]) for each in collectives)

    def modules(self, measurement: Json, speed: float) -> dict[str, tuple[list[int], list[int]]]:
        """Return the time and the freed bytes of each module, by layer."""
        layers = [measurement["layers"][number]["modules"] or [] for number in self.classes]
        costs: dict[str, tuple[list[int], list[int]]] = {}
        for name in {each["module"] for layer in layers for each in layer}:
            one = [next((each for each in layer if each["module"] == name), None) for layer in layers]
            rows = measurement["micro_batch_size"]
            times = [
                -int(-each["forward_ns"] // speed) + self.added(each["collectives"], rows) if each else 0
                for each in one
            ]
            costs[name] = (times, [each["freed_bytes"] if each else 0 for each in one])
        return costs

    def duration(self, collective: Json, rows: int) -> int:
        """Return the time of the slowest group."""
        moved = collective["bytes_per_sample"] * rows
        return max(
            self.collectives.time(collective["operation"], moved, group, collective["count"])
            for group in self.groups[collective["over"]]
        )

    def measured(self, measurement: Json, speed: float) -> Measured:
        """Return the costs of each layer with its collectives, which a faster device does not shorten."""
        layers = [measurement["layers"][number] for number in self.classes]

        def faster(values: list[int]) -> list[int]:
            return values if speed == 1 else [-int(-value // speed) for value in values]

        def both(name: str) -> list[int]:
            computing = faster([each[f"{name}_ns"] for each in layers])
            return [a + b for a, b in zip(computing, self.exposed(measurement, name), strict=True)]

        halves = [
            each["backward_ns"] // 2 if each["backward_weight_ns"] is None else each["backward_weight_ns"]
            for each in layers
        ]
        sizes = [[each[name] for each in layers] for name in ("stash_bytes", "workspace_bytes")]
        rows = measurement["micro_batch_size"]
        times = both("forward"), both("backward"), faster(halves)
        return Measured(rows, *times, *sizes, self.modules(measurement, speed))  # type: ignore[arg-type]

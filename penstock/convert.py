"""The only bridge between documents and the solver core, both ways."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from importlib.metadata import version
from typing import Any

import networkx as nx
import numpy as np

from penstock.schemas import plan as wire
from penstock.schemas.errors import Fault, InvalidDocument, InvalidPlan
from penstock.schemas.jobs import Infeasibility, ResultOut
from penstock.schemas.profile import Measurement, ModelProfile
from penstock.schemas.program import KINDS, parse_row, print_row
from penstock.schemas.quantities import MAX_WIRE_INTEGER
from penstock.schemas.request import MemoryModel, PlanRequest
from penstock.schemas.topology import ClusterTopology, Node
from penstock.solvers.allocation import Allocation, Pipeline, Stage
from penstock.solvers.network import Cable, Inside, Network
from penstock.solvers.problem import Device, Measured, MemoryRules, NetworkRules, Problem
from penstock.solvers.result import Bound, Candidate, Result
from penstock.solvers.schedule import Orders, Pattern, PatternOperation, Row, Schedule
from penstock.solvers.timeline import Timeline

HOME = -1
"""Stands for the one stage that a row's device holds while its text is parsed."""

OPTIMIZER_STATES = {"sgd": 0, "momentum": 1, "adam": 2}


def to_problem(request: PlanRequest) -> Problem:
    """Freeze a request whose profile and topology stand inline. Raises InvalidDocument where they do not fit."""
    profile, topology = _inline(request)
    _refuse_overflow(profile, request.global_batch_size)
    topology = topology.expanded()
    devices = _devices(topology)
    network = _network(topology)
    return Problem(
        layer_names=tuple(layer.name for layer in profile.layers),
        parameter_bytes=_prefix(layer.parameter_bytes for layer in profile.layers),
        trainable_bytes=_prefix(layer.parameter_bytes if layer.trainable else 0 for layer in profile.layers),
        update_ns=_prefix(layer.update_ns for layer in profile.layers),
        forward_bytes=_frozen(sum(t.bytes_per_sample for t in cut) for cut in profile.boundaries),
        backward_bytes=_frozen(sum(t.gradient_bytes_per_sample for t in cut) for cut in profile.boundaries),
        boundary_tensors=tuple(
            tuple((t.name, t.bytes_per_sample, t.gradient_bytes_per_sample) for t in cut) for cut in profile.boundaries
        ),
        cuttable=np.array([layer.cuttable for layer in profile.layers[:-1]], dtype=bool),
        shared_parameters=tuple((s.name, s.layers, s.bytes) for s in profile.shared_parameters),
        measured=_measured(profile),
        linear=profile.scaling == "linear",
        kind_source=_kind_sources(profile, topology),
        devices=devices,
        network=network,
        global_batch_size=request.global_batch_size,
        micro_batch_sizes=tuple(sorted(set(request.micro_batch_sizes))),
        min_slice=request.min_slice,
        memory=_memory_rules(request.memory, profile),
        rules=NetworkRules(
            shared=request.network.sharing == "shared",
            channel=request.network.channel,
            transfer=request.network.transfer,
            all_reduce=request.network.all_reduce,
            bucket_bytes=request.network.bucket_bytes,
            overlap_all_reduce=request.network.overlap_all_reduce,
        ),
        recompute=request.recompute,
        expected_error=profile.source.expected_error,
    )


def _inline(request: PlanRequest) -> tuple[ModelProfile, ClusterTopology]:
    if isinstance(request.profile, str) or isinstance(request.topology, str):
        missing = [f for f in ("profile", "topology") if isinstance(getattr(request, f), str)]
        raise InvalidDocument(
            f"the request names its {' and '.join(missing)} by hash only",
            faults=tuple(Fault(f"/{f}", f"{getattr(request, f)} is not known here") for f in missing),
            remedy="give the document itself, or POST it to the service first",
        )
    return request.profile, request.topology


def _frozen(values: Iterable[int]) -> np.ndarray:
    array = np.fromiter(values, dtype=np.int64)
    array.setflags(write=False)
    return array


def _prefix(values: Iterable[int]) -> np.ndarray:
    array = np.concatenate(([0], np.cumsum(np.fromiter(values, dtype=np.int64))))
    array.setflags(write=False)
    return array


def _measured(profile: ModelProfile) -> dict[str, tuple[Measured, ...]]:
    return {
        kind: tuple(
            _one_measurement(m)
            for m in sorted(profile.measurements, key=lambda m: m.micro_batch_size)
            if m.device_kind == kind
        )
        for kind in profile.device_kinds
    }


def _one_measurement(m: Measurement) -> Measured:
    return Measured(
        rows=m.micro_batch_size,
        forward_ns=_frozen(layer.forward_ns for layer in m.layers),
        backward_ns=_frozen(layer.backward_ns for layer in m.layers),
        weight_ns=_frozen(
            layer.backward_ns // 2 if layer.backward_weight_ns is None else layer.backward_weight_ns
            for layer in m.layers
        ),
        stash_bytes=_frozen(layer.stash_bytes for layer in m.layers),
        workspace_bytes=_frozen(layer.workspace_bytes for layer in m.layers),
    )


def _refuse_overflow(profile: ModelProfile, global_batch_size: int) -> None:
    """Times and sizes of a whole step have to stay exact: below 2^53, as every integer on the wire."""
    for index, m in enumerate(profile.measurements):
        steps = -(-global_batch_size // m.micro_batch_size)
        totals = {
            "time": steps * sum(layer.forward_ns + layer.backward_ns for layer in m.layers),
            "stash": steps * sum(layer.stash_bytes for layer in m.layers),
        }
        for what, total in totals.items():
            if total > MAX_WIRE_INTEGER:
                raise InvalidDocument(
                    f"the {what} of one global batch of {global_batch_size} samples adds up to {total}, "
                    "more than 2^53 - 1, the largest integer that is counted",
                    faults=(Fault(f"/profile/measurements/{index}", f"{what} overflows"),),
                    remedy="check the units (nanoseconds, bytes) and the global batch size",
                )
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    if parameters * 8 > MAX_WIRE_INTEGER:
        raise InvalidDocument(
            f"the parameters add up to {parameters} bytes, more than can be counted with their optimizer states",
            faults=(Fault("/profile/layers", "parameter_bytes overflow"),),
            remedy="check the unit of parameter_bytes: bytes",
        )


def _kind_sources(profile: ModelProfile, topology: ClusterTopology) -> dict[str, tuple[str, float]]:
    """Where each device kind's times come from: (kind in the profile, how many times faster)."""
    known = profile.device_kinds
    scaled = {k.name: (k.scale_from, k.speed) for k in topology.kinds}
    sources: dict[str, tuple[str, float]] = {}
    faults: list[Fault] = []
    for n, node in enumerate(topology.nodes):
        for d, device in enumerate(node.devices):
            kind = device.kind
            if kind in known:
                sources[kind] = (kind, 1.0)
            elif kind in scaled and scaled[kind][0] in known:
                sources[kind] = scaled[kind]
            elif not any(repr(kind) in fault.detail for fault in faults):
                faults.append(Fault(f"/topology/nodes/{n}/devices/{d}/kind", f"{kind!r} is not in the profile", "kind"))
    if faults:
        raise InvalidDocument(
            f"the profile {profile.name!r} was measured on {', '.join(map(repr, known))} only",
            faults=tuple(faults),
            remedy="profile the model on that kind, or cost it from a known one: "
            f"topology.kinds: [{{name: ..., scale_from: {known[0]}, speed: 1.0}}]",
        )
    return sources


def _memory_rules(memory: MemoryModel, profile: ModelProfile) -> MemoryRules:
    """Optimizer states and gradients as multiples of the parameters' bytes (ALGORITHMS 1.7)."""
    half_width = profile.parameter_dtype != "fp32"
    states = OPTIMIZER_STATES[memory.optimizer]
    if memory.precision == "mixed" and half_width:
        states = 2 + 2 * states
    return MemoryRules(
        gradient_factor=2 if memory.gradient == "fp32" and half_width else 1,
        state_factor=states,
        shard_states=memory.optimizer_sharding == "over_replicas",
        headroom_bytes=memory.headroom_bytes,
        count_buffers=memory.buffers == "exact",
    )


def _devices(topology: ClusterTopology) -> tuple[Device, ...]:
    return tuple(
        Device(device.id, n, device.kind, device.memory_bytes, device.context_bytes, device.price)
        for n, node in enumerate(topology.nodes)
        for device in node.devices
    )


def _network(topology: ClusterTopology) -> Network:
    ids = tuple(device.id for node in topology.nodes for device in node.devices)
    node_of = tuple(n for n, node in enumerate(topology.nodes) for _ in node.devices)
    bandwidth = latency = None
    if topology.matrix is not None:
        order = [topology.matrix.devices.index(name) for name in ids]
        bandwidth = np.array(topology.matrix.bandwidth_bytes_per_s, dtype=np.int64)[np.ix_(order, order)]
        np.fill_diagonal(bandwidth, 0)
        if topology.matrix.latency_ns is not None:
            latency = np.array(topology.matrix.latency_ns, dtype=np.int64)[np.ix_(order, order)]
    network = Network(
        device_names=ids,
        node_names=tuple(node.name for node in topology.nodes),
        node_of=node_of,
        insides=tuple(_inside(node, topology) for node in topology.nodes),
        cables=tuple(
            Cable(x.a, x.b, x.bandwidth_bytes_per_s, x.latency_ns, x.duplex == "full") for x in topology.links
        ),
        matrix_bytes_per_s=bandwidth,
        matrix_latency_ns=latency,
    )
    _refuse_disconnected(network)
    return network


def _inside(node: Node, topology: ClusterTopology) -> Inside | None:
    fabric = node.fabric
    if fabric is not None:
        return Inside(fabric.form, fabric.bandwidth_bytes_per_s, fabric.latency_ns, fabric.duplex == "full")
    own = [link for link in topology.links if node.name in (link.a, link.b)]
    if not own:
        return None
    widest = max(own, key=lambda link: link.bandwidth_bytes_per_s)
    return Inside("bus", widest.bandwidth_bytes_per_s, widest.latency_ns, widest.duplex == "full")


def _refuse_disconnected(network: Network) -> None:
    graph = nx.Graph()
    graph.add_nodes_from(range(len(network.device_names)))
    if network.matrix_bytes_per_s is not None:
        joined = (network.matrix_bytes_per_s > 0) & (network.matrix_bytes_per_s.T > 0)
        graph.add_edges_from(zip(*np.nonzero(joined), strict=True))
    else:
        first_of: dict[int, int] = {}
        for device, node in enumerate(network.node_of):
            leader = first_of.setdefault(node, device)
            if leader != device and network.route(leader, device) is not None:
                graph.add_edge(leader, device)
        anchor = 0
        for device in graph:
            if device != anchor and network.route(anchor, device) is not None:
                graph.add_edge(anchor, device)
    parts = [sorted(part) for part in nx.connected_components(graph)]
    if len(parts) > 1:
        a, b = (network.device_names[min(part)] for part in parts[:2])
        raise InvalidDocument(
            f"the topology falls into {len(parts)} parts: nothing connects {a!r} and {b!r}",
            faults=(Fault("/topology", f"no path between {a!r} and {b!r}", "disconnected"),),
            remedy="add the link (or the node's fabric) that joins them, or plan for one part",
        )


# ---- results out -----------------------------------------------------------------------------------------------------


def to_plan(problem: Problem, request: PlanRequest, candidate: Candidate, bounds: tuple[Bound, ...]) -> wire.Plan:
    """The plan document of a judged candidate; its numbers are the timeline's."""
    profile, _ = _inline(request)
    allocation = candidate.allocation
    value = candidate.value_ns
    return wire.Plan(
        request_hash=request.content_hash(),
        planner=candidate.planner,
        global_batch_size=problem.global_batch_size,
        micro_batch_size=-(-problem.global_batch_size // allocation.num_micro_batches),
        num_micro_batches=allocation.num_micro_batches,
        pipelines=tuple(_wire_pipeline(problem, pipeline) for pipeline in allocation.pipelines),
        update_rule=candidate.update_rule,
        overlap_all_reduce=candidate.overlap_all_reduce,
        schedule=_wire_schedule(problem, allocation, candidate.schedule),
        prediction=to_prediction(problem, profile, candidate.timeline),
        certificates=tuple(_certificate(bound, value) for bound in bounds if bound.bound_ns > 0),
        assumptions=_assumptions(problem, request),
        versions=_versions(),
        seed=request.seed,
    )


def _wire_pipeline(problem: Problem, pipeline: Pipeline) -> wire.Pipeline:
    return wire.Pipeline(
        stages=tuple(_wire_stage(problem, stage) for stage in pipeline.stages), micro_batches=pipeline.micro_batches
    )


def _wire_stage(problem: Problem, stage: Stage) -> wire.Stage:
    whole = ((stage.first, stage.last),)
    return wire.Stage(
        layers=(stage.first, stage.last),
        devices=tuple(problem.devices[d].name for d in stage.devices),
        dispatch=stage.dispatch,
        recompute="full" if stage.recompute == whole else stage.recompute or "none",
    )


def _home_stages(allocation: Allocation) -> dict[int, int | None]:
    """The one stage that a device holds, or None where it holds several."""
    homes: dict[int, int | None] = {}
    for number, stage in enumerate(allocation.stages):
        for device in stage.devices:
            homes[device] = None if device in homes else number
    return homes


def _wire_schedule(problem: Problem, allocation: Allocation, schedule: Schedule) -> wire.PlanSchedule:
    if isinstance(schedule, Pattern):
        return wire.PlanSchedule(
            name=schedule.name,
            pattern=wire.Pattern(
                period_ns=schedule.period_ns,
                micro_batches_per_period=schedule.micro_batches_per_period,
                operations=tuple(
                    wire.PatternOperation(operation=f"{o.stage}{KINDS[o.kind]}0", start_ns=o.start_ns, shift=o.shift)
                    for o in schedule.operations
                ),
            ),
        )
    homes = _home_stages(allocation)
    texts: dict[str, list[int]] = {}
    printed: dict[tuple[bool, bytes], str] = {}
    for row in schedule.rows:
        by_home: dict[int | None, list[int]] = {}
        for device in row.devices:
            by_home.setdefault(homes[device], []).append(device)
        for home, devices in by_home.items():
            at_home = home is not None and bool((row.operations[:, 1] == home).all())
            key = (at_home, (row.operations[:, ::2] if at_home else row.operations).tobytes())
            if key not in printed:
                printed[key] = print_row([(k, s, m) for k, s, m in row.operations.tolist()], home)
            texts.setdefault(printed[key], []).extend(devices)
    return wire.PlanSchedule(
        name=schedule.name,
        rows=tuple(
            wire.ScheduleRow(devices=tuple(problem.devices[d].name for d in devices), text=text)
            for text, devices in texts.items()
        ),
        warmup=schedule.warmup,
    )


def to_prediction(problem: Problem, profile: ModelProfile, timeline: Timeline) -> wire.Prediction:
    """The judge's numbers as they stand in a plan."""
    devices = tuple(
        wire.DevicePrediction(
            device=problem.devices[d].name,
            busy_ns=use.busy_ns,
            communication_ns=use.communication_ns,
            idle_ns=use.idle_ns,
            peak_memory_bytes=use.memory.total,
            memory_bytes=problem.devices[d].memory_bytes,
            memory=wire.MemoryBreakdown(**{f"{k}_bytes": v for k, v in use.memory._asdict().items()}),
        )
        for d, use in sorted(timeline.uses.items())
    )
    return wire.Prediction(
        time_per_global_batch_ns=timeline.time_per_global_batch_ns,
        fill_ns=timeline.fill_ns,
        drain_ns=timeline.drain_ns,
        bubble=timeline.bubble,
        peak_memory_bytes=timeline.peak_memory_bytes,
        devices=devices,
        basis=profile.source.method,
        expected_error=profile.source.expected_error,
        cost_per_sample=_cost_per_sample(problem, timeline),
    )


def _cost_per_sample(problem: Problem, timeline: Timeline) -> float | None:
    prices = [problem.devices[d].price for d in timeline.uses]
    if any(price is None for price in prices):
        return None
    hours = timeline.time_per_global_batch_ns / 3_600_000_000_000
    return sum(price for price in prices if price is not None) * hours / problem.global_batch_size


def _certificate(bound: Bound, value_ns: int) -> wire.Certificate:
    assert bound.bound_ns <= value_ns, f"{bound} is above a plan that takes {value_ns} ns"
    return wire.Certificate(
        scope=bound.scope,
        model=bound.model,
        bound_ns=bound.bound_ns,
        tolerance_ns=bound.tolerance_ns,
        gap=value_ns / bound.bound_ns - 1,
        method=bound.method,
    )


def _assumptions(problem: Problem, request: PlanRequest) -> tuple[str, ...]:
    profile, topology = _inline(request)
    scaled = tuple(
        f"times on {kind} are those of {source}, divided by {speed:g}"
        for kind, (source, speed) in sorted(problem.kind_source.items())
        if kind != source
    )
    return profile.assumptions + topology.assumptions + scaled


@cache
def _installed_version() -> str:
    return version("penstock")


def _versions() -> dict[str, str]:
    return {"penstock": _installed_version()}


def to_result(problem: Problem, request: PlanRequest, result: Result) -> ResultOut:
    """A planner's result as a document."""
    plan = to_plan(problem, request, result.best, result.bounds) if result.best is not None else None
    shortage = result.shortage
    infeasibility = None
    if result.status == "infeasible":
        infeasibility = Infeasibility(
            sentence=result.why,
            stage=_layer_range(problem, shortage.first_layer, shortage.last_layer) if shortage else None,
            device=problem.devices[shortage.device].name if shortage else None,
            missing_bytes=shortage.missing_bytes if shortage else None,
            remedy=shortage.remedy if shortage else None,
        )
    return ResultOut(
        status=result.status.value,
        why=result.why,
        infeasibility=infeasibility,
        plan_hash=plan.content_hash() if plan else None,
        plan=plan,
        certificates=plan.certificates if plan else (),
        seconds=result.seconds,
    )


def _layer_range(problem: Problem, first: int, last: int) -> str:
    return f"layers {first}–{last} ({problem.layer_names[first]} … {problem.layer_names[last]})"


# ---- plans in --------------------------------------------------------------------------------------------------------


def from_plan(plan: wire.Plan, problem: Problem) -> tuple[Allocation, Schedule]:
    """The core's nouns of a plan document. Raises InvalidPlan naming each unknown device, layer or operation."""
    faults: list[Fault] = []
    number_of = {device.name: d for d, device in enumerate(problem.devices)}
    pipelines = []
    for p, pipeline in enumerate(plan.pipelines):
        stages = []
        for s, stage in enumerate(pipeline.stages):
            where = f"/pipelines/{p}/stages/{s}"
            first, last = stage.layers
            if not first <= last < problem.num_layers:
                faults.append(
                    Fault(f"{where}/layers", f"{[first, last]} is no range of layers 0…{problem.num_layers - 1}")
                )
                continue
            unknown = [name for name in stage.devices if name not in number_of]
            if unknown:
                faults.append(Fault(f"{where}/devices", f"the topology has no device {unknown[0]!r}"))
                continue
            ranges = {"none": (), "full": ((first, last),)}.get(stage.recompute, stage.recompute)  # type: ignore[arg-type]
            outside = [r for r in ranges if not first <= r[0] <= r[1] <= last]
            if outside:
                faults.append(
                    Fault(f"{where}/recompute", f"{list(outside[0])} is no range within layers {[first, last]}")
                )
                continue
            stages.append(Stage(first, last, tuple(number_of[n] for n in stage.devices), stage.dispatch, tuple(ranges)))
        first_batch, last_batch = pipeline.micro_batches
        if not first_batch <= last_batch < plan.num_micro_batches:
            faults.append(
                Fault(f"/pipelines/{p}/micro_batches", f"no range of micro-batches 0…{plan.num_micro_batches - 1}")
            )
        pipelines.append(Pipeline(tuple(stages), pipeline.micro_batches))
    faults += _batch_faults(plan, problem)
    if faults:
        raise InvalidPlan("the plan does not fit its request", faults=tuple(faults))
    allocation = Allocation(tuple(pipelines), plan.num_micro_batches)
    return allocation, _schedule(plan.schedule, allocation, number_of)


def _batch_faults(plan: wire.Plan, problem: Problem) -> list[Fault]:
    faults = []
    if plan.global_batch_size != problem.global_batch_size:
        faults.append(
            Fault(
                "/global_batch_size", f"the plan has {plan.global_batch_size}, the request {problem.global_batch_size}"
            )
        )
    rows = -(-plan.global_batch_size // plan.num_micro_batches)
    if plan.num_micro_batches > plan.global_batch_size or rows != plan.micro_batch_size:
        faults.append(
            Fault(
                "/micro_batch_size",
                f"{plan.global_batch_size} samples in {plan.num_micro_batches} micro-batches have {rows} rows "
                f"in the largest, not {plan.micro_batch_size}",
            )
        )
    return faults


def _schedule(schedule: wire.PlanSchedule, allocation: Allocation, number_of: dict[str, int]) -> Schedule:
    if schedule.pattern is not None:
        return _pattern(schedule)
    homes = _home_stages(allocation)
    rows = []
    for r, row in enumerate(schedule.rows):
        where = f"/schedule/rows/{r}"
        unknown = [name for name in row.devices if name not in number_of]
        if unknown:
            raise InvalidPlan(
                "the schedule names a device that the topology lacks",
                faults=(Fault(f"{where}/devices", repr(unknown[0])),),
            )
        idle = [name for name in row.devices if number_of[name] not in homes]
        if idle:
            raise InvalidPlan(
                "the schedule has a row for a device that holds no stage",
                faults=(Fault(f"{where}/devices", f"{idle[0]!r} holds no stage"),),
                remedy="give the device a stage or leave it out of the rows",
            )
        by_home: dict[int | None, list[int]] = {}
        for name in row.devices:
            by_home.setdefault(homes[number_of[name]], []).append(number_of[name])
        for home, devices in by_home.items():
            try:
                operations = _operations(row.text, home)
            except InvalidDocument as error:
                raise InvalidPlan(error.detail, faults=(Fault(f"{where}/text", error.detail), *error.faults)) from None
            rows.append(Row(tuple(devices), operations))
    return Orders(schedule.name, tuple(rows), schedule.warmup)


def _operations(text: str, home: int | None) -> np.ndarray:
    """A row's operations, (n, 3) int32; a text that many stages share is parsed once."""
    if home is None:
        return np.array(parse_row(text), dtype=np.int32).reshape(-1, 3)
    operations = _parsed(text).copy()
    operations[operations[:, 1] == HOME, 1] = home
    return operations


@lru_cache(maxsize=64)
def _parsed(text: str) -> np.ndarray:
    return np.array(parse_row(text, HOME), dtype=np.int32).reshape(-1, 3)


def _pattern(schedule: wire.PlanSchedule) -> Pattern:
    assert schedule.pattern is not None
    operations: list[Any] = []
    for i, o in enumerate(schedule.pattern.operations):
        parsed = parse_row(o.operation)
        if len(parsed) != 1:
            raise InvalidPlan(
                "a pattern's operation is one operation",
                faults=(Fault(f"/schedule/pattern/operations/{i}", o.operation),),
            )
        kind, stage, _ = parsed[0]
        operations.append(PatternOperation(kind, stage, o.start_ns, o.shift))
    return Pattern(
        schedule.name, schedule.pattern.period_ns, schedule.pattern.micro_batches_per_period, tuple(operations)
    )

"""Programs that train a small job on a list of stages, made through the documents and the solvers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from penstock.convert import to_problem
from penstock.executor.run.chain import Chain
from penstock.executor.run.job import Job
from penstock.schemas.profile import (
    BoundaryTensor,
    Layer,
    LayerMeasurement,
    Measurement,
    ModelProfile,
    ProfileSource,
    SharedParameter,
)
from penstock.schemas.program import BACKWARD, FORWARD, Operation, Program, Sharding, parse_row
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.lowering import lower
from penstock.solvers.lowering.transports import TransportChoice
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders, Row
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.wpipe import wpipe


class Part(NamedTuple):
    """A stage: so many layers on these devices."""

    layers: int
    devices: tuple[int, ...]
    dispatch: Literal["rows", "round_robin"] = "rows"
    recompute: tuple[tuple[int, int], ...] = ()


def problem_of(
    job: Job, num_devices: int, *, bucket_bytes: int = 25_000_000, overlap: bool = True, shard_states: bool = False
) -> Problem:
    """Return a problem with the job's layers, all equally fast, on equal devices."""
    chain = Chain(job)
    shapes = chain.infer_shapes(range(2))
    sizes = [
        sum(p.numel() * p.element_size() for p in chain.build_layer(i, device="meta").parameters())
        for i in range(len(chain.specs))
    ]
    measured = LayerMeasurement(forward_ns=1000, backward_ns=2000, stash_bytes=1000)
    profile = ModelProfile(
        name=job.name,
        layers=tuple(Layer(name=name, parameter_bytes=size) for name, size in zip(chain.names, sizes, strict=True)),
        boundaries=tuple(
            tuple(
                BoundaryTensor(
                    name=name,
                    bytes_per_sample=shape.bytes_per_sample,
                    gradient_bytes_per_sample=shape.bytes_per_sample if shape.needs_grad else 0,
                )
                for name, shape in cut.items()
            )
            for cut in shapes
        ),
        shared_parameters=tuple(
            SharedParameter(name=name, layers=layers, bytes=size) for name, layers, size in chain.shared_parameters()
        ),
        measurements=(Measurement(device_kind="cpu", micro_batch_size=1, layers=(measured,) * len(chain.specs)),),
        source=ProfileSource(method="analytic", expected_error=0.5),
    )
    topology = ClusterTopology(
        name="test",
        uniform=UniformCluster(
            nodes=1,
            devices_per_node=num_devices,
            kind="cpu",
            memory_bytes=2**40,
            fabric=Fabric(bandwidth_bytes_per_s=10**9),
        ),
    )
    network = {"bucket_bytes": bucket_bytes, "overlap_all_reduce": overlap}
    request: dict[str, Any] = {"profile": profile, "topology": topology, "global_batch_size": job.batch_size}
    sharding = "over_replicas" if shard_states else "none"
    return to_problem(
        PlanRequest.model_validate(request | {"network": network, "memory": {"optimizer_sharding": sharding}})
    )


def programs_of(
    job: Job,
    parts: Sequence[Part],
    num_micro_batches: int,
    *,
    rows: Sequence[str] | None = None,
    warmup: Sequence[int] | None = None,
    schedule: Callable[[Problem, Allocation], Orders] | None = None,
    bucket_bytes: int = 25_000_000,
    overlap: bool = True,
    norm: bool = False,
    shard_states: bool = False,
    sharding: Sharding | None = None,
    tensor: int = 1,
    transport: TransportChoice = "auto",
) -> list[Program]:
    """Return programs under a K-vector (default: early backward), under one text per device, or by a schedule.

    ``tensor``: ranks that share the layers of each device. ``sharding``: what replicas share out besides states.
    """
    stages = stages_of(parts)
    devices = sorted({device for part in parts for device in part.devices})
    problem = problem_of(job, len(devices), bucket_bytes=bucket_bytes, overlap=overlap, shard_states=shard_states)
    problem = cells_of(problem, Degrees(tensor=tensor)) if tensor > 1 else problem
    if sharding is not None:
        problem = replace(problem, choice=Choice(Degrees(tensor=tensor), sharding))
    allocation = single_pipeline(stages, num_micro_batches)
    if schedule is not None:
        return lower(problem, allocation, schedule(problem, allocation), norm=norm, transport=transport)
    if rows is not None:
        orders = [parse_row(text, home=_home(parts, device)) for device, text in zip(devices, rows, strict=True)]
    else:
        ahead = warmup or [len(parts) - s for s in range(len(parts))]
        orders = [_order(parts, device, num_micro_batches, ahead) for device in devices]
    table = tuple(
        Row((device,), np.asarray(order, dtype=np.int32)) for device, order in zip(devices, orders, strict=True)
    )
    return lower(problem, allocation, Orders("test", table), norm=norm, transport=transport)


def cells_of(problem: Problem, degrees: Degrees) -> Problem:
    """Return the problem with a GPU group in the place of each device; nothing is timed at these degrees.

    A row is a sample for each mesh of a group.
    """
    size, rows = degrees.cell, problem.global_batch_size // degrees.meshes
    gpus = [replace(device, name=f"{device.name}.{lane}") for device in problem.devices for lane in range(size)]
    cells = tuple(tuple(range(first, first + size)) for first in range(0, len(gpus), size))
    real = replace(problem, devices=tuple(gpus))
    return replace(problem, choice=Choice(degrees), real=real, cells=cells, global_batch_size=rows)


def stages_of(parts: Sequence[Part]) -> tuple[Stage, ...]:
    """Return the parts as stages, one behind the other."""
    stages, first = [], 0
    for part in parts:
        stages.append(Stage(first, first + part.layers - 1, part.devices, part.dispatch, part.recompute))
        first += part.layers
    return tuple(stages)


def periodic_programs_of(
    job: Job,
    parts: Sequence[Part],
    num_micro_batches: int,
    rule: UpdateRule,
    batches: Sequence[int],
    *,
    depth: Sequence[int] | None = None,
    transport: TransportChoice = "auto",
    tensor: int = 1,
) -> list[list[Program]]:
    """Return programs without a flush, one list per number of global batches: WPipe's order, PipeDream's or 2BW's."""
    problem = problem_of(job, len({device for part in parts for device in part.devices}))
    if tensor > 1:
        problem = cells_of(problem, Degrees(tensor=tensor))
    allocation = single_pipeline(stages_of(parts), num_micro_batches)
    if rule == "double_grouped":
        pattern = wpipe(problem, allocation)
    else:
        pattern = eager(problem, allocation, update_rule=rule, depth=depth)
    return [
        lower(problem, allocation, pattern, update_rule=rule, batches=count, transport=transport) for count in batches
    ]


def averaging_programs_of(
    job: Job,
    parts: Sequence[Part],
    num_micro_batches: int,
    pipelines: int,
    *,
    staleness: int = 0,
    delta: int = 0,
    tensor: int = 1,
) -> list[Program]:
    """Return programs of N equal pipelines on the same devices, under elastic averaging."""
    problem = problem_of(job, len({device for part in parts for device in part.devices}))
    if tensor > 1:
        problem = cells_of(problem, Degrees(tensor=tensor))
    allocation = parallel_pipelines(stages_of(parts), pipelines, num_micro_batches)
    orders = advance_forward(problem, allocation, delta=delta)
    return lower(problem, allocation, orders, update_rule="elastic_averaging", staleness=staleness)


def _home(parts: Sequence[Part], device: int) -> int:
    return next(s for s, part in enumerate(parts) if device in part.devices)


def _order(parts: Sequence[Part], device: int, count: int, warmup: Sequence[int]) -> list[Operation]:
    """Order K forwards, then a backward and a forward in turn; under round robin only the replica's."""
    stage = _home(parts, device)
    ahead = min(count, warmup[stage])
    order: list[Operation] = [(FORWARD, stage, m) for m in range(ahead)]
    for m in range(count):
        order.append((BACKWARD, stage, m))
        if m + ahead < count:
            order.append((FORWARD, stage, m + ahead))
    part = parts[stage]
    if part.dispatch == "round_robin":
        turn = part.devices.index(device)
        order = [one for one in order if one[2] % len(part.devices) == turn]
    return order

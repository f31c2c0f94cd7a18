"""Programs for ``scripts/gpu-check``: stages by hand under each schedule and update rule, and plans that are judged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from penstock.convert import to_problem
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.run.job import Job
from penstock.executor.run.rank_programs import Work
from penstock.questions.answer import plan
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest, UpdateRule
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.degrees.contract import contract
from penstock.solvers.degrees.replicas import on_replicas
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.degrees import IN_ONE_STAGE, Choice, Degrees, Sharding
from penstock.solvers.model.problem import Problem
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.early_backward import one_f_one_b
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.interleaved import interleaved
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.wpipe import wpipe
from penstock.solvers.schedules.zero_bubble import zb_h1

SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero bubble": zb_h1}
MICRO_BATCHES = 4


class Layout(NamedTuple):
    """Stages as the devices of each; layers are spread evenly. Each device is a GPU group at ``degrees`` above 1.

    ``sharding``: what replicas share out, ``optimizer`` for its states. With ``gradients`` and
    ``parameters``, which move within passes, the plan has one stage.
    """

    stages: Sequence[Sequence[int]]
    schedule: str = "1f1b"
    sharding: Sharding = "none"
    degrees: Degrees = Degrees()

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len({device for stage in self.stages for device in stage}) * self.degrees.cell


def cluster(kind: str, devices: int, memory_bytes: int = 2**40) -> ClusterTopology:
    """Return a cluster of devices of a kind, all connected alike."""
    uniform = {
        "nodes": 1,
        "devices_per_node": devices,
        "kind": kind,
        "memory_bytes": memory_bytes,
        "fabric": {"bandwidth_bytes_per_s": 10**10},
    }
    return ClusterTopology.parse({"name": "gpu-check", "uniform": uniform})


def _problem_and_stages(job: Job, layout: Layout) -> tuple[Problem, tuple[Stage, ...]]:
    sizes: dict[str, Any] = {f"{name}_degrees": (size,) for name, size in layout.degrees._asdict().items() if size > 1}
    request = PlanRequest.model_validate(
        {
            "profile": analytic_profile(job, "H100", (1, job.batch_size // MICRO_BATCHES), **sizes),
            "topology": cluster("H100", layout.ranks),
            "global_batch_size": job.batch_size,
            "memory": {"optimizer_sharding": "over_replicas" if layout.sharding == "optimizer" else "none"},
        }
    )
    problem = to_problem(request)
    if layout.degrees != Degrees() or layout.sharding not in ("none", "optimizer"):
        problem = contract(problem, Choice(layout.degrees, layout.sharding))
    layers, count = len(list(job.layers())), len(layout.stages)
    edges = [layers * k // count for k in range(count + 1)]
    of_stages = [(0,)] if layout.sharding in IN_ONE_STAGE else layout.stages
    stages = (Stage(edges[k], edges[k + 1] - 1, tuple(devices)) for k, devices in enumerate(of_stages))
    return problem, tuple(stages)


def flushed(job: Job, layout: Layout, transport: Literal["gloo", "nccl"], *, norm: bool = False) -> Work:
    """Return a synchronous step under the layout's schedule."""
    problem, stages = _problem_and_stages(job, layout)
    allocation = single_pipeline(stages, MICRO_BATCHES)
    orders = SCHEDULES[layout.schedule](problem, allocation)
    return Work.of(lower(*on_replicas(problem, allocation, orders), transport=transport, norm=norm))


def ruled(job: Job, rule: UpdateRule, steps: int) -> Work:
    """Return two ranks under another update rule: a program for all steps, or for each iteration of two pipelines."""
    two = ((0,), (1,))
    problem, stages = _problem_and_stages(job, Layout((*two, *two) if rule == "double_grouped" else two))
    if rule == "elastic_averaging":
        allocation = parallel_pipelines(stages, 2, MICRO_BATCHES)
        orders = advance_forward(problem, allocation, delta=0)
        return Work.of(lower(problem, allocation, orders, update_rule=rule))
    allocation = single_pipeline(stages, MICRO_BATCHES)
    pattern = wpipe(problem, allocation) if rule == "double_grouped" else eager(problem, allocation, update_rule=rule)
    return Work((tuple(lower(problem, allocation, pattern, update_rule=rule, batches=steps)),), (0,), 0)


def whole(profile: ModelProfile, batch_size: int, micro_batch_size: int, memory_bytes: int) -> PlanFile:
    """Return the plan of one device that holds the model, whose prediction is compared with a run."""
    return plan(
        profile,
        cluster(profile.device_kinds[0], 1, memory_bytes),
        global_batch_size=batch_size,
        micro_batch_sizes=(micro_batch_size,),
        planner="dp",
        recompute="never",
    ).file

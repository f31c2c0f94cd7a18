"""The same trainings on real ranks: seconds per epoch, and a check that the losses equal the plain trainers' losses."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import NamedTuple

from curves import PIPELINES, Curve, recipe_of
from tasks import BATCH, TASKS, Task

from penstock.convert import to_problem
from penstock.executor.run.chain import Chain
from penstock.executor.run.local import run_locally
from penstock.executor.run.rank_programs import Work
from penstock.schemas.profile import BoundaryTensor, Layer, LayerMeasurement, Measurement, ModelProfile, ProfileSource
from penstock.schemas.program import Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.advance_forward import advance_forward
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.periodic.eager import eager
from penstock.solvers.schedules.periodic.wpipe import wpipe


class OnRanks(NamedTuple):
    """The seconds per epoch, ranks, and the largest difference of a loss from the plain trainer's loss."""

    seconds_per_epoch: float
    num_ranks: int
    apart: float


def measure(name: str, rule: UpdateRule, curve: Curve, epochs: int) -> OnRanks:
    """Train the first epochs of a curve again, on ranks of this machine."""
    task = TASKS[name]
    per_step = PIPELINES if rule == "elastic_averaging" else 1
    steps = epochs * task.batches_per_epoch // per_step
    programs = programs_of(task, rule, steps)
    work = Work((tuple(programs),), None if rule in ("synchronous", "elastic_averaging") else (0,))
    report = run_locally(work, f"tasks:{name}", directory=Path(__file__).parent, steps=steps, seed=curve.seed)
    apart = max(abs(a - b) for a, b in zip(report.losses, curve.losses, strict=False))
    seconds = median(report.step_times_ns) / 1e9 * task.batches_per_epoch / per_step
    return OnRanks(seconds, len(programs), apart)


def programs_of(task: Task, rule: UpdateRule, steps: int) -> list[Program]:
    """Return a program per rank: WPipe's two groups share ranks, AvgPipe's pipelines have separate ranks."""
    recipe = recipe_of(task, rule)
    ranks = len(recipe.stages) // 2 if rule == "double_grouped" else len(recipe.stages)
    problem = _problem(task, ranks)
    stages = tuple(Stage(first, last, (s % ranks,)) for s, (first, last) in enumerate(recipe.stages))
    count = recipe.num_micro_batches
    if rule == "elastic_averaging":
        allocation = parallel_pipelines(stages, PIPELINES, count)
        return lower(problem, allocation, advance_forward(problem, allocation), update_rule=rule)
    allocation = single_pipeline(stages, count)
    if rule == "synchronous":
        return lower(problem, allocation, early_backward(problem, allocation))
    pattern = wpipe(problem, allocation) if rule == "double_grouped" else eager(problem, allocation, update_rule=rule)
    return lower(problem, allocation, pattern, update_rule=rule, batches=steps)


def _problem(task: Task, ranks: int) -> Problem:
    """Return the task's layers, all equally fast, on the devices of one node."""
    chain = Chain(task)
    cost = LayerMeasurement(forward_ns=1000, backward_ns=2000, stash_bytes=1)
    profile = ModelProfile(
        name=task.name,
        layers=tuple(Layer(name=name, parameter_bytes=4) for name in chain.names),
        boundaries=tuple(
            tuple(
                BoundaryTensor(
                    name=n, bytes_per_sample=t.bytes_per_sample, gradient_bytes_per_sample=t.bytes_per_sample
                )
                for n, t in cut.items()
            )
            for cut in chain.infer_shapes(range(1))
        ),
        measurements=(Measurement(device_kind="cpu", micro_batch_size=1, layers=(cost,) * len(chain.specs)),),
        source=ProfileSource(method="analytic", expected_error=1),
    )
    fabric = Fabric(bandwidth_bytes_per_s=10**9)
    cluster = UniformCluster(nodes=1, devices_per_node=ranks, kind="cpu", memory_bytes=2**40, fabric=fabric)
    topology = ClusterTopology(name="one node", uniform=cluster)
    return to_problem(PlanRequest(profile=profile, topology=topology, global_batch_size=BATCH))

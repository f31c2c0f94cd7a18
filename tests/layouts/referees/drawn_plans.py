"""Random plans that a trainer can express, over all degrees: what the trainers' own code is asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from random import Random

from penstock.convert import to_plan, to_problem
from penstock.convert.requested_degrees import UNDIVIDED, to_degrees
from penstock.convert.trainers import MODULES, within_of
from penstock.examples import catalogue
from penstock.examples.shapes import SHAPES
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest, Target
from penstock.schemas.transformers.degrees import Framework
from penstock.shapes.profiled_degrees import DegreeOptions
from penstock.shapes.profiles import profile_of
from penstock.solvers.degrees.contract import contract
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees, modules_of, without_parts
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.trainer_limits import Within
from penstock.solvers.schedules.interleaved import groups_go
from penstock.solvers.schedules.trainer_orders import ONE_STAGE, chunks_of, order_of, ranks_of_stages

PLANS = 60
"""Plans of each trainer."""
BATCH = 48
MODELS = {"llama-3-8b": 10, "mixtral-8x7b": 8, "deepseek-v2": 8}
"""Models and their number of layers here."""
CLUSTERS = ("1x8xH100", "2x4xH100", "2x8xH100", "3x4xH100")
ROOM_BYTES = 2**43


@dataclass(frozen=True)
class Drawn:
    """A plan, and the numbers that it was drawn with, as trainers count them."""

    file: PlanFile
    degrees: Degrees
    ranks: int
    chunks: int
    number: int
    rows: int
    group: int

    @property
    def profile(self) -> ModelProfile:
        assert isinstance(self.file.request.profile, ModelProfile)
        return self.file.request.profile

    @property
    def has_experts(self) -> bool:
        return self.profile.shape is not None and self.profile.shape.experts is not None

    @property
    def stages(self) -> list[tuple[int, int]]:
        return [stage.layers for stage in self.file.plan.pipelines[0].stages]

    @property
    def world(self) -> list[str]:
        """The GPU of each of the trainer's processes."""
        stages = self.file.plan.pipelines[0].stages
        return [gpu for stage in stages[: self.ranks] for gpu in stage.devices]


@cache
def profile_at(model: str, framework: Framework, expert_tensor: int) -> ModelProfile:
    shape = SHAPES[model].model_copy(update={"layers": MODELS[model]})
    experts = None if shape.experts is None else (1, 2, 4, 8)
    degrees = DegreeOptions(context=(1, 2, 4), expert=experts, expert_tensor=expert_tensor if experts else 1)
    return profile_of(shape, framework, ("H100",), micro_batch_sizes=(1, 2), degrees=degrees)


def requested(profile: ModelProfile, cluster: str, choice: Choice) -> PlanRequest:
    document = catalogue.cluster(cluster).model_dump(mode="json", exclude_none=True)
    return PlanRequest.parse(
        {
            "schema_version": 1,
            "profile": profile.model_dump(mode="json"),
            "topology": {**document, "uniform": document["uniform"] | {"memory_bytes": ROOM_BYTES}},
            "global_batch_size": BATCH,
            **(_fields_of(choice) if (choice,) not in UNDIVIDED else {}),
            "memory": {"gradient": "fp32"},
        }
    )


def _fields_of(choice: Choice) -> dict[str, object]:
    return {"degrees": to_degrees(choice.degrees).model_dump(mode="json"), "sharding": choice.sharding}


def plan_of(seed: int, target: Target) -> Drawn:
    """Draw the plan of a seed: model, cluster, degrees, sharding, parts, order, micro-batches, recomputation."""
    random = Random(f"{target} {seed}")
    framework: Framework = "megatron" if target == "megatron" else "torch"
    while True:
        model, cluster = random.choice(sorted(MODELS)), random.choice(CLUSTERS)
        profile = profile_at(model, framework, random.choice([1, 2]) if target == "megatron" else 1)
        available = [Degrees(**each.degrees.model_dump()) for each in profile.variants or ()]
        choice = Choice(random.choice([Degrees(), *available, *available]), random.choice(["none", "optimizer"]))
        if choice.degrees != Degrees() and (target == "deepspeed" or not _cells_fill(cluster, choice.degrees.cell)):
            continue
        request = requested(profile, cluster, choice)
        problem = to_problem(request)
        plan = _drawn(random, request, target, contract(problem, choice) if problem.choices else problem)
        if plan is not None:
            return plan


def _cells_fill(cluster: str, cell: int) -> bool:
    nodes, each = (int(word) for word in cluster.split("xH100")[0].split("x"))
    return each % cell == 0 if cell <= each else cell % each == 0 and nodes * each % cell == 0


def _drawn(random: Random, request: PlanRequest, target: Target, cells: Problem) -> Drawn | None:
    """Draw a plan on all GPU groups; return None where the drawn values do not go together."""
    profile = request.profile
    assert isinstance(profile, ModelProfile)
    within, degrees, layers = within_of(target, profile), cells.degrees, cells.num_layers
    ranks = random.choice([r for r in range(1, cells.num_devices + 1) if cells.num_devices % r == 0 and r <= 8])
    per = cells.num_devices // ranks
    names = [name for name in within.runs(ranks) if name in ONE_STAGE or ranks <= layers // 2]
    name = random.choice(names)
    counts = [m for m in range(1, BATCH + 1) if cells.global_batch_size % (m * per) == 0]
    counts = [m for m in counts if name != "interleaved" or within.group(ranks, m)]
    if not counts:
        return None
    number = random.choice(counts)
    chunks = random.choice(list(chunks_of(name, layers // ranks)))
    group = within.group(ranks, number) if name == "interleaved" else None
    if group is not None and not within.rounds:
        group = random.choice([g for g in range(ranks, number + 1) if groups_go(ranks, number, g)])
    bounds = [0, *sorted(random.sample(range(1, layers), ranks * chunks - 1)), layers]
    rank_of = ranks_of_stages(name, ranks, chunks)
    plain = [
        Stage(a, b - 1, tuple(range(rank * per, (rank + 1) * per)))
        for rank, (a, b) in zip(rank_of, pairwise(bounds), strict=True)
    ]
    stages = _recomputing(random, cells, within, plain)
    allocation = single_pipeline(stages, number)
    overlap = random.choice([True, False]) if target == "megatron" else True
    orders = order_of(cells, allocation, name, group)
    judged = JudgedPlan.of("by-hand", allocation, orders, simulate(cells, allocation, orders, overlap=overlap), overlap)
    file = PlanFile(plan=to_plan(cells, request, judged, ()), request=request)
    rows = cells.global_batch_size // number // per
    return Drawn(file, degrees, ranks, chunks, number, rows, group or ranks)


def _recomputing(random: Random, cells: Problem, within: Within, plain: list[Stage]) -> tuple[Stage, ...]:
    """Draw single modules, where the profile and the trainer have them, or a recomputation of whole layers."""
    possible = [module for module in cells.modules if module in MODULES.get(within.trainer, {})]
    if possible and random.random() < 0.3:
        modules = without_parts(modules_of([random.sample(possible, random.randint(1, len(possible)))]))
        return tuple(replace(stage, modules=modules) for stage in plain)
    how = random.choice(list(within.ways(plain)))
    return tuple(replace(stage, recompute=within.segments(stage, how)) for stage in plain)


def neighbours(drawn: Drawn, process: int, sizes: Sequence[int], over: Sequence[int]) -> list[int]:
    """Return the processes that differ from ``process`` in the coordinates ``over``.

    The first of ``sizes`` counts fastest.
    """
    each = len(drawn.world) // drawn.ranks
    stage = process // each * each

    def places(number: int) -> list[int]:
        coordinates = []
        for size in sizes:
            coordinates.append(number % size)
            number //= size
        return [*coordinates, number]

    origin = places(process - stage)
    kept = [i for i in range(len(origin)) if i not in over]
    return [stage + n for n in range(each) if all(places(n)[i] == origin[i] for i in kept)]

"""The matrix of meshes: every pair of what a run with degrees can be made of, in few runs, and the programs of each."""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from typing import Any, NamedTuple

from mesh_jobs import BATCH, JOBS

from penstock.convert import to_problem
from penstock.executor.profiling.analytic import analytic_profile
from penstock.executor.runtime.interface import Precision
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import SHARDINGS, WITHIN_PASSES, Program
from penstock.schemas.request import PlanRequest
from penstock.schemas.topology import ClusterTopology, Fabric, UniformCluster
from penstock.solvers.degrees.contract import contract
from penstock.solvers.degrees.replicas import on_replicas
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.lowering import lower
from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.degrees import Choice, Degrees, Modules
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.timeline import Timeline
from penstock.solvers.schedules.early_backward import one_f_one_b
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.interleaved import interleaved
from penstock.solvers.schedules.zero_bubble import zb_h1

WORLD = 8
MICRO_BATCHES = 4
SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zero-bubble": zb_h1}


class Case(NamedTuple):
    """A run: a job of ``mesh_jobs``, the degrees inside a cell, cells side by side and one after the other."""

    job: str
    dtype: str
    tensor: int
    context: int
    expert: int
    replicas: int
    pipeline: int
    sharding: str
    schedule: str
    recompute: str

    @property
    def degrees(self) -> Degrees:
        """The degrees within a GPU group."""
        return Degrees(tensor=self.tensor, context=self.context, expert=self.expert)

    @property
    def is_legal(self) -> bool:
        """Whether the values go together, each says something, and the world has ranks and samples enough.

        Modules have costs at degrees alone, and are not recomputed where backwards come in halves. Routing is compared
        in fp64 alone: rounding of fp32 sends a token elsewhere.
        """
        stages = self.pipeline > 1 or self.schedule != "interleaved"
        if self.sharding in WITHIN_PASSES:
            stages = self.pipeline == 1 and self.schedule in ("gpipe", "1f1b")
        shared_out = self.sharding == "none" or self.replicas > 1 or self.degrees.cell > self.tensor
        experts = self.expert == 1 or self.job == "moe"
        experts = experts and (self.job != "moe" or self.dtype == "float64")
        modules = self.recompute not in MODULES or (self.schedule != "zero-bubble" and self.degrees.cell > 1)
        rows = self.replicas * self.degrees.meshes <= BATCH // MICRO_BATCHES
        return stages and shared_out and experts and modules and rows and self.ranks <= WORLD

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.degrees.cell * self.replicas * self.pipeline

    def __str__(self) -> str:
        """Return the name that pytest shows."""
        sizes = f"t{self.tensor}c{self.context}x{self.expert}d{self.replicas}p{self.pipeline}"
        return "-".join((self.job, self.dtype, sizes, self.sharding, self.schedule, self.recompute))


MODULES: dict[str, Modules] = {"attention": ("attention",), "modules": ("mlp", "norm")}
"""Kinds of recomputation of modules."""
VALUES: dict[str, tuple[Any, ...]] = {
    "job": ("gpt", "llama", "tied", "moe"),
    "dtype": ("float64", "float32"),
    "tensor": (2, 1),
    "context": (2, 1),
    "expert": (2, 1),
    "replicas": (2, 1),
    "pipeline": (2, 1),
    "sharding": ("optimizer", "none", *SHARDINGS),
    "schedule": tuple(SCHEDULES),
    "recompute": ("none", "full", *MODULES),
}


def all_products() -> list[Case]:
    """Return every legal case."""
    return [case for case in map(Case._make, itertools.product(*VALUES.values())) if case.is_legal]


def covering(size: int, seed: int | None = None) -> list[Case]:
    """Return cases with every combination of ``size`` values that a legal case has, by greedy choice.

    Each case adds the most new combinations, which count for less where more ranks have to run (by the root of their
    number, which is what a case costs). Of equals it is the first, in the order that ``seed`` draws: other seeds choose
    other cases.
    """
    cases = all_products()
    if seed is not None:
        random.Random(seed).shuffle(cases)
    bits: dict[tuple[tuple[int, Any], ...], int] = {}
    has = {
        case: sum(1 << bits.setdefault(each, len(bits)) for each in itertools.combinations(enumerate(case), size))
        for case in cases
    }
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(cases, key=lambda case: (has[case] & missing).bit_count() / math.sqrt(case.ranks))
        chosen.append(best)
        missing &= ~has[best]
    return chosen


class Lowered(NamedTuple):
    """A case as it is judged, and as ranks run it; ``apart``: with each replica of a stage as a device."""

    profile: ModelProfile
    cells: Problem
    apart: Problem
    allocation: Allocation
    timeline: Timeline
    programs: list[Program]


def contracted(case: Case, precision: Precision = "fp32") -> Problem:
    """Return the case's GPU groups with the tracer's costs, for a run in ``precision``."""
    request = _request(case, profile_of(case.job, case.degrees, precision))
    return contract(to_problem(request), Choice(case.degrees, case.sharding))


def lowered(case: Case) -> Lowered:
    """Return the case's plan and its programs."""
    profile = profile_of(case.job, case.degrees, "fp32")
    cells = contracted(case)
    judged = case._replace(replicas=1) if case.sharding in WITHIN_PASSES else case
    allocation = single_pipeline(_stages(judged, len(profile.layers)), MICRO_BATCHES)
    orders: Orders = SCHEDULES[case.schedule](cells, allocation)
    apart, *others = on_replicas(cells, allocation, orders)
    programs = lower(apart, *others)
    return Lowered(profile, cells, apart, allocation, simulate(cells, allocation, orders), programs)


@cache
def profile_of(job: str, degrees: Degrees, precision: Precision) -> ModelProfile:
    """Compute the costs of a job's layers, alone and at these degrees: profiles have no fp64."""
    return analytic_profile(
        JOBS[f"{job}_float32"],
        "H100",
        (1, BATCH // MICRO_BATCHES),
        precision=precision,
        tensor_degrees=(degrees.tensor,),
        context_degrees=(degrees.context,),
        expert_degrees=(degrees.expert,),
    )


def _request(case: Case, profile: ModelProfile) -> PlanRequest:
    uniform = UniformCluster(
        nodes=1,
        devices_per_node=case.ranks,
        kind="H100",
        memory_bytes=2**36,
        fabric=Fabric(bandwidth_bytes_per_s=10**11),
    )
    return PlanRequest.model_validate(
        {
            "profile": profile,
            "topology": ClusterTopology(name="world", uniform=uniform),
            "global_batch_size": BATCH,
            "memory": {"precision": "full"},
            "network": {"bucket_bytes": 20_000},
            "degrees": case.degrees._asdict(),
            "sharding": case.sharding,
        }
    )


def _stages(case: Case, num_layers: int) -> tuple[Stage, ...]:
    """Return equal stages, two on each device where they are interleaved; replicas are neighbours."""
    number = case.pipeline * (2 if case.schedule == "interleaved" else 1)
    blocks = num_layers - 2
    edges = [0, *(1 + blocks * k // number for k in range(1, number)), num_layers]
    return tuple(
        Stage(
            first,
            end - 1,
            tuple(range(case.replicas * (k % case.pipeline), case.replicas * (k % case.pipeline + 1))),
            recompute=((first, end - 1),) if case.recompute == "full" else (),
            modules=MODULES.get(case.recompute, ()),
        )
        for k, (first, end) in enumerate(itertools.pairwise(edges))
    )

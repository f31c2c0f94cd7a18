"""The plain layout that people write by hand: equal stages one after the other, equally replicated, 1F1B.

Transformer layers are split as the framework of the profile splits them. The embedding is with the first and the head
with the last. Ranks count as Megatron's do (``tp-cp-ep-dp-pp``): tensor fastest, then replicas, then stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

from penstock.convert import to_plan, to_problem
from penstock.convert.layer_roles import roles_of
from penstock.convert.requested_degrees import refuse_several_stages, to_degrees
from penstock.convert.requests import inline_documents
from penstock.convert.trainers import within_of
from penstock.layouts.drawn import Drawn, by_hand, ordered, placed, world_of
from penstock.schemas.errors import Fault, InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import PlanRequest, Target
from penstock.schemas.transformers.degrees import Framework, Module
from penstock.shapes.layout import FULL, Layout, layers_of_stages, uneven_said
from penstock.shapes.legality import broken
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.costs.memory import shortages
from penstock.solvers.degrees.cells import cells_of
from penstock.solvers.degrees.contract import contract
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.degrees import Choice, Degrees, Sharding, modules_of, without_parts
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.model.trainer_limits import Recomputing, Within

_TRAINERS: dict[Framework, Target] = {"megatron": "megatron", "torch": "torchtitan"}
"""The trainer whose micro-batch groups and recomputation a framework's layouts have."""


class EvenLayout(NamedTuple):
    """A layout as a judged plan; ``missing_bytes`` is what the GPU with the largest shortage lacks."""

    file: PlanFile
    missing_bytes: int

    @property
    def fits(self) -> bool:
        """True where every GPU has the memory."""
        return self.missing_bytes == 0


def even_layout(
    request: PlanRequest,
    *,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    expert_tensor: int = 1,
    pipeline: int = 1,
    virtual_stages: int = 1,
    micro_batch_size: int = 1,
    sharding: Sharding | None = None,
    recompute: Literal["none", "full"] | Sequence[Module] = "none",
) -> EvenLayout:
    """Judge the plain layout of a request's model on all of its GPUs.

    Parameters
    ----------
    request
        Model, cluster and batch. Where it does not allow the layout's degrees and sharding, the plan's request
        is the same with these.
    tensor, context, expert, expert_tensor, pipeline, virtual_stages
        GPUs that split each layer, each sequence, a layer's experts and each expert; stages in a row, and parts of
        the model on each of them. The remaining factor of the GPUs is the number of replicas.
    micro_batch_size
        Samples of a micro-batch on one replica, as trainers count them; a plan counts the samples of all replicas.
    sharding
        The states that replicas share out; None: as in the request's memory model.
    recompute
        ``full``: every transformer layer keeps its input only. Or modules that every layer recomputes, such as
        ``["norm", "mlp"]``, at tensor degrees for which the profile has their costs.

    A layout that does not fit into memory is an answer. Raises UnsupportedRequest for a layout that the framework
    cannot train, and for unknown transformer layers; InvalidDocument for a batch that cannot be shared.
    """
    profile, _topology = inline_documents(request)
    degrees = Degrees(tensor, context, expert, expert_tensor)
    layout = Layout(
        **degrees._asdict(),
        pipeline=pipeline,
        virtual_stages=virtual_stages,
        micro_batch_size=micro_batch_size,
        global_batch_size=request.global_batch_size,
        recompute=FULL if recompute == "full" else frozenset(),
        sharding=sharding or "optimizer",
        framework=profile.framework or "megatron",
        uneven=True,
    )
    refuse_several_stages(profile, sharding, pipeline * virtual_stages)
    _refuse_illegal(problem := to_problem(request), profile, layout)
    request, cells = _at(problem, request, Choice(degrees, sharding))
    even = Even(profile, cells)
    allocation = _recomputing(cells, even.allocation(layout), () if isinstance(recompute, str) else recompute)
    overlap = cells.rules.overlap_all_reduce
    judged, faults = by_hand(cells, allocation, even.orders(layout, allocation), overlap)
    short = shortages(cells, allocation, judged.timeline)
    if faults and not short:
        raise InvalidPlan(f"the layout does not verify: {faults[0]}")
    bounds = () if short else (schedule_bound(cells, allocation, judged.schedule, overlap=overlap),)
    plan = _with_flags(to_plan(cells, request, judged, bounds), even.blocks, layout)
    return EvenLayout(PlanFile(plan=plan, request=request), short[0].missing_bytes if short else 0)


def _with_flags(plan: Plan, layers: int, layout: Layout) -> Plan:
    """Return the plan with the flags that its stages need, if they are not even."""
    words = uneven_said(layers, layout)
    return plan.model_copy(update={"assumptions": (*plan.assumptions, words)}) if words else plan


def _recomputing(cells: Problem, allocation: Allocation, modules: Sequence[Module]) -> Allocation:
    """Return the allocation with modules of every layer recomputed.

    Raises UnsupportedRequest for modules without costs.
    """
    if not modules:
        return allocation
    unknown = [module for module in modules if module not in cells.modules]
    if unknown:
        at = "no degree above 1" if cells.choice is None else str(cells.choice.degrees)
        raise UnsupportedRequest(
            f"the profile has no costs of recomputing {unknown[0]} at {at}",
            remedy=f"recompute only {', '.join(cells.modules)}"
            if cells.modules
            else "a tensor degree above 1, or `full`",
        )
    again = without_parts(modules_of([modules]))
    pipelines = (
        replace(pipeline, stages=tuple(replace(stage, modules=again) for stage in pipeline.stages))
        for pipeline in allocation.pipelines
    )
    return replace(allocation, pipelines=tuple(pipelines))


class Even:
    """The plain layouts of a model at one choice of degrees. Raises UnsupportedRequest where roles are not known."""

    def __init__(self, profile: ModelProfile, cells: Problem) -> None:
        self.cells, self._world = cells, world_of(cells, "", None)
        self._within: Within = within_of(_TRAINERS[profile.framework or "megatron"], profile)
        roles = roles_of(profile)
        if roles is None:
            raise UnsupportedRequest(
                f"a plain layout needs embedding, transformer layers and head; the layer names of {profile.name!r} do "
                "not tell them apart",
                remedy="name the layers embedding, block.0 … and head, or write the plan's stages by hand",
            )
        self._first, self.blocks = roles.first, roles.number

    def allocation(self, layout: Layout) -> Allocation:
        """Build the stages. Raises UnsupportedRequest for unequal stages, InvalidDocument for unequal replicas."""
        return placed(self.cells, self._within, self._drawn(layout), self._world)

    def orders(self, layout: Layout, allocation: Allocation) -> Orders:
        """Build 1F1B, interleaved with virtual stages.

        Raises InvalidDocument for micro-batches that it does not take.
        """
        return ordered(self.cells, self._within, self._drawn(layout), allocation)

    def _drawn(self, layout: Layout) -> Drawn:
        split = layers_of_stages(self.blocks, layout)
        if split is None:
            raise UnsupportedRequest(
                f"{self.blocks} transformer layers cannot be split over {layout.pipeline} pipeline ranks with "
                f"{layout.virtual_stages} stages each"
            )
        return Drawn(
            stages=self._ranges(split),
            ranks=layout.pipeline,
            schedule="early-backward" if layout.virtual_stages == 1 else "interleaved",
            rows=layout.micro_batch_size,
            recompute=Recomputing("uniform", 1) if layout.recompute == FULL else Recomputing(),
        )

    def _ranges(self, split: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Return the first and last layer of each stage, with the layers before and after the transformer layers."""
        edges = [self._first + blocks for blocks in accumulate(split, initial=0)]
        edges[0], edges[-1] = 0, self.cells.num_layers
        return tuple((first, end - 1) for first, end in pairwise(edges))


def _refuse_illegal(problem: Problem, profile: ModelProfile, layout: Layout) -> None:
    """Raise UnsupportedRequest for a layout that the framework cannot train.

    GPUs that fill no group are not counted.
    """
    named = (*Degrees._fields, "pipeline", "virtual_stages", "micro_batch_size")
    if wrong := [f"{name} {value}" for name in named if (value := getattr(layout, name)) < 1]:
        raise InvalidDocument(f"the layout has {', '.join(wrong)}; its numbers have to be at least 1")
    degrees = Degrees(layout.tensor, layout.context, layout.expert, layout.expert_tensor)
    gpus = degrees.cell * len(cells_of(problem, degrees))
    group = degrees.mesh * layout.pipeline
    counted = replace(layout, data=0 if gpus % group else gpus // group)
    rules = [] if profile.shape is None else broken(profile.shape, counted, gpus)
    if rules:
        raise UnsupportedRequest(
            f"no such layout: {rules[0].sentence}",
            faults=tuple(Fault(f"/{one.degree}", one.sentence, one.rule.replace("_", "-")) for one in rules),
        )


def _at(problem: Problem, request: PlanRequest, choice: Choice) -> tuple[PlanRequest, Problem]:
    """Return a request that allows the choice, and its problem there."""
    if choice == Choice() and not problem.choices:
        return request, problem
    if choice not in problem.choices:
        pinned = {"degrees": to_degrees(choice.degrees), "sharding": choice.sharding}
        request = request.model_copy(update=pinned)
        problem = to_problem(request)
    return request, contract(problem, choice)

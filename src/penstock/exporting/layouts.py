"""A plan in another trainer's words, or why that trainer cannot express it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import get_args

from penstock.convert.layer_roles import roles_of, transformer_of
from penstock.convert.requested_degrees import degrees_of, refuse_divided
from penstock.convert.trainers import within_of
from penstock.layouts import deepspeed, ranges
from penstock.layouts.drawn import Expressed
from penstock.layouts.legal import refuse_illegal, unlike
from penstock.layouts.limits import faults, order_name, recomputing_of
from penstock.layouts.megatron import bridge, megatron
from penstock.layouts.torchtitan import torchtitan
from penstock.planning.judge import Judgement, judge
from penstock.schemas.errors import Fault, InvalidPlan, PenstockError, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import Target
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import ContextKind
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.degrees import Sharding
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders

WRITERS: dict[str, Callable[[Expressed], str]] = {
    "megatron": megatron.write,
    "megatron-bridge": bridge.write,
    "torchtitan": torchtitan.write,
    "deepspeed": deepspeed.write,
}
TRAINER_OF = {"megatron-bridge": "megatron"}
"""The trainer of each form with another name than its trainer."""


def layout_text(file: PlanFile, to: str, release: str | None = None) -> str:
    """Write the plan's stages, order and batch as the trainer reads them; ``ranges`` is for any trainer.

    ``release`` is torchtitan's, whose releases read different files; the default is the newest.

    Raises InvalidPlan for a plan that does not verify, UnsupportedRequest where the trainer cannot express it: which
    stage, and why.
    """
    if to == "ranges":
        refuse_divided(file.plan, "ranges of layers are not written")
    judgement = judge(file)
    allocation, schedule = judgement.allocation, judgement.schedule
    if judgement.faults or allocation is None or schedule is None:
        raise InvalidPlan(f"the plan does not verify: {judgement.faults[0]}", remedy="see `penstock verify`")
    if to == "ranges":
        if not isinstance(schedule, Orders) or file.plan.update_rule != "synchronous":
            raise UnsupportedRequest(
                f"ranges of layers describe a synchronous step; the plan has {file.plan.update_rule} updates",
                remedy="a plan with update_rules: [synchronous], or --to plan",
            )
        return ranges.write(judgement.problem, allocation, schedule, file.plan.content_hash())
    if to == "torchtitan":
        release = torchtitan.release_of(release)
        return torchtitan.write(expressed(file, judgement, to), release)
    return WRITERS[to](expressed(file, judgement, TRAINER_OF.get(to, to)))


def expressible(file: PlanFile, judgement: Judgement) -> dict[str, str]:
    """Return the trainers, each with the reason why it cannot express a plan; no text where it can."""
    reasons = {}
    for target in get_args(Target):
        try:
            WRITERS[target](expressed(file, judgement, target))
            reasons[target] = ""
        except PenstockError as error:
            reasons[target] = next((fault.detail for fault in error.faults), error.detail)
    return reasons


def expressed(file: PlanFile, judgement: Judgement, target: str) -> Expressed:
    """Build the plan as a trainer sees it. Raises UnsupportedRequest as ``layout_text``."""
    profile, topology, problem = file.request.profile, file.request.topology, judgement.problem
    allocation, schedule = judgement.allocation, judgement.schedule
    assert isinstance(profile, ModelProfile)
    assert isinstance(topology, ClusterTopology)
    assert allocation is not None
    assert schedule is not None
    stated = transformer_of(file.request)
    within = within_of(target, profile, stated)
    roles = roles_of(profile, stated)
    beyond = faults(problem, allocation, schedule, within)
    if beyond or not isinstance(schedule, Orders):
        raise UnsupportedRequest(
            f"{target} cannot express this plan: {beyond[0]}",
            faults=tuple(Fault("/plan", sentence, "target") for sentence in beyond),
            remedy=f"plan for this trainer: penstock plan … --target {target} (target: {target} in a request)",
        )
    stages, number = allocation.stages, allocation.num_micro_batches
    ranks = len({stage.devices for stage in stages})
    order, recompute = order_name(allocation, schedule, within), recomputing_of(stages, within)
    assert order is not None
    assert recompute is not None
    degrees, meshes = problem.degrees, problem.samples_per_row
    replicas = stages[0].replicas * meshes
    groups = {device.gpus for node in topology.expanded().nodes for device in node.devices}
    plan = Expressed(
        title=f"{target} layout of plan {file.plan.content_hash()[:19]} ({profile.name}), made by Penstock",
        profile=profile,
        roles=roles,
        stages=tuple((stage.first, stage.last) for stage in stages),
        ranks=ranks,
        replicas=replicas,
        order=order.name,
        group=order.group,
        rows=file.plan.global_batch_size // number // replicas,
        num_micro_batches=number,
        global_batch_size=file.plan.global_batch_size,
        recompute=recompute,
        overlap=file.plan.overlap_all_reduce,
        sharding=_sharding(problem),
        gradient=file.request.memory.gradient,
        nodes=_nodes(problem, stages[:ranks]),
        assumptions=(
            *([roles.assumption] if roles is not None and target != "deepspeed" else []),
            *(f"each device is a group of {size} GPUs (tensor, context parallel)" for size in sorted(groups - {1})),
            *unlike(profile, degrees, target, kind := _context_kind(profile, file.plan)),
        ),
        degrees=degrees,
        modules=stages[0].modules,
        context_kind=kind,
        gpus=max(groups),
    )
    refuse_illegal(plan, target)
    return plan


def _sharding(problem: Problem) -> Sharding:
    """Return the sharding over replicas, by the choice, else by the memory rules."""
    stated = None if problem.choice is None else problem.choice.sharding
    return stated or ("optimizer" if problem.memory.shard_states else "none")


def _nodes(problem: Problem, stages: Sequence[Stage]) -> tuple[tuple[str, int], ...]:
    """Return the nodes in the order of ranks, with the GPUs that are used on each."""
    real = problem if problem.real is None else problem.real
    cells = [problem.cells[device] if problem.real is not None else (device,) for s in stages for device in s.devices]
    used = [real.devices[gpu].node for cell in cells for gpu in cell]
    return tuple((real.network.node_names[node], len(list(group))) for node, group in groupby(used))


def _context_kind(profile: ModelProfile, plan: Plan) -> ContextKind | None:
    """Return how GPUs that share a sequence see all keys, by the profile's forward exchanges; None for one GPU."""
    degrees = degrees_of(plan.degrees)
    if degrees.context == 1:
        return None
    variant = next(each for each in profile.variants or () if degrees_of(each.degrees) == degrees)
    layers = [layer for point in variant.measurements for layer in point.layers]
    moved = {each.operation for layer in layers for each in layer.collectives if each.over == "context"}
    kinds: dict[str, ContextKind] = {"send": "ring", **{kind: kind for kind in get_args(ContextKind)}}
    return next((kinds[operation] for operation in ("send", "all_to_all", "all_gather") if operation in moved), None)

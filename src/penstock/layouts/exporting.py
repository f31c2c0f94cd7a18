"""A plan in another trainer's words, or why that trainer cannot express it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

from penstock.convert.degrees import refuse_divided
from penstock.layouts import deepspeed, ranges
from penstock.layouts.drawn import Expressed
from penstock.layouts.limits import faults, order_name, recomputing_of, within_of
from penstock.layouts.megatron import megatron
from penstock.layouts.roles import roles_of, transformer_of
from penstock.layouts.torchtitan import torchtitan
from penstock.planning.judge import Judgement, judge
from penstock.schemas.errors import Fault, InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology
from penstock.solvers.model.schedule import Orders

WRITERS: dict[str, Callable[[Expressed], str]] = {
    "megatron": megatron.write,
    "deepspeed": deepspeed.write,
}


def layout_text(file: PlanFile, to: str, release: str | None = None) -> str:
    """The plan's stages, order and batch as the trainer reads them; ``ranges``: for any.

    ``release`` of torchtitan, whose releases read different files; else the newest.

    Raises InvalidPlan for a plan that does not verify, UnsupportedRequest where the trainer cannot express it: which
    stage, and why.
    """
    refuse_divided(file.plan, f"a layout for {to} is not written")
    judgement = judge(file)
    allocation, schedule = judgement.allocation, judgement.schedule
    if judgement.faults or allocation is None or schedule is None:
        raise InvalidPlan(f"the plan does not verify: {judgement.faults[0]}", remedy="see `penstock verify`")
    if to == "ranges":
        if not isinstance(schedule, Orders) or file.plan.update_rule != "synchronous":
            raise UnsupportedRequest(
                f"ranges of layers are of one flushed step; the plan has {file.plan.update_rule} updates",
                remedy="a plan with update_rules: [synchronous], or --to plan",
            )
        return ranges.write(judgement.problem, allocation, schedule, file.plan.content_hash())
    if to == "torchtitan":
        release = torchtitan.release_of(release)
        return torchtitan.write(expressed(file, judgement, to), release)
    return WRITERS[to](expressed(file, judgement, to))


def expressed(file: PlanFile, judgement: Judgement, target: str) -> Expressed:
    """The plan as a trainer sees it. Raises UnsupportedRequest as ``layout_text``."""
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
            remedy=f"the best plan that it can express: penstock plan … --target {target} (target: {target} in a "
            "request)",
        )
    stages, number = allocation.stages, allocation.num_micro_batches
    ranks = len({stage.devices for stage in stages})
    used = [problem.devices[d].node for stage in stages[:ranks] for d in stage.devices]
    order, recompute = order_name(allocation, schedule, within), recomputing_of(stages, within)
    assert order is not None
    assert recompute is not None
    groups = {device.gpus for node in topology.expanded().nodes for device in node.devices}
    return Expressed(
        title=f"{target} layout of plan {file.plan.content_hash()[:19]} ({profile.name}), made by Penstock",
        profile=profile,
        roles=roles,
        stages=tuple((stage.first, stage.last) for stage in stages),
        ranks=ranks,
        replicas=stages[0].replicas,
        order=order.name,
        group=order.group,
        rows=file.plan.global_batch_size // number // stages[0].replicas,
        num_micro_batches=number,
        global_batch_size=file.plan.global_batch_size,
        recompute=recompute,
        overlap=file.plan.overlap_all_reduce,
        shard_states=problem.memory.shard_states,
        gradient=file.request.memory.gradient,
        nodes=tuple((problem.network.node_names[node], len(list(group))) for node, group in groupby(used)),
        assumptions=(
            *([roles.assumption] if roles is not None and target != "deepspeed" else []),
            *(f"each device is a group of {size} GPUs (tensor, context parallel)" for size in sorted(groups - {1})),
        ),
    )

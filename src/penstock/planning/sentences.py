"""Sentences that describe a plan, made from simulated numbers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.planning.bound_sentences import bound_sentences
from penstock.schemas.amounts import amount, duration, percent, ranges
from penstock.schemas.api.words import recomputed
from penstock.schemas.topology import ClusterTopology
from penstock.schemas.transformers.degrees import Degrees, Sharding
from penstock.solvers.degrees.shares import exposed_share
from penstock.solvers.model.degrees import SHARDED
from penstock.solvers.model.plan_shape import MOST_LISTED, are_in_turn, in_words, is_data_parallel, micro_batches, shape

if TYPE_CHECKING:
    from penstock.planning.judge import Judgement
    from penstock.schemas.plan import DevicePrediction, Plan, Prediction, Stage
    from penstock.solvers.explanation.idle import Idle
    from penstock.solvers.model.timeline import Timeline


def subtitle(plan: Plan, topology: ClusterTopology | str) -> str:
    """Return the plan in one line: its shape, the devices it leaves idle, its micro-batches, and its planner."""
    again = ""
    if plan.degrees is not None:
        again = ", no recomputation" if (what := recomputation(plan)) is None else f", recomputing {what}"
    shared = "" if plan.sharding in (None, "none") else f", {SHARDED[plan.sharding]}"
    return (
        f"{used(plan, topology)}{shared}{again}; a global batch of {plan.global_batch_size:,} in "
        f"{micro_batches(plan.num_micro_batches, plan.micro_batch_size)}; planner {plan.planner}, "
        f"schedule {plan.schedule.name}, {plan.update_rule.replace('_', ' ')} updates"
    )


def used(plan: Plan, topology: ClusterTopology | str) -> str:
    """Return ``4 stages on 30 devices; 2 of the cluster's 32 stay idle``; without the second part for a hash."""
    if isinstance(topology, str):
        return _in_words(plan)
    every = topology.num_devices
    idle = every - len({device for stages in _stage_devices(plan) for devices in stages for device in devices})
    stay = "stays" if idle == 1 else "stay"
    return _in_words(plan) + (f"; {idle:,} of the cluster's {every:,} {stay} idle" if idle else "")


def _in_words(plan: Plan) -> str:
    degrees = plan.degrees or Degrees()
    return shape(_stage_devices(plan), degrees.gpus, degrees.initials)


def replicas(plan: Plan, stage: Stage) -> int:
    """Return how many replicas of a stage there are: its devices, or its model-parallel groups of GPUs."""
    return len(stage.devices) // (plan.degrees or Degrees()).gpus


def _stage_devices(plan: Plan) -> list[list[tuple[str, ...]]]:
    return [[stage.devices for stage in pipeline.stages] for pipeline in plan.pipelines]


def sentences(judgement: Judgement, timeline: Timeline, idle: Sequence[Idle]) -> Iterator[str]:
    """Describe the shape, the busiest device, where the rest of the time goes, memory, and the bounds.

    ``idle``: how the devices spend their time.
    """
    plan = judgement.plan
    assert plan.prediction is not None
    total = plan.prediction.time_per_global_batch_ns
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    yield _shape(plan, stages)
    yield from _degrees(judgement)
    busiest = max(plan.prediction.devices, key=lambda use: use.busy_ns)
    waits = [each for each in idle if each.slower_ns]
    if waits:
        row = max(idle, key=lambda each: each.busy_ns)
        used = {use.device: use for use in plan.prediction.devices}[judgement.problem.devices[row.devices[0]].name]
        busy_ns = row.busy_ns // timeline.window_rounds
        busiest = used.model_copy(update={"device": row.gpus[0].name, "busy_ns": busy_ns})
    holder = next(number for number, stage in enumerate(stages) if busiest.device in stage.devices)
    yield (
        f"The busiest device is {busiest.device} (stage {holder}, layers {ranges(stages[holder].layers)}): it computes "
        f"for {duration(busiest.busy_ns)} of {duration(total)} ({percent(busiest.busy_ns / total)})."
    )
    yield _rest(plan.prediction.bubble, timeline, busiest)
    yield from (_slower(each) for each in waits)
    yield _memory(plan.prediction.devices)
    yield from bound_sentences(plan)


def _slower(row: Idle) -> str:
    """Return how long devices of one kind wait for slower ones that compute the same micro-batches, as a sentence."""
    gpu, number = row.gpus[0], len(row.gpus)
    who = f"{gpu.name}, of kind {gpu.kind}, waits" if number == 1 else f"{number:,} devices of kind {gpu.kind} wait"
    share = percent(row.slower_ns / max(1, row.busy_ns + row.idle_ns))
    return f"In addition, {who} for slower devices of the same stage {share} of the time."


def _shape(plan: Plan, stages: list[Stage]) -> str:
    counts = [replicas(plan, stage) for stage in stages]
    stage_devices = _stage_devices(plan)
    batches = micro_batches(plan.num_micro_batches, plan.micro_batch_size)
    if len(stage_devices) > 1 or is_data_parallel(stage_devices) or are_in_turn(stage_devices):
        cut = f"{plan.planner} uses {_in_words(plan)}."
    else:
        cut = f"{plan.planner} cut the model into {len(stages)} stage{'s' if len(stages) > 1 else ''}"
        if len(set(counts)) > 1:
            cut += f", on {in_words(counts)} devices"
        elif counts[0] > 1:
            what = "devices" if plan.degrees is None or plan.degrees.gpus == 1 else f"× {plan.degrees.initials}"
            cut += f", {'each ' if len(stages) > 1 else ''}on {counts[0]} {what}"
        cut += "."
    if plan.schedule.pattern is not None:
        return (
            f"{cut} A global batch is {batches}; they follow each other without a flush in the {plan.schedule.name} "
            f"order, with {plan.update_rule.replace('_', ' ')} updates."
        )
    if plan.update_rule == "elastic_averaging":
        return (
            f"{cut} In each iteration every pipeline takes a global batch of {batches} in the {plan.schedule.name} "
            "order, and then their parameters are averaged."
        )
    return f"{cut} Each step runs {batches} in the {plan.schedule.name} order."


_SHARED: dict[Sharding | None, str] = {
    "optimizer": "the optimizer's states",
    "gradients": "the optimizer's states and gradients",
    "parameters": "the optimizer's states, gradients and parameters, which are gathered layer by layer for each pass",
    "parameters_kept": "the optimizer's states and parameters, which stay gathered from their first use to the step",
}


def _degrees(judgement: Judgement) -> Iterator[str]:
    """Describe how GPUs share layers, what replicas share out, and the time of collectives among the GPUs."""
    problem = judgement.problem
    if problem.choice is None:
        return
    size, sharding = problem.degrees.cell, problem.choice.sharding
    phrases = [f"{size} GPUs hold each replica of a stage together ({problem.choice.degrees})"] if size > 1 else []
    if sharding not in (None, "none"):
        phrases.append(f"replicas share out {_SHARED[sharding]}")
    if phrases:
        sentence = " and ".join(phrases)
        yield f"{sentence[0].upper()}{sentence[1:]}."
    if (modules := recomputed_modules(judgement.plan)) is not None:
        yield f"Recomputed: {modules}."
    share = exposed_share(problem, judgement.allocation) if judgement.allocation is not None else 0
    if share:
        yield (
            f"Of the time of passes, {percent(float(share))} is communication among these GPUs that computation does "
            "not hide."
        )


def recomputed_modules(plan: Plan) -> str | None:
    """Return which modules stages recompute: ``mlp and norm on every stage``; None where they recompute none."""
    return _on_stages(plan, lambda stage: not isinstance(stage.recompute, str | tuple))


def recomputation(plan: Plan) -> str | None:
    """Return what stages recompute: ``norm on every stage``; None where they recompute nothing."""
    return _on_stages(plan, lambda stage: stage.recompute != "none")


def _on_stages(plan: Plan, counted: Callable[[Stage], bool]) -> str | None:
    """Return what the counted stages recompute, and how many stages do; None where no stage counts."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    counts = Counter(recomputed(stage).replace("full", "all layers") for stage in stages if counted(stage))
    if len(counts) > MOST_LISTED:
        counts = Counter({"some layers": counts.total()})
    phrases = [
        what
        if len(stages) == 1
        else f"{what} on {'every stage' if number == len(stages) else f'{number} of {len(stages)} stages'}"
        for what, number in counts.items()
    ]
    return ", ".join(phrases) or None


def pace(prediction: Prediction) -> Iterator[tuple[str, str]]:
    """Yield name and value of each figure of a transformer's pace that the prediction has."""
    if prediction.tokens_per_s_per_gpu is not None:
        yield "tokens/s per GPU", f"{prediction.tokens_per_s_per_gpu:,.0f}"
    if prediction.model_flops_utilisation is not None:
        yield "MFU", percent(prediction.model_flops_utilisation)


def _rest(bubble: float, timeline: Timeline, busiest: DevicePrediction) -> str:
    if timeline.window_rounds < timeline.rounds:
        return (
            f"Per global batch it waits for transfers or all-reduces alone for {duration(busiest.communication_ns)} "
            f"and idles for {duration(busiest.idle_ns)}, measured over {timeline.window_rounds} global batches of the "
            f"steady state. All devices together are idle {percent(bubble)} of the time."
        )
    return (
        f"It waits for transfers or all-reduces alone for {duration(busiest.communication_ns)} and idles for "
        f"{duration(busiest.idle_ns)}; filling the pipeline takes {duration(timeline.fill_ns)}, draining it "
        f"{duration(timeline.drain_ns)}. All devices together are idle {percent(bubble)} of the time."
    )


def _memory(devices: tuple[DevicePrediction, ...]) -> str:
    fullest = max(devices, key=lambda use: use.peak_memory_bytes / max(use.memory_bytes, 1))
    parts = fullest.memory.model_dump()
    name, largest = max(parts.items(), key=lambda item: int(item[1]))
    return (
        f"The fullest device is {fullest.device}: {amount(fullest.peak_memory_bytes)} of "
        f"{amount(fullest.memory_bytes)}, most of it {name.removesuffix('_bytes')} ({amount(largest)})."
    )

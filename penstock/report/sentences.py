"""What a plan does, in sentences made from the judge's numbers alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.report.bounds import bound_sentences
from penstock.report.words import amount, duration, percent, ranges

if TYPE_CHECKING:
    from penstock.api import Judgement
    from penstock.schemas.plan import DevicePrediction, Plan, Stage
    from penstock.solvers.timeline import Timeline


def sentences(judgement: Judgement, timeline: Timeline) -> Iterator[str]:
    """The shape, the busiest device, where the rest of the time goes, memory, and the bounds."""
    plan = judgement.plan
    assert plan.prediction is not None
    total = plan.prediction.time_per_global_batch_ns
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    yield _shape(plan, stages)
    busiest = max(plan.prediction.devices, key=lambda use: use.busy_ns)
    holder = next(number for number, stage in enumerate(stages) if busiest.device in stage.devices)
    yield (
        f"The busiest device is {busiest.device} (stage {holder}, layers {ranges(stages[holder].layers)}): it computes "
        f"for {duration(busiest.busy_ns)} of {duration(total)} ({percent(busiest.busy_ns / total)})."
    )
    yield _rest(plan.prediction.bubble, timeline, busiest)
    yield _memory(plan.prediction.devices)
    yield from bound_sentences(plan)


def _shape(plan: Plan, stages: list[Stage]) -> str:
    counts = [len(stage.devices) for stage in stages]
    shape = f"{len(stages)} stage{'s' if len(stages) > 1 else ''}"
    if len(plan.pipelines) > 1:
        shape += f" in {len(plan.pipelines)} pipelines"
    if len(set(counts)) > 1:
        shape += f", replicated {':'.join(str(count) for count in counts)}"
    elif counts[0] > 1:
        shape += f", {'each ' if len(stages) > 1 else ''}on {counts[0]} devices"
    batches = f"{plan.num_micro_batches} micro-batches of at most {plan.micro_batch_size} samples"
    cut = f"{plan.planner} cut the model into {shape}."
    if plan.schedule.pattern is not None:
        return (
            f"{cut} {batches[0].upper()}{batches[1:]} make a global batch; they follow each other without a flush in "
            f"the {plan.schedule.name} order, with {plan.update_rule} updates."
        )
    if plan.update_rule == "elastic_averaging":
        return (
            f"{cut} In each iteration every pipeline takes a global batch of {batches} in the {plan.schedule.name} "
            "order, and then they average."
        )
    return f"{cut} Each step runs {batches} in the {plan.schedule.name} order."


def _rest(bubble: float, timeline: Timeline, busiest: DevicePrediction) -> str:
    if timeline.window_rounds < timeline.rounds:
        return (
            f"Per global batch it waits for transfers or all-reduces alone for {duration(busiest.communication_ns)} "
            f"and idles for {duration(busiest.idle_ns)}, measured over {timeline.window_rounds} global batches of the "
            f"steady state. All devices together do not compute {percent(bubble)} of the time."
        )
    return (
        f"It waits for transfers or all-reduces alone for {duration(busiest.communication_ns)} and idles for "
        f"{duration(busiest.idle_ns)}; filling the pipeline takes {duration(timeline.fill_ns)}, draining it "
        f"{duration(timeline.drain_ns)}. All devices together do not compute {percent(bubble)} of the time."
    )


def _memory(devices: tuple[DevicePrediction, ...]) -> str:
    fullest = max(devices, key=lambda use: use.peak_memory_bytes / max(use.memory_bytes, 1))
    parts = fullest.memory.model_dump()
    name, largest = max(parts.items(), key=lambda item: int(item[1]))
    return (
        f"The fullest device is {fullest.device}: {amount(fullest.peak_memory_bytes)} of "
        f"{amount(fullest.memory_bytes)}, most of it {name.removesuffix('_bytes')} ({amount(largest)})."
    )

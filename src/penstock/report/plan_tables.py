"""The tables of a plan: stages, devices, bounds, operations and compared degrees, for pages, report and terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from penstock.planning.sentences import replicas
from penstock.report.blocks import NONE, Cell, Column, Table, of_amount, of_duration, of_share
from penstock.report.device_names import alike, times, together
from penstock.report.drawing.picture import NAMES, Picture
from penstock.report.gists import some
from penstock.schemas.amounts import ranges
from penstock.schemas.api.jobs import Alternative
from penstock.schemas.api.words import alternative_words, recomputed
from penstock.schemas.plan import Certificate, DevicePrediction, Plan, Stage
from penstock.schemas.profile import ModelProfile

MAX_ROWS = 400
MEMORY_PARTS = (
    "parameters", "gradients", "optimizer", "versions", "activations", "buffers", "workspace", "context",
)  # fmt: skip


def stages_table(plan: Plan, profile: ModelProfile, *, most: int | None = MAX_ROWS) -> Table:
    """Return a row for each stage: its layers, devices, share of the time, and memory of its fullest device."""
    again = any(stage.recompute != "none" for pipeline in plan.pipelines for stage in pipeline.stages)
    heads = (
        Column("stage", True),
        Column("layers"),
        Column("names", brief=False),
        Column("devices"),
        Column("replicas", True, brief=False),
        Column("dispatch", brief=False),
        Column("recompute", brief=again),
        Column("warm-up", True, brief=False),
        Column("parameters", True),
        Column("computing", True),
        Column("peak memory", True),
        Column("of", True),
    )
    return Table.of(heads, _stages(plan, profile), "Which layers each stage holds, and on which devices.", most=most)


def stages_in_short(plan: Plan, profile: ModelProfile, most: int = 5) -> Table:
    """Return the stages where there is room for a few rows: equal neighbours are one row."""
    return stages_table(plan, profile, most=None).brief().folded(3, most)


def _stages(plan: Plan, profile: ModelProfile) -> Iterator[tuple[Cell | str, ...]]:
    uses = {use.device: use for use in plan.prediction.devices} if plan.prediction else {}
    total = plan.prediction.time_per_global_batch_ns if plan.prediction else 0
    several = len(plan.pipelines) > 1
    stages = [(p, stage) for p, pipeline in enumerate(plan.pipelines) for stage in pipeline.stages]
    for number, (p, stage) in enumerate(stages):
        first, last = stage.layers
        names = [profile.layers[i].name for i in dict.fromkeys((first, last))]
        warmup = plan.schedule.warmup
        number_of_replicas = replicas(plan, stage)
        yield (
            Cell(f"{number} (pipeline {p})" if several else f"{number}", number),
            Cell(ranges(stage.layers), first),
            " … ".join(names),
            Cell(some(stage.devices), title=", ".join(stage.devices) if 3 < len(stage.devices) <= MAX_ROWS else ""),
            Cell(f"{number_of_replicas}", number_of_replicas),
            stage.dispatch.replace("_", " ") if number_of_replicas > 1 else NONE,
            recomputed(stage),
            f"{warmup[number]}" if number < len(warmup) else NONE,
            of_amount(profile.held_bytes(first, last)),
            *_used(stage, uses, total),
        )


def _used(stage: Stage, uses: dict[str, DevicePrediction], total: int) -> tuple[Cell | str, ...]:
    predicted = [uses[device] for device in stage.devices if device in uses]
    if not predicted or not total:
        return NONE, NONE, NONE
    fullest = max(predicted, key=lambda use: use.peak_memory_bytes)
    return of_share(max(use.busy_ns for use in predicted) / total), *map(
        of_amount, (fullest.peak_memory_bytes, fullest.memory_bytes)
    )


def devices_table(plan: Plan) -> Table:
    """Return a row for each group of devices with the same times and memory."""
    assert plan.prediction is not None
    total = plan.prediction.time_per_global_batch_ns
    devices = plan.prediction.devices
    parts = [part for part in MEMORY_PARTS if any(getattr(use.memory, f"{part}_bytes") for use in devices)]
    heads = ("computing", "communicating", "idle", "peak memory", "has", *parts)
    rows = (
        (
            Cell(times(use.device, count * together(plan))),
            *(of_share(share / total) for share in (use.busy_ns, use.communication_ns, use.idle_ns)),
            of_amount(use.peak_memory_bytes),
            of_amount(use.memory_bytes),
            *(of_amount(getattr(use.memory, f"{part}_bytes")) for part in parts),
        )
        for use, count in alike(devices)
    )
    caption = "Shares of the time per global batch; memory at its peak, by use."
    return Table.of((Column("device"), *(Column(head, True) for head in heads)), rows, caption, most=MAX_ROWS)


def bounds_table(certificates: Sequence[Certificate]) -> Table:
    """Return a row for each bound. No plan that a bound covers takes less time than the bound."""
    heads = Column("covers"), Column("bound", True), Column("gap", True), Column("tolerance", True), Column("method")
    caption = "No plan that a bound covers takes less time; the gap says by how much this plan is above it."
    rows = (
        (c.model, of_duration(c.bound_ns), of_share(c.gap), of_duration(c.tolerance_ns), c.method) for c in certificates
    )
    return Table.of(heads, rows, caption)


def operations_table(picture: Picture) -> Table:
    """Return the timeline as a table: of devices that do the same, the first one."""
    heads = (
        Column("device"),
        Column("operation"),
        Column("stage", True),
        Column("micro-batch", True),
        Column("start", True),
        Column("end", True),
    )
    lanes = {lane.strip: lane for lane in reversed(picture.lanes)}
    counted = Counter(lane.strip for lane in picture.lanes)
    rows: list[tuple[Cell | str, ...]] = []
    for strip in sorted(lanes):
        blocks = picture.strips[strip].compute
        device = times(lanes[strip].device, counted[strip] * picture.together)
        for i in range(min(len(blocks), MAX_ROWS - len(rows))):
            letter = blocks.letters[blocks.kind[i]]
            number = str(blocks.number[i]) if blocks.number[i] >= 0 else NONE
            spans = (of_duration(float(value[i])) for value in (blocks.start_ns, blocks.end_ns))
            rows.append((device, NAMES[letter], str(blocks.stage[i]), number, *spans))
    total = sum(len(picture.strips[strip].compute) for strip in lanes)
    return replace(Table.of(heads, rows), total=total)


def alternatives_table(alternatives: Sequence[Alternative]) -> Table:
    """Return a row for each choice of degrees that was compared, the best one first."""
    heads = (
        Column("degrees"),
        Column("time", True),
        Column("peak memory", True),
        Column("at least", True),
        Column("why not"),
    )
    caption = "Each choice with the best plan found there, and a bound that no plan of it beats."
    rows = (
        (
            alternative_words(each),
            of_duration(each.time_ns),
            of_amount(each.peak_memory_bytes),
            of_duration(each.bound_ns),
            each.why or "the answer",
        )
        for each in alternatives
    )
    return Table.of(heads, rows, caption)

"""The comparison of a user's cuts, simulated, with the plan: why they are slower or impossible.

Both critical paths add up to their plans' times, so the difference of the times is the sum of the differences of the
paths' parts: computing of the stage that takes most of it, computing elsewhere (filling and draining), transfers,
all-reduces, updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.schemas.amounts import shortage
from penstock.schemas.errors import Fault, InvalidDocument, UnsupportedRequest, meant
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.explanation.critical_path import CriticalPath, critical_path
from penstock.solvers.explanation.reordering import USUAL, BestOrder, best_order, schedules_of
from penstock.solvers.model.allocation import Allocation, single_pipeline, stages_on
from penstock.solvers.model.micro_batches import candidates, measured_rows
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Bound, JudgedPlan
from penstock.solvers.planners.proposal import unreachable
from penstock.solvers.schedules.catalogue import SCHEDULES, schedule_row


@dataclass(frozen=True)
class Layout:
    """A user's layout: where each stage but the first begins, by layer number or name, and optional settings.

    ``devices``: the names of each stage's devices. Without them the request's devices are used in their order,
    ``replicas`` to each stage, or as evenly as possible. Without ``schedule`` the plan's is used. Without
    ``num_micro_batches`` the plan's number and all numbers that give measured sizes are tried.
    """

    cuts: tuple[str, ...]
    replicas: tuple[int, ...] = ()
    devices: tuple[tuple[str, ...], ...] = ()
    schedule: str | None = None
    num_micro_batches: int | None = None


class Difference(NamedTuple):
    """A part of the critical path, per global batch, in their plan and in ours."""

    name: str
    theirs_ns: int
    ours_ns: int

    @property
    def more_ns(self) -> int:
        """Return how much longer the part takes in their plan, in ns."""
        return self.theirs_ns - self.ours_ns


@dataclass(frozen=True)
class Compared:
    """Their layout, simulated; without a plan it cannot run."""

    reordered: BestOrder
    bound: Bound | None
    differences: tuple[Difference, ...]
    sentence: str


def compare_layout(problem: Problem, ours: JudgedPlan, layout: Layout) -> Compared:
    """Compare a layout with the plan.

    Raises InvalidDocument for an invalid layout, UnsupportedRequest for a schedule that does not order its stages.
    """
    allocation = allocation_of(problem, ours, layout)
    if layout.schedule is not None and not schedule_row(layout.schedule).for_any_stages:
        raise UnsupportedRequest(
            f"schedule {layout.schedule!r} does not order the stages of a given layout",
            remedy=f"one of {', '.join(row.name for row in SCHEDULES.values() if row.for_any_stages)}",
        )
    if (apart := unreachable(problem, allocation)) is not None:
        return Compared(BestOrder(None, None, apart), None, (), f"it cannot run: {apart}")
    usual = schedules_of(ours) if ours.update_rule == "synchronous" else USUAL
    schedules = usual if layout.schedule is None else (layout.schedule,)
    tried = [allocation] if layout.num_micro_batches else _in_other_numbers(problem, allocation)
    layouts = [_at(problem, ours, each, schedules) for each in tried]
    best = min(layouts, key=lambda each: each.reordered.rank)
    runs = sum(1 for each in layouts if each.reordered.plan is not None)
    number = allocation.num_micro_batches
    if runs < 2 or best.reordered.plan is None:
        return best
    sentence = f"{best.sentence}; of {runs} numbers of micro-batches, our {number} suits it best"
    if best is not layouts[0]:
        other = f"with {best.reordered.plan.allocation.num_micro_batches} micro-batches, which suit it best"
        sentence = f"{other}: {best.sentence}; with our {number}: {layouts[0].sentence}"
    return replace(best, sentence=sentence)


def _in_other_numbers(problem: Problem, allocation: Allocation) -> list[Allocation]:
    """Return the allocation, then its variants with numbers of micro-batches that give its stages measured sizes."""
    replicas = {len(stage.devices) for stage in allocation.stages}
    sizes = problem.micro_batch_sizes or tuple(rows * many for rows in measured_rows(problem) for many in replicas)
    fed = candidates(replace(problem, micro_batch_sizes=sizes))
    others = {batch.num_micro_batches for batch in fed} - {allocation.num_micro_batches}
    return [allocation, *(single_pipeline(allocation.stages, number) for number in sorted(others))]


def _at(problem: Problem, ours: JudgedPlan, allocation: Allocation, schedules: tuple[str, ...]) -> Compared:
    reordered = best_order(problem, allocation, schedules, overlap=ours.overlap_all_reduce)
    if reordered.plan is None:
        return Compared(reordered, None, (), f"it cannot run: {reordered.why}")
    return compared(problem, ours, reordered)


def compared(problem: Problem, ours: JudgedPlan, reordered: BestOrder) -> Compared:
    """Return the comparison of a simulated plan, fitting or not, with ours."""
    theirs = reordered.plan
    assert theirs is not None
    bound = schedule_bound(problem, theirs.allocation, theirs.schedule, theirs.update_rule)
    parts = differences(critical_path(problem, theirs), theirs, critical_path(problem, ours), ours)
    broken = broken_pin(problem, theirs.allocation)
    pinned = "" if broken is None else f"; and it breaks a pin: {broken}"
    return Compared(reordered, bound, parts, _sentence(problem, reordered, ours, parts) + pinned)


def allocation_of(problem: Problem, ours: JudgedPlan, layout: Layout) -> Allocation:
    """Return the stages that a layout describes. Raises InvalidDocument naming each mistake."""
    starts = [0, *_starts(problem, layout.cuts)]
    devices = _devices(problem, layout, len(starts))
    number = layout.num_micro_batches or ours.allocation.num_micro_batches
    if not 1 <= number <= problem.global_batch_size:
        raise _wrong(
            "/num_micro_batches", f"{problem.batch_samples} samples cannot be split into {number} micro-batches"
        )
    return single_pipeline(stages_on(devices, [*starts, problem.num_layers]), number)


def _starts(problem: Problem, cuts: Sequence[str]) -> list[int]:
    """Return the layer numbers of the cuts. A name names a stage's first layer."""
    starts, before = [], 0
    for place, cut in enumerate(cuts):
        layer = _layer(problem, cut, place)
        where = f"/cuts/{place}"
        if layer >= problem.num_layers:
            raise _wrong(where, f"there is no layer {layer}; the last one is {problem.num_layers - 1}")
        if layer <= before:
            raise _wrong(where, f"stage {place + 1} would begin with layer {layer}, stage {place} with layer {before}")
        if not problem.cuttable[layer - 1]:
            names = problem.layer_names[layer - 1], problem.layer_names[layer]
            raise _wrong(where, f"the profile allows no cut between {names[0]!r} and {names[1]!r}")
        starts.append(layer)
        before = layer
    return starts


def _layer(problem: Problem, cut: str, place: int) -> int:
    text = cut.strip()
    if text.isdecimal() and len(text) < 10:
        return int(text)
    layers = [layer for layer, name in enumerate(problem.layer_names) if name == text]
    if len(layers) == 1:
        return layers[0]
    if layers:
        raise _wrong(f"/cuts/{place}", f"layers {layers} all have the name {text!r}; give a number")
    remedy = meant(text, problem.layer_names, f"layer names look like {problem.layer_names[0]!r}")
    raise _wrong(f"/cuts/{place}", f"no layer has the name {text!r}", remedy)


def _devices(problem: Problem, layout: Layout, stages: int) -> list[tuple[int, ...]]:
    if layout.devices:
        return _named_devices(problem, layout, stages)
    if stages > problem.num_devices:
        raise _wrong("/cuts", f"{stages} stages need {stages} devices; there are {problem.num_devices}")
    share, more = divmod(problem.num_devices, stages)
    replicas = layout.replicas or tuple(share + 1 if s < more else share for s in range(stages))
    if len(replicas) != stages:
        raise _wrong("/replicas", f"{len(replicas)} replica counts are given for {stages} stages")
    if min(replicas) < 1 or sum(replicas) > problem.num_devices:
        raise _wrong("/replicas", f"{list(replicas)} replicas are impossible on {problem.num_devices} devices")
    result, first = [], 0
    for count in replicas:
        result.append(tuple(range(first, first + count)))
        first += count
    return result


def _named_devices(problem: Problem, layout: Layout, stages: int) -> list[tuple[int, ...]]:
    number_of = {device.name: d for d, device in enumerate(problem.devices)}
    if len(layout.devices) != stages:
        raise _wrong("/devices", f"devices of {len(layout.devices)} stages are given, but there are {stages}")
    if layout.replicas and layout.replicas != tuple(map(len, layout.devices)):
        raise _wrong("/replicas", f"{list(layout.replicas)} differ from the numbers of devices in `devices`")
    seen: set[str] = set()
    for s, names in enumerate(layout.devices):
        for name in names:
            if name not in number_of:
                remedy = meant(name, number_of, f"device names look like {problem.devices[0].name!r}")
                raise _wrong(f"/devices/{s}", f"the topology has no device {name!r}", remedy)
            if name in seen:
                raise _wrong(f"/devices/{s}", f"device {name!r} is given twice")
            seen.add(name)
        if not names:
            raise _wrong(f"/devices/{s}", f"stage {s} has no device")
    return [tuple(number_of[name] for name in names) for names in layout.devices]


def _wrong(where: str, what: str, remedy: str | None = None) -> InvalidDocument:
    return InvalidDocument(f"the layout is not valid: {what}", faults=(Fault(where, what, "layout"),), remedy=remedy)


def differences(
    theirs: CriticalPath, their_plan: JudgedPlan, ours: CriticalPath, our_plan: JudgedPlan
) -> tuple[Difference, ...]:
    """Return the differences of the paths, part by part; for plans without a flush per global batch, rounded down."""
    result = []
    parts = _parts(theirs), _parts(ours)
    for name in parts[0]:
        result.append(Difference(name, parts[0][name], parts[1][name]))
    rest = [plan.value_ns - sum(part.values()) for plan, part in zip((their_plan, our_plan), parts, strict=True)]
    return (*result, Difference("rounding", *rest)) if any(rest) else tuple(result)


def _parts(path: CriticalPath) -> dict[str, int]:
    shares = path.shares()
    computing = [share.length_ns for share in shares if share.what == "operation"]
    amounts = {
        "computing of the binding stage": max(computing, default=0),
        "computing elsewhere (filling and draining)": sum(computing) - max(computing, default=0),
        "transfers": sum(share.length_ns for share in shares if share.what == "transfer"),
        "all-reduces": sum(share.length_ns for share in shares if share.what == "all-reduce"),
        "updates": sum(share.length_ns for share in shares if share.what == "update"),
    }
    return {name: amount // path.rounds for name, amount in amounts.items()}


def _sentence(problem: Problem, reordered: BestOrder, ours: JudgedPlan, parts: tuple[Difference, ...]) -> str:
    theirs, short = reordered.plan, reordered.shortage
    assert theirs is not None
    more = theirs.value_ns - ours.value_ns
    share = f"{100 * abs(more) / ours.value_ns:.1f} %"
    if more == 0:
        pace = "it takes exactly as long"
    else:
        side = [d for d in parts if (d.more_ns > 0) == (more > 0) and d.more_ns]
        reasons = sorted(side, key=lambda d: -abs(d.more_ns))[:2]
        reason = " and ".join(f"{_percent(d.more_ns, ours.value_ns)} {d.name}" for d in reasons)
        pace = f"it takes {share} {'longer' if more > 0 else 'less'}" + (f": {reason}" if reason else "")
    if short is None:
        return pace
    device = problem.devices[short.device].name
    s = theirs.allocation.held_stages[short.device][0]
    return (
        f"it does not fit: stage {s} (layers {short.first_layer}–{short.last_layer}) needs "
        f"{shortage(short.needed_bytes, short.available_bytes, device)}; with enough memory {pace}"
    )


def _percent(nanoseconds: int, whole: int) -> str:
    return f"{100 * nanoseconds / whole:+.1f} %"

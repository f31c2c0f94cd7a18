"""Explanations out: paths, splits, sensitivities and what-ifs of the core become documents with names and words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from penstock.schemas.amounts import three_digits
from penstock.schemas.api import explanation as wire
from penstock.schemas.program import KINDS
from penstock.solvers.bounds.schedule_bound import schedule_bound
from penstock.solvers.explanation.binding import Sensitivity
from penstock.solvers.explanation.critical_path import CriticalPath, PathLink, critical_path
from penstock.solvers.explanation.idle import Idle
from penstock.solvers.explanation.other_layout import Compared, Difference
from penstock.solvers.explanation.run import Because
from penstock.solvers.explanation.what_if import Row, headroom
from penstock.solvers.explanation.why_not import MOST, Planned, Turn, differences, turns
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.plan_shape import in_words
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan

MAX_SEGMENTS = 500
SHOWN_OPERATIONS = 6
LEAST = 0.0005
"""The share of the time below which a part is no reason."""

BECAUSE: dict[Because, str] = {
    "start": "nothing comes before",
    "input": "its input arrives",
    "device": "device busy",
    "order": "ready, but other work comes first",
    "channel": "link taken",
    "gradients": "its gradients arrive",
    "bucket": "bucket before it",
    "reduction": "all-reduce ends",
}


def to_path(problem: Problem, plan: JudgedPlan, path: CriticalPath) -> wire.Path:
    """Build the path, with neighbouring links on one device taken together."""
    segments = list(_segments(problem, plan.allocation, path))
    return wire.Path(
        span=path.span,
        global_batches=path.rounds,
        length_ns=path.length_ns,
        links=len(path.steps),
        shares=tuple(
            wire.PathShare(what=s.what, stage=s.place, length_ns=s.length_ns, share=s.length_ns / path.length_ns)
            for s in path.shares()
        ),
        segments=tuple(segments[:MAX_SEGMENTS]),
    )


def _segments(problem: Problem, allocation: Allocation, path: CriticalPath) -> Iterator[wire.PathSegment]:
    def alike(step: PathLink) -> tuple[object, ...]:
        return (step.what, step.stage, step.devices, step.detail if step.what in ("transfer", "all-reduce") else 0)

    for _key, group in groupby((step for step in path.steps if step.length_ns), key=alike):
        steps = list(group)
        first = steps[0]
        yield wire.PathSegment(
            what=first.what,
            stage=first.stage,
            devices=tuple(problem.devices[d].name for d in first.devices),
            text=_text(allocation, steps),
            links=len(steps),
            start_ns=first.start_ns,
            length_ns=sum(step.length_ns for step in steps),
            because=BECAUSE[first.because],
        )


def _text(allocation: Allocation, steps: Sequence[PathLink]) -> str:
    first = steps[0]
    numbers = [step.number for step in steps]
    if first.what == "operation":
        named = [f"{KINDS[step.detail]}{step.number}" for step in steps]
        if len(named) > SHOWN_OPERATIONS:
            named = [*named[: SHOWN_OPERATIONS - 1], "…", named[-1]]
        return " ".join(named)
    if first.what == "transfer":
        sent = "activations" if first.detail == 0 else "gradients"
        return f"{sent} of {_listed(numbers)} to stage {first.stage + 1 - 2 * first.detail}"
    if first.what == "all-reduce" and first.detail:
        return "gradient of a tied parameter" if len(steps) == 1 else f"gradients of {len(steps)} tied parameters"
    if first.what == "all-reduce":
        return f"gradients of stage {first.stage}, {len(steps)} bucket{'s' if len(steps) > 1 else ''}"
    return "optimizer step"


def _listed(numbers: Sequence[int]) -> str:
    return f"micro-batch {numbers[0]}" if len(numbers) == 1 else f"micro-batches {numbers[0]} … {numbers[-1]}"


def to_idle(problem: Problem, plan: JudgedPlan, idle: Idle) -> wire.IdleOut:
    """Build one entry of the split bubble."""
    parts = idle._asdict()
    parts["num_gpus"] = len(parts.pop("gpus"))
    mixed = parts["num_gpus"] < sum(len(problem.gpus(device)) for device in idle.devices)
    names = idle.gpus if mixed else [problem.devices[device] for device in idle.devices]
    parts["devices"] = tuple(each.name for each in names)
    first, last = plan.timeline.window_ns
    return wire.IdleOut(whole_ns=last - first, global_batches=plan.timeline.window_rounds, **parts)


def to_sensitivity(plan: JudgedPlan, sensitivity: Sensitivity) -> wire.SensitivityOut:
    """Build one sensitivity, relative to the plan's time."""
    ratio = sensitivity.time_ns / plan.value_ns
    return wire.SensitivityOut(
        thing=sensitivity.thing,
        sentence=sensitivity.sentence,
        time_ns=sensitivity.time_ns,
        ratio=ratio,
        how=sensitivity.how,
    )


def to_what_if(plan: JudgedPlan, row: Row) -> wire.WhatIf:
    """Build one row of the table."""
    best = row.plan
    return wire.WhatIf(
        name=row.name,
        sentence=row.sentence,
        how=row.how,
        time_ns=best.value_ns if best else None,
        ratio=best.value_ns / plan.value_ns if best else None,
        headroom_bytes=row.headroom_bytes,
        bound_ns=row.bound_ns,
        shape=shape(best) if best else "",
        why=row.why,
    )


def shape(plan: JudgedPlan) -> str:
    """Describe a plan in a few words: stages, replicas, micro-batches, schedule."""
    stages = plan.allocation.stages
    shown = in_words([len(stage.devices) for stage in stages])
    again = sum(1 for stage in stages if stage.recomputes)
    kind = f"{len(stages)} stage{'s' if len(stages) > 1 else ''} on {shown}"
    recomputing = f", {again} recompute" if again else ""
    return f"{kind}{recomputing}, M = {plan.allocation.num_micro_batches}, {plan.schedule.name}"


def to_layout(problem: Problem, ours: JudgedPlan, compared: Compared) -> wire.LayoutComparison:
    """Build the comparison of both layouts side by side."""
    theirs, bound = compared.reordered.plan, compared.bound
    our_bound_ns = schedule_bound(problem, ours.allocation, ours.schedule, ours.update_rule).bound_ns
    return wire.LayoutComparison(
        fits=compared.reordered.fits,
        sentence=compared.sentence,
        ours=_side(problem, ours, our_bound_ns),
        theirs=None if theirs is None or bound is None else _side(problem, theirs, bound.bound_ns),
        differences=tuple(
            wire.DifferenceOut(name=d.name, theirs_ns=d.theirs_ns, ours_ns=d.ours_ns) for d in compared.differences
        ),
    )


def _side(problem: Problem, plan: JudgedPlan, bound_ns: int) -> wire.LayoutSide:
    path = critical_path(problem, plan)
    on_path = dict.fromkeys(("transfer", "all-reduce"), 0)
    for share in path.shares():
        if share.what in on_path:
            on_path[share.what] += share.length_ns // path.rounds
    layers = ", ".join(f"{s.first}–{s.last} × {len(s.devices)}" for s in plan.allocation.stages)
    return wire.LayoutSide(
        stages=f"{shape(plan)} (layers {layers})",
        time_ns=plan.value_ns,
        bubble=plan.timeline.bubble,
        peak_memory_bytes=plan.timeline.peak_memory_bytes,
        headroom_bytes=headroom(problem, plan),
        transfers_ns=on_path["transfer"],
        all_reduces_ns=on_path["all-reduce"],
        bound_ns=bound_ns,
    )


def to_why_not(question: str, planner: str, theirs: Planned, ours: Planned, bound_ns: int) -> wire.WhyNot:
    """Compare another choice's plan with ours."""
    ratio = theirs.plan.value_ns / ours.plan.value_ns
    parts = differences(theirs, ours)
    return wire.WhyNot(
        question=question,
        choice=str(theirs.problem.choice),
        planner=planner,
        sentence=f"{theirs.problem.choice} {_pace(ratio, parts, ours.plan.value_ns)}",
        time_ns=theirs.plan.value_ns,
        ratio=ratio,
        bound_ns=bound_ns,
        shape=shape(theirs.plan),
        differences=tuple(wire.DifferenceOut(name=d.name, theirs_ns=d.theirs_ns, ours_ns=d.ours_ns) for d in parts),
        turns=tuple(_turn(each, theirs, ours) for each in turns(theirs, ours)),
    )


def _pace(ratio: float, parts: Sequence[Difference], whole_ns: int) -> str:
    """Describe how much longer or less it takes, and the parts that cause most of it."""
    if ratio == 1:
        return "takes exactly as long"
    side = [part for part in parts if (part.more_ns > 0) == (ratio > 1) and abs(part.more_ns) > LEAST * whole_ns]
    largest = sorted(side, key=lambda part: -abs(part.more_ns))[:2]
    reasons = " and ".join(f"{100 * part.more_ns / whole_ns:+.1f} % {part.name}" for part in largest)
    return f"takes {100 * abs(ratio - 1):.1f} % {'longer' if ratio > 1 else 'less'}" + (
        f": {reasons}" if reasons else ""
    )


def _turn(turn: Turn, theirs: Planned, ours: Planned) -> wire.Turn:
    quicker, slower = sorted((ours, theirs), key=lambda each: each.plan.value_ns)
    winner = str(slower.problem.choice)
    of = {"quicker": quicker, "slower": slower, "both": None}[turn.of]
    choice = None if of is None else str(of.problem.choice)
    named = f"the {turn.number} of {'both' if choice is None else choice}"
    wins = "it wins" if choice == winner else f"{winner} wins"
    if turn.factor is None:
        sentence = f"no factor up to {MOST} on {named}, slower or quicker, is enough that {wins}"
        return wire.Turn(number=turn.number, choice=choice, factor=None, sentence=sentence)
    side, times = ("slower", turn.factor) if turn.factor > 1 else ("quicker", 1 / turn.factor)
    sentence = f"{named} would have to be {three_digits(float(times))} × {side} than stated before {wins}"
    return wire.Turn(number=turn.number, choice=choice, factor=float(turn.factor), sentence=sentence)


class Gain(NamedTuple):
    """A change and the time that it leads to."""

    sentence: str
    time_ns: int


REALISTIC = ("bandwidth=2", "memory=2", "devices=", "micro-batches=", "recompute=")


def most_helpful(plan: JudgedPlan, rows: Sequence[Row], sensitivities: Sequence[Sensitivity]) -> str:
    """Return the feasible change that helps most: a what-if, or a change of a link, memory or a stage."""
    gains = [
        Gain(f"{row.sentence} ({row.how})", row.plan.value_ns)
        for row in rows
        if row.plan is not None and row.name.startswith(REALISTIC)
    ]
    gains += [
        Gain(f"{s.sentence} ({s.how})", s.time_ns)
        for s in sensitivities
        if s.thing in ("link", "cut", "memory", "stage")
    ]
    best = min(gains, key=lambda gain: gain.time_ns, default=None)
    if best is None or best.time_ns >= plan.value_ns:
        return ""
    return f"{best.sentence}: {100 * (1 - best.time_ns / plan.value_ns):.1f} % less time"

"""Plans in words: kinds of plans for tallies, one-line descriptions for reports, and plans that differ in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from penstock.schemas.program import INPUT, RECOMPUTE
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders


def kinds_of(plan: JudgedPlan) -> Iterator[str]:
    """Yield the special features of a plan, in words that tallies count."""
    stages, pipelines = plan.allocation.stages, plan.allocation.pipelines
    load = Counter(device for stage in stages for device in stage.devices)
    operations = operations_of(plan)
    marks: dict[str, Callable[[], bool]] = {
        "one stage": lambda: len(stages) == 1,
        "one pipeline, stages apart": lambda: len(pipelines) == 1 and len(stages) > 1 and max(load.values()) == 1,
        "several stages on a device": lambda: len(pipelines) == 1 and max(load.values()) > 1,
        "several pipelines": lambda: len(pipelines) > 1,
        "several pipelines on a device": lambda: len(pipelines) > 1 and max(load.values()) > 1,
        "replicas by rows": lambda: any(s.replicas > 1 and s.dispatch == "rows" for s in stages),
        "replicas in turn": lambda: any(s.replicas > 1 and s.dispatch == "round_robin" for s in stages),
        "split backwards": lambda: any(kind == INPUT for kind, _s in operations),
        "whole backwards": lambda: all(kind != INPUT for kind, _s in operations),
        "recomputation": lambda: any(stage.recompute for stage in stages),
        "recomputation of parts": lambda: any(s.recompute not in ((), ((s.first, s.last),)) for s in stages),
        "recomputation apart": lambda: any(kind == RECOMPUTE for kind, _s in operations),
        "all-reduce after the backwards": lambda: not plan.overlap_all_reduce,
        "codecs": lambda: any(True in stage.coded for stage in stages),
        plan.update_rule: lambda: True,
    }
    yield from (mark for mark, holds in marks.items() if holds())


def describe(plan: JudgedPlan) -> str:
    """Describe a plan in one line."""
    lines = []
    for pipeline in plan.allocation.pipelines:
        words = []
        for s in pipeline.stages:
            again = f" R{list(s.recompute)}" if s.recompute else ""
            turn = " in turn" if s.dispatch == "round_robin" else ""
            words.append(f"{s.first}-{s.last}@{','.join(map(str, s.devices))}{turn}{again}{' coded' * s.coded[1]}")
        lines.append(f"[{' '.join(words)}; {pipeline.micro_batches[0]}-{pipeline.micro_batches[1]}]")
    split = ", split" if any(kind == INPUT for kind, _s in operations_of(plan)) else ""
    late = "" if plan.overlap_all_reduce else ", all-reduce after"
    return f"{plan.value_ns} ns: {' '.join(lines)} {plan.update_rule}, {plan.schedule.name}{split}{late}"


def operations_of(plan: JudgedPlan) -> frozenset[tuple[int, int]]:
    """Return the pairs of operation kind and stage that a plan has."""
    if isinstance(plan.schedule, Orders):
        rows = (row.operations[:, :2].tolist() for row in plan.schedule.rows)
        return frozenset((kind, s) for row in rows for kind, s in row)
    return frozenset((each.kind, each.stage) for each in plan.schedule.operations)


def same_operations(plan: JudgedPlan, other: JudgedPlan) -> bool:
    """Return whether two plans differ in their orders alone."""
    if plan.allocation != other.allocation or plan.update_rule != other.update_rule:
        return False
    same = plan.overlap_all_reduce == other.overlap_all_reduce
    return same and isinstance(plan.schedule, Orders) and operations_of(plan) == operations_of(other)

"""``penstock.explain``: what determines a plan's time, what would reduce it, and how another layout compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from penstock.convert.explanations import (
    most_helpful,
    to_idle,
    to_layout,
    to_path,
    to_sensitivity,
    to_what_if,
    to_why_not,
)
from penstock.convert.requested_degrees import choice_of
from penstock.planning.judge import Judgement, judge
from penstock.planning.sentences import sentences
from penstock.planning.why_not import PlannedChoice, other_choices
from penstock.schemas.api.explanation import ExplainRequest, Explanation, WhyNot
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.errors import Fault, InvalidDocument, InvalidPlan
from penstock.schemas.machine.collector import no_collection
from penstock.schemas.plan import PlanFile
from penstock.solvers.costs.memory import shortages
from penstock.solvers.explanation.binding import binding, sensitivities
from penstock.solvers.explanation.changes import Change, change, default_changes
from penstock.solvers.explanation.critical_path import path_of_run
from penstock.solvers.explanation.hints import MAX_OPERATIONS
from penstock.solvers.explanation.idle import Piece, idle_pieces, idle_split
from penstock.solvers.explanation.other_layout import Layout, compare_layout
from penstock.solvers.explanation.run import JudgedRun
from penstock.solvers.explanation.what_if import Replan, lacks, what_if
from penstock.solvers.explanation.why_not import Planned
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.solve.driver import replanned_by

MAX_WHAT_IFS = 64
MAX_WHY_NOTS = 16
MAX_PLANS = 20
MAX_GPUS = 2_048
"""The most GPUs for the usual changes; beyond, they take long: each costs the network again, or searches a plan."""
DEFAULT = "default"
"""Represents the usual table among what-ifs, and the next best degrees, of plans that are not too large for them."""
EVERY = "all"
"""Represents the usual table among what-ifs, for every plan."""


class HasFile(Protocol):
    """An answer with a plan."""

    @property
    def file(self) -> PlanFile:
        """Return the plan with its request."""


@dataclass(frozen=True)
class Judged:
    """A judged plan in the solver core's types."""

    judgement: Judgement
    problem: Problem
    plan: JudgedPlan

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs of its cluster."""
        return (self.problem.real or self.problem).num_devices

    @cached_property
    def run(self) -> JudgedRun:
        """Return its nodes, and what each may have waited for."""
        return JudgedRun(self.problem, self.plan)

    @cached_property
    def idle(self) -> dict[tuple[int, ...], list[Piece]]:
        """Return why devices wait, piece by piece."""
        return idle_pieces(self.run)


def answer(question: ExplainRequest, terms: Terms = NO_TERMS) -> Explanation:
    """Explain as a document asks, whose plan is inline. Raises as ``explain``."""
    return explain(
        question.file,
        what_if=question.what_if,
        planner=question.planner,
        max_plans=question.max_plans,
        layout=None if question.layout is None else Layout(**dict(question.layout)),
        why_not=question.why_not,
        on_progress=terms.notify,
    )


def explain(
    plan: PlanFile | HasFile | str | Path,
    *,
    what_if: Sequence[str] = (DEFAULT,),
    planner: str | None = None,
    max_plans: int = MAX_PLANS,
    layout: Layout | Mapping[str, Any] | None = None,
    why_not: Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda _words: None,
) -> Explanation:
    """Explain a plan file, by value or by its path, or the plan of an answer.

    Raises InvalidPlan where it cannot be simulated.

    ``what_if``: changes to try, such as ``bandwidth=2``, ``devices=+8``, ``recompute=here``. ``default`` is the usual
    changes, if the plan has at most ``MAX_OPERATIONS`` operations and ``MAX_GPUS`` GPUs; ``all`` is the usual changes
    for every plan. Single changes of stages and links depend on the operations alone. What is not
    tried is named by ``untried`` of the answer.
    ``planner``: plan again for every change, with at most ``max_plans`` plans. Left out: ``relax`` plans again for
    changes whose effect the plan itself does not show, if the plan has a flush.

    ``layout``: another cut of the model, or the fields of a ``Layout``, to judge in addition to the plan.

    ``why_not``: other choices of degrees and sharding, such as ``tensor=4``, ``sharding=none`` or
    ``tensor=4,sharding=none``; each is answered by the best choice that has these values. ``next`` is the next best
    choice; ``default`` is ``next`` where there is one, on at most ``MAX_GPUS`` GPUs. Their plans are by ``planner``, by
    default ``even``.
    """
    _check(what_if, max_plans)
    _check_number(why_not, MAX_WHY_NOTS, "choices")
    file = PlanFile.read(plan) if isinstance(plan, (str, Path)) else plan if isinstance(plan, PlanFile) else plan.file
    judged_plan = judged(file)
    parsed_layout = layout_of(layout) if isinstance(layout, Mapping) else layout
    if judged_plan.num_gpus > MAX_GPUS:
        why_not = [text for text in why_not if text != DEFAULT]
    others = list(other_choices(file.request, choice_of(file.plan), why_not, planner, max_plans))
    explained = explanation(file, judged_plan, what_if, planner, max_plans, parsed_layout, on_progress)
    ours = Planned(judged_plan.problem, judged_plan.plan)
    compared = (_why_not(text, other, ours, on_progress) for text, other in others)
    return explained.model_copy(update={"why_not": tuple(compared)})


def _why_not(text: str, other: PlannedChoice, ours: Planned, on_progress: Callable[[str], None]) -> WhyNot:
    on_progress(f"why not {other.choice}")
    if (theirs := other.planned) is not None:
        return to_why_not(text, other.planner, theirs, ours, other.bound_ns)
    return WhyNot(
        question=text,
        choice=str(other.choice),
        planner=other.planner,
        sentence=f"no plan was found at {other.choice}: {other.result.sentence}",
        time_ns=None,
        ratio=None,
        bound_ns=other.bound_ns,
    )


def layout_of(fields: Mapping[str, Any]) -> Layout:
    """Return a layout from plain data; cuts may be numbers. Raises InvalidDocument for an unknown field."""
    names = [field.name for field in dataclass_fields(Layout)]
    if unknown := sorted(set(fields) - set(names)):
        raise InvalidDocument(f"a layout has no field {unknown[0]!r}", remedy=f"one of {', '.join(names)}")
    return Layout(
        cuts=tuple(map(str, fields.get("cuts", ()))),
        replicas=tuple(map(int, fields.get("replicas", ()))),
        devices=tuple(tuple(names) for names in fields.get("devices", ())),
        schedule=fields.get("schedule"),
        num_micro_batches=fields.get("num_micro_batches"),
    )


def judged(file: PlanFile) -> Judged:
    """Return the judgement of a plan that can be simulated. Raises InvalidPlan for any other."""
    with no_collection():
        judgement = judge(file)
    if judgement.timeline is None or judgement.allocation is None or judgement.schedule is None:
        raise InvalidPlan(
            "the plan cannot be simulated", faults=tuple(Fault("plan", sentence) for sentence in judgement.faults)
        )
    plan = file.plan
    best = JudgedPlan.of(
        plan.planner,
        judgement.allocation,
        judgement.schedule,
        judgement.timeline,
        plan.overlap_all_reduce,
        plan.update_rule,
    )
    return Judged(judgement, judgement.problem, best)


def explanation(
    file: PlanFile,
    judged_plan: Judged,
    what_ifs: Sequence[str],
    planner: str | None,
    max_plans: int,
    layout: Layout | None,
    on_progress: Callable[[str], None],
) -> Explanation:
    """Explain a plan that was judged already, as ``explain`` does."""
    judgement, problem, plan = judged_plan.judgement, judged_plan.problem, judged_plan.plan
    assert judgement.timeline is not None
    on_progress("the critical path")
    with no_collection():
        path, idle = path_of_run(judged_plan.run), idle_split(judged_plan.run, judged_plan.idle)
    compared = None if layout is None else to_layout(problem, plan, compare_layout(problem, plan, layout))
    untried = _untried(judged_plan, what_ifs)
    if untried:
        what_ifs = [name for name in what_ifs if name != DEFAULT]
    sensible = []
    if EVERY in what_ifs or judged_plan.run.first_transfer <= MAX_OPERATIONS:
        on_progress("sensitivities")
        sensible = list(sensitivities(judged_plan.run, path))
    rows = []
    if what_ifs:
        replan = _replan(plan, planner, max_plans)
        for row in what_if(problem, plan, _changes(problem, plan, what_ifs), replan, planner is not None):
            rows.append(row)
            on_progress(f"what if … ({len(rows)}): {row.sentence}")
    overfull = tuple(lacks(problem, short) for short in shortages(problem, plan.allocation, plan.timeline))
    return Explanation(
        plan_hash=file.plan.content_hash(),
        valid=not judgement.faults,
        faults=judgement.faults,
        time_ns=plan.value_ns,
        sentences=(*overfull, *sentences(judgement, judgement.timeline, idle)),
        binds=binding(problem, plan, path, idle).sentence,
        helps=most_helpful(plan, rows, sensible),
        path=to_path(problem, plan, path),
        idle=tuple(to_idle(problem, plan, each) for each in idle),
        sensitivities=tuple(to_sensitivity(plan, each) for each in sensible),
        what_ifs=tuple(to_what_if(plan, row) for row in rows),
        layout=compared,
        untried=untried,
    )


def _changes(problem: Problem, plan: JudgedPlan, names: Sequence[str]) -> Iterator[Change]:
    """Yield the changes. Named changes are built at once, because they may be refused; the usual ones when taken."""
    usual = (DEFAULT, EVERY)
    named = [() if name in usual else (change(problem, plan, name),) for name in names]
    return chain.from_iterable(changes or default_changes(problem, plan) for changes in named)


def _untried(judged_plan: Judged, names: Sequence[str]) -> str:
    """Return why not all usual changes of a large plan are tried."""
    named = f"are asked for: by name, such as bandwidth=2, or all usual ones by {EVERY!r}"
    operations, gpus = judged_plan.run.first_transfer, judged_plan.num_gpus
    if EVERY in names:
        return ""
    if operations > MAX_OPERATIONS:
        return f"with {operations:,} operations, more than {MAX_OPERATIONS:,}, changes are tried only when they {named}"
    if gpus > MAX_GPUS and DEFAULT in names:
        return f"with {gpus:,} GPUs, more than {MAX_GPUS:,}, other requests are tried only when they {named}"
    return ""


def _replan(plan: JudgedPlan, planner: str | None, max_plans: int) -> Replan | None:
    """Return the requested planner; else ``relax``, which is quick, for plans with a flush, and none for the others."""
    if planner is None and plan.update_rule != "synchronous":
        return None
    return replanned_by(planner or "relax", max_plans)


def _check(names: Sequence[str], max_plans: int) -> None:
    _check_number(names, MAX_WHAT_IFS, "changes")
    if not 1 <= max_plans <= 10_000:
        raise InvalidDocument(f"max_plans {max_plans} is not between 1 and 10000")


def _check_number(names: Sequence[str], most: int, what: str) -> None:
    if len(names) > most:
        raise InvalidDocument(
            f"{len(names)} {what} exceed the limit of {most}", remedy="split them over several requests"
        )

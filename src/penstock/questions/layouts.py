"""Judges a user's present layout: a trainer's layout as a plan, and the best plans within its limits and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

from penstock.convert import from_plan, to_plan, to_problem
from penstock.convert.answers import gradients_of_target
from penstock.convert.explanations import to_layout
from penstock.convert.layer_roles import roles_of, transformer_of
from penstock.convert.requests import inline_documents
from penstock.exporting.layouts import layout_text
from penstock.layouts.at_degrees import at_degrees, cells_in
from penstock.layouts.drawn import (
    Drawn,
    Reading,
    by_hand,
    differing,
    in_file,
    not_counted,
    ordered,
    placed,
    world_of,
    wrong,
)
from penstock.layouts.layout_text import LayoutText
from penstock.layouts.legal import legal_degrees
from penstock.layouts.limits import refuse_beyond
from penstock.layouts.ranges import RangesText
from penstock.questions.layout_requests import plan_request, text_of
from penstock.questions.solve import solve
from penstock.schemas.amounts import amount, duration, percent
from penstock.schemas.api.layouts import LayoutImported, LayoutRequest, Rival
from penstock.schemas.api.terms import NO_TERMS, Terms
from penstock.schemas.errors import InvalidDocument, InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.request import FP32_GRADIENTS, MemoryModel, PlanRequest, Termination
from penstock.shapes.parameters import total
from penstock.solvers.bounds.coverage import allowed, features_of, whatever_is_pinned
from penstock.solvers.bounds.schedule_bound import MOST_LABELLED, one_pipeline_bound, request_bound, schedule_bound
from penstock.solvers.bounds.trainer import within_bounds
from penstock.solvers.costs.memory import shortages, static_bytes
from penstock.solvers.explanation.other_layout import compared
from penstock.solvers.explanation.reordering import BestOrder
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import REQUEST_SCOPE, Bound, JudgedPlan
from penstock.solvers.model.schedule import Orders
from penstock.solvers.solve.incumbent import shown


def answer(question: LayoutRequest, terms: Terms = NO_TERMS) -> LayoutImported:
    """Judge the trainer's layout as it is; with ``compare``, also compute what the best plans would gain.

    A layout that does not fit into memory is an answer. Raises InvalidDocument for a text that does not parse or does
    not go with model, cluster and batch (line and column are named), UnsupportedRequest for what a trainer cannot do,
    InvalidPlan for a layout that cannot be simulated.
    """
    target = None if question.format == "ranges" else question.format
    terms.notify("reading the layout")
    text = text_of(question)
    request = plan_request(question, text, terms)
    memory = _of_target(question.request.memory, target)
    request = request.model_copy(update={"target": target, "planner": "auto", "schedule": "auto", "memory": memory})
    refuse_beyond(request)
    opens = request.degrees is not None or request.sharding is not None
    request = request.model_copy(update={"degrees": None, "sharding": None})  # the layout has its own
    request, problem, allocation, orders, drawn = _read(question, text, request)
    overlap = problem.rules.overlap_all_reduce
    if drawn is not None and drawn.overlap is not None:
        overlap = drawn.overlap
    theirs, faults = by_hand(problem, allocation, orders, overlap)
    short = shortages(problem, allocation, theirs.timeline)
    free = _free_bounds(problem, keeping=broken_pin(problem, allocation) is None) if problem.real is None else []
    features = features_of(problem, allocation, orders, overlap=overlap, fits=not short)
    covering = [bound for bound in free if features <= bound.covers]
    bounds = shown(covering) if covering else ()
    bound_of_schedule = schedule_bound(problem, allocation, orders, overlap=overlap)
    assumptions = () if drawn is None else (*drawn.assumptions, *gradients_of_target(problem, request))
    profile, _topology = inline_documents(request)
    roles = roles_of(profile, transformer_of(request))
    if roles is not None and target in ("megatron", "torchtitan"):
        assumptions = (*assumptions, roles.assumption)
    # What memory allows bounds the orders of a plan that fits; one that does not may well be quicker.
    plan = to_plan(problem, request, theirs, bounds if short else (*bounds, bound_of_schedule))
    new_assumptions = tuple(each for each in assumptions if each not in plan.assumptions)
    plan = plan.model_copy(update={"assumptions": (*plan.assumptions, *new_assumptions)})
    return LayoutImported(
        format=question.format,
        plan=plan,
        request=request,
        fits=None
        if short and drawn is not None and (not_counted(problem, drawn) or drawn.counted_whole)
        else not short,
        faults=tuple(faults),
        missing_bytes=short[0].missing_bytes if short else 0,
        sentences=_sentences(
            profile,
            problem,
            theirs,
            short[0].missing_bytes if short else 0,
            drawn,
        ),
        assumptions=assumptions,
        rivals=_rivals(request, problem, theirs, free, terms, opens=opens) if question.compare else (),
    )


def _of_target(memory: MemoryModel, target: str | None) -> MemoryModel:
    """Return the request's memory model, with the trainer's width of gradients where the request states none."""
    if target not in FP32_GRADIENTS or "gradient" in memory.model_fields_set:
        return memory
    return memory.model_copy(update={"gradient": "fp32"})


def _of_layout(memory: MemoryModel, drawn: Drawn) -> MemoryModel:
    """Return the request's memory model, with gradients and optimizer states as the layout itself states them."""
    changes: dict[str, str] = {}
    if drawn.shard_states:
        changes["optimizer_sharding"] = "over_replicas"
    if drawn.gradient is not None:
        changes["gradient"] = drawn.gradient
    return memory.model_copy(update=changes)


def plan_file(imported: LayoutImported) -> PlanFile:
    """Return the layout's plan with its request."""
    return PlanFile(plan=imported.plan, request=imported.request)


class _Read(NamedTuple):
    """A layout in its problem; the request has the layout's memory model and degrees."""

    request: PlanRequest
    problem: Problem
    allocation: Allocation
    orders: Orders
    drawn: Drawn | None


def _read(question: LayoutRequest, text: LayoutText, request: PlanRequest) -> _Read:
    problem = to_problem(request)
    if isinstance(text, RangesText):
        if question.nodes or question.devices_per_node is not None:
            raise wrong(
                "nodes do not apply to ranges of layers, which name their devices",
                "write `devices` in the layout",
                "/nodes",
            )
        return _Read(request, problem, *text.stages(problem), None)
    assert problem.within is not None
    drawn = _drawn(question, text, request)
    if drawn.global_batch_size is None:
        unsaid = f"no global batch size in the text: judged are {request.global_batch_size} samples a step"
        drawn = replace(drawn, assumptions=(unsaid, *drawn.assumptions))
    if drawn.global_batch_size not in (None, request.global_batch_size):
        raise wrong(
            f"the layout trains {drawn.global_batch_size} samples a step, the request {request.global_batch_size}",
            f"request the layout's global batch size, {drawn.global_batch_size}",
        )
    if question.pipeline_parallel_size not in (None, drawn.ranks):
        raise wrong(f"the layout has {drawn.ranks} pipeline ranks, not {question.pipeline_parallel_size}")
    request = request.model_copy(update={"memory": _of_layout(request.memory, drawn)})
    gpus = world_of(problem, question.nodes, question.devices_per_node)
    within = problem.within
    request, problem = at_degrees(request, drawn, question.source, len(gpus))
    world = cells_in(problem, gpus)
    try:
        allocation = placed(problem, within, drawn, world)
        orders = ordered(problem, within, drawn, allocation)
        assumptions = differing(problem, within, drawn, world)
    except InvalidDocument as error:
        raise in_file(error, question.source, drawn) from None
    whole = "" if problem.choice is not None and problem.choice.in_one_stage else drawn.counted_whole
    assumptions = (*drawn.assumptions, *assumptions, *([whole] if whole else []))
    return _Read(request, problem, allocation, orders, replace(drawn, counted_whole=whole, assumptions=assumptions))


def _drawn(question: LayoutRequest, text: LayoutText, request: PlanRequest) -> Drawn:
    """Return the layout of the trainer's own file."""
    profile, topology = inline_documents(request)
    groups = {device.gpus for node in topology.expanded().nodes for device in node.devices}
    reading = Reading(
        profile,
        roles_of(profile, transformer_of(request)),
        question.source,
        question.micro_batch_size,
        question.pipeline_parallel_size,
        groups.pop() if len(groups) == 1 else 0,
    )
    return text.drawn(reading)


def _parameters(profile: ModelProfile) -> str:
    """Return how many parameters a model has, in words, so that a reader notices a size that was read wrongly."""
    width = {"fp32": 4, "bf16": 2, "fp16": 2}[profile.parameter_dtype]
    total_bytes = profile.held_bytes(0, len(profile.layers) - 1)
    count = total_bytes / width if profile.shape is None else total(profile.shape)
    scale, unit = next((pair for pair in ((1e9, " billion"), (1e6, " million")) if count >= pair[0]), (1, ""))
    return f"{count / scale:.4g}{unit}"


def _sentences(
    profile: ModelProfile, problem: Problem, theirs: JudgedPlan, missing_bytes: int, drawn: Drawn | None
) -> tuple[str, ...]:
    value = theirs.value_ns
    samples = problem.batch_samples
    rate = samples * 1e9 / value
    sentences = [
        f"{duration(value)} per global batch of {samples} samples, {rate:.4g} samples/s; "
        f"{percent(theirs.timeline.bubble)} of the devices' time is idle",
    ]
    sentences.append(f"the model has {_parameters(profile)} parameters")
    used = sum(len(problem.gpus(device)) for device in theirs.timeline.uses)
    devices = (problem.real or problem).num_devices
    if used < devices:
        sentences.append(f"{devices - used} of {devices} devices are not used")
    lower = [] if drawn is None else list(_not_counted(problem, theirs, drawn))
    if missing_bytes and lower:
        sentences.append(
            f"whether it fits is not known: by Penstock's count {amount(missing_bytes)} are missing on the device that "
            f"lacks most; {'; '.join(lower)}"
        )
    elif missing_bytes:
        sentences.append(f"it does not fit: {amount(missing_bytes)} are missing on the device that lacks most")
    return tuple(sentences)


def _is_doubtful(problem: Problem, drawn: Drawn | None) -> bool:
    """Return whether the layout may take less memory than is counted."""
    return drawn is not None and bool(not_counted(problem, drawn) or drawn.counted_whole)


def _not_counted(problem: Problem, theirs: JudgedPlan, drawn: Drawn) -> Iterator[str]:
    """Yield what makes a layout need less memory than is counted."""
    if lowering := not_counted(problem, drawn):
        verbs = ("lower", "are") if len(lowering) > 1 else ("lowers", "is")
        yield f"{' and '.join(lowering)}, which {verbs[0]} memory, {verbs[1]} not modelled"
    if drawn.counted_whole:
        stage = theirs.allocation.stages[0]
        static = static_bytes(problem, stage)
        more = (static.parameters + static.gradients) * (stage.replicas - 1) // stage.replicas
        yield f"of parameters and gradients, counted whole, up to {amount(more)} of a device are in truth on the others"


def _rivals(
    request: PlanRequest,
    problem: Problem,
    theirs: JudgedPlan,
    free: list[Bound],
    terms: Terms,
    *,
    opens: bool,
) -> tuple[Rival, ...]:
    """Return the best plans. ``free``: the bounds so far; ``opens``: whether the request leaves degrees open."""
    target = request.target
    options = {name: value for name, value in request.options.items() if name != "transformer"}
    whole = request.model_copy(update={"target": None, "options": options})
    choices = {"without limits": whole}
    if target is not None:
        choices = {f"within what {target} can express": request, **choices}
    if problem.real is not None or (opens and target is not None):
        return _at_any_degrees(request, whole, theirs, terms)
    bounds = dict(zip(choices, _of_all(problem, free), strict=False)) if target is not None else {}
    rivals = []
    for choice, wanted in choices.items():
        terms.notify(f"the best plan {choice}")
        bound_ns = bounds.get(choice, free[0].bound_ns)
        rivals.append(_rival(choice, wanted, theirs, bound_ns, terms))
    return tuple(rivals)


def _at_any_degrees(
    request: PlanRequest,
    whole: PlanRequest,
    theirs: JudgedPlan,
    terms: Terms,
) -> tuple[Rival, ...]:
    """Return the best plain layout over all degrees of the profile; with a limit on the search, also the best plans.

    First comes the best plan that the trainer expresses. ``whole``: the request without its target.
    """
    target = request.target
    memory = request.memory.model_copy(update={"optimizer_sharding": "none"})
    open_choices: dict[str, object] = {"degrees": "auto", "sharding": "auto", "memory": memory}
    free = whole.model_copy(update=open_choices)
    choices = {f"plain layout of {target} at any degrees": free.model_copy(update={"planner": "even"})}
    limited = free.termination != Termination()
    if limited and target is not None:
        legal = legal_degrees(inline_documents(request)[0], target)
        within = request.model_copy(update={**open_choices, "degrees": legal})
        choices[f"within what {target} can express at any degrees"] = within
    rivals = [_asked_for(choice, wanted, theirs, terms) for choice, wanted in choices.items()]
    rivals.sort(key=lambda rival: (not _expressed(rival, target), rival.time_ns or 0))
    if limited:
        rivals.append(_asked_for("without limits", free, theirs, terms))
    return tuple(rivals)


def _expressed(rival: Rival, target: str | None) -> bool:
    """Return whether the trainer can express the plan, if any: a search from a plain layout may leave its limits."""
    if rival.plan is None or rival.request is None or target is None:
        return False
    try:
        layout_text(PlanFile(plan=rival.plan, request=rival.request), target)
    except (UnsupportedRequest, InvalidPlan):
        return False
    return True


def _asked_for(choice: str, wanted: PlanRequest, theirs: JudgedPlan, terms: Terms) -> Rival:
    terms.notify(f"the best plan {choice}")
    return _divided_rival(choice, wanted, theirs, terms)


def _divided_rival(choice: str, request: PlanRequest, theirs: JudgedPlan, terms: Terms) -> Rival:
    result = solve(request, workers=terms.workers)
    plan = result.plan
    time = None if plan is None or plan.prediction is None else plan.prediction.time_per_global_batch_ns
    status: Literal["optimal", "feasible", "infeasible", "none_found", "time_limit"] = result.status
    whole = [] if plan is None else [each for each in plan.certificates if each.scope == REQUEST_SCOPE]
    return Rival(
        choice=choice,
        status=status,
        why=result.sentence,
        time_ns=time,
        bound_ns=max((each.bound_ns for each in whole), default=None),
        saved=None if time is None else 1 - time / theirs.value_ns,
        plan=plan,
        comparison=None,
        request=request,
    )


def _rival(choice: str, request: PlanRequest, theirs: JudgedPlan, bound_ns: int, terms: Terms) -> Rival:
    result = solve(request, workers=terms.workers)
    problem = to_problem(request.model_copy(update={"target": None, "options": {}}), any_modules=True)
    ours = None if result.plan is None else _candidate(problem, result.plan)
    comparison = None
    if ours is not None:
        short = shortages(problem, theirs.allocation, theirs.timeline)
        reordered = BestOrder(theirs, short[0] if short else None)
        comparison = to_layout(problem, ours, compared(problem, ours, reordered))
    status: Literal["optimal", "feasible", "infeasible", "none_found", "time_limit"] = result.status
    return Rival(
        choice=choice,
        status=status,
        why=result.sentence,
        time_ns=None if ours is None else ours.value_ns,
        bound_ns=bound_ns,
        saved=None if ours is None else 1 - ours.value_ns / theirs.value_ns,
        plan=result.plan,
        comparison=comparison,
    )


def _free_bounds(problem: Problem, *, keeping: bool) -> list[Bound]:
    """Return the bounds that need no memory model and so hold for layouts that do not fit. The first covers every plan.

    ``keeping``: whether the layout keeps the pins; otherwise the bounds are of the problem without pins.
    """
    if not keeping:
        return [whatever_is_pinned(bound) for bound in _free_bounds(replace(problem, pins=()), keeping=True)]
    bounds = [request_bound(problem, fits=False)]
    if problem.num_devices <= MOST_LABELLED:
        bounds.append(one_pipeline_bound(problem, fits=False))
    return bounds


def _of_all(problem: Problem, free: list[Bound]) -> tuple[int, int]:
    """Return a bound on the plans of the problem's target, and one on all plans; ``free``: the bounds so far."""
    everything = free[0].bound_ns
    if problem.within is None:
        return everything, everything
    bounds = [*free, *within_bounds(problem)]
    wanted = allowed(problem)
    return max(bound.bound_ns for bound in bounds if wanted <= bound.covers), everything


def _candidate(problem: Problem, plan: Plan) -> JudgedPlan:
    allocation, schedule = from_plan(plan, problem)
    timeline = simulate(problem, allocation, schedule, overlap=plan.overlap_all_reduce, update_rule=plan.update_rule)
    return JudgedPlan.of(plan.planner, allocation, schedule, timeline, plan.overlap_all_reduce, plan.update_rule)

"""One sentence for a result: the plan's shape and distance from the bound, or why there is no plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.schemas.amounts import doubtful_memory, shortage
from penstock.solvers.bounds.schedule_bound import MOST_LABELLED
from penstock.solvers.degrees.axes import AXES
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.degrees import Choice
from penstock.solvers.model.micro_batches import most_rows
from penstock.solvers.model.plan_shape import are_in_turn, layers_need, micro_batches, recomputing, shape
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import (
    REQUEST_SCOPE,
    Alternative,
    Bound,
    JudgedPlan,
    Reason,
    Result,
    Shortage,
    Status,
    reason_of,
)
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.catalogue import SCHEDULES
from penstock.solvers.schedules.early_backward import ACR_THRESHOLD, activation_communication_ratio
from penstock.solvers.solve.eligible import NO_PLAN, ROUNDS, not_asked
from penstock.solvers.solve.incumbent import State
from penstock.solvers.solve.searched import Searched

if TYPE_CHECKING:
    from penstock.solvers.solve.choices import Search

SHOWN = 8


def why(state: State) -> list[str]:
    """Return the clauses for the final state, with the tasks whose processes died."""
    clauses = _nothing(state) if state.best is None else _clauses_of(state, state.best)
    return clauses + [f"the process of {name} ended with {how}" for name, how in state.lost.items()]


def _clauses_of(state: State, best: JudgedPlan) -> list[str]:
    """Return the best plan's shape, its planner, its activation communication ratio, and its gap to the bound."""
    parts = [f"{best.planner}: {_shape(state, best)}"]
    if best.planner in state.notes:
        parts.append(state.notes[best.planner])
    if any(len(pipeline.stages) > 1 for pipeline in best.allocation.pipelines) and best.update_rule == "synchronous":
        ratio = activation_communication_ratio(state.problem, best.allocation)
        side = "at least" if ratio >= ACR_THRESHOLD else "below"
        parts.append(
            f"activation communication ratio {ratio:.3f}, {side} the {ACR_THRESHOLD} from which P_B is advised"
        )
    if state.codec_note:
        parts.append(state.codec_note)
    bounds = state.proofs.shown(best)
    parts += [_distance(best, bound, _whose(state, bound)) for bound in bounds if bound.bound_ns > 0]
    if state.out_of_patience:
        parts.append(f"with effort {state.setting.effort.name} {_ended(state)}")
    return parts + _unfinished(state)


def reasons(state: State) -> dict[str, Reason]:
    """Return the planners that ``auto`` did not run, each with the reason.

    If degrees are a choice, bounds are named without the degrees, so that one reason serves all choices.
    """
    reasons_by_name = dict(state.left_out)
    reasons_by_name |= {name: reason_of(error) for name, error in state.refused.items()}
    better = "better by more than the gap" if state.setting.gap else "better"
    for name, bound in state.spared.items():
        whose = f"the bound on {bound.model}" if state.problem.choice is None else "a bound on all of them"
        reasons_by_name[name] = Reason(f"their plans are no {better} than {whose}")
    return reasons_by_name


def _ended(state: State) -> str:
    number = state.setting.effort.patience_for(state.problem)
    return f"{', '.join(state.out_of_patience)} ended after {number} plans in a row that were no better"


def _whose(state: State, bound: Bound) -> str:
    """Return which plans a bound covers; if degrees are a choice, it names the plans at the degrees of this search."""
    chosen = state.problem.choice
    return bound.model if chosen is None or bound.scope != REQUEST_SCOPE else f"every plan at {chosen}"


def _distance(best: JudgedPlan, bound: Bound, whose: str) -> str:
    """Return how far the plan is above a bound, and which plans that bound covers."""
    if best.value_ns <= bound.bound_ns + bound.tolerance_ns:
        return f"it meets the lower bound on {whose}"
    return f"{100 * (best.value_ns / bound.bound_ns - 1):.2f} % above the lower bound on {whose}"


def _shape(state: State, best: JudgedPlan) -> str:
    allocation = best.allocation
    stages, beside = allocation.stages, ""
    if best.update_rule == "elastic_averaging":
        stages = allocation.pipelines[0].stages
        number = len(allocation.pipelines)
        beside = f"{number} pipelines on the same devices, each " if number > 1 else "one pipeline that averages, "
    used = len({d for stage in stages for d in stage.devices})
    whole = state.problem.num_devices
    what = f"cells of {state.problem.degrees.cell} GPUs" if state.problem.degrees.cell > 1 else "devices"
    every = f"{used} {what}" if used == whole else f"{used} of {whole} {what}"
    number = allocation.num_micro_batches
    size = micro_batches(number, most_rows(state.problem, allocation) * state.problem.samples_per_row)
    again = "".join(f", {each}" for each in recomputing(stages))
    groups = [[stage.devices for stage in pipeline.stages] for pipeline in allocation.pipelines]
    if not beside and len(groups) > 1:
        return f"{shape(groups)}{_cuts(allocation)}{again}, {size}, {best.schedule.name}"
    if len(stages) == 1:
        overlap = "with" if best.overlap_all_reduce else "without"
        kind = f"data parallel over {every} {overlap} all-reduce overlap" if used > 1 else "one device"
        if state.problem.choice is not None and state.problem.choice.in_one_stage:
            kind = f"one stage shared out over {state.problem.samples_per_row:,} replicas"
        return f"{beside}{kind}{again}, {size}"
    replicas = _listed([stage.replicas for stage in stages])
    layers = _listed([stage.last - stage.first + 1 for stage in stages])
    name = best.schedule.name
    if not beside and are_in_turn(groups):
        kind = f"data parallel over {every}" if used > 1 else "one device"
        return f"{kind}, {len(stages)} parts of the model in turn (layers {layers}{again}), {size}, {name}"
    warmup = ""
    if isinstance(best.schedule, Orders) and name in SCHEDULES and SCHEDULES[name].by_vector:
        warmup = f" with K = {_listed(best.schedule.warmup[: len(stages)])}"
    straight = "straight" if used == len(stages) else replicas
    cut = f"{len(stages)} stages ({straight}, layers {layers}{again}) on {every}"
    return f"{beside}{cut}, {size}, {name}{warmup}"


def _cuts(allocation: Allocation) -> str:
    """Return the layers of each stage, from the first pipeline if all are cut alike; "" if no pipeline is cut."""
    cuts = list(
        dict.fromkeys(_listed([stage.last - stage.first + 1 for stage in p.stages]) for p in allocation.pipelines)
    )
    if all(len(pipeline.stages) == 1 for pipeline in allocation.pipelines):
        return ""
    more = f" and {len(cuts) - SHOWN} other cuts" if len(cuts) > SHOWN else ""
    return f" (layers {' or '.join(cuts[:SHOWN])}{more})"


def _listed(numbers: Sequence[int]) -> str:
    """Return ``9:7``; of three or more equal numbers ``1 each``, of very many the least and the most."""
    low, high = min(numbers), max(numbers)
    if low == high and len(numbers) > 2:
        return f"{low} each"
    return ":".join(map(str, numbers)) if len(numbers) <= 2 * SHOWN else f"{low} to {high}"


def _nothing(state: State) -> list[str]:
    """Return the proof that there is no plan, or the obstacle: which stage lacks most memory, and a remedy."""
    short = state.obstacles.shortage
    if state.status is Status.TIME_LIMIT:
        late = f"{_limit(state)} came before {' and '.join(state.unfinished)} had found a plan"
        return [late, *_quicker(state)]
    unproven = ["it is not proven that none exists", *_unfinished(state)]
    if state.refuted is not None:
        clauses = [f"there is no plan: {state.refuted.sentence}"]
    elif short is None:
        return [f"no plan was found: {_obstacle(state)}", *unproven]
    else:
        clauses = ["no plan was found that fits", *unproven]
    if short is not None:
        clauses += _lacking(state, short)
    doubt = doubtful_memory(max(device.memory_bytes for device in state.problem.devices))
    return [*clauses, doubt] if doubt else clauses


def _obstacle(state: State) -> str:
    """Return the obstacle to the last plan, if memory was no obstacle."""
    obstacles, schedule = state.obstacles, state.setting.schedule
    if obstacles.disconnected is not None:
        return obstacles.disconnected
    if obstacles.unpinned is not None:
        return f"in the last one tried, {obstacles.unpinned}"
    if obstacles.proposed and schedule != "auto":
        return f"nothing that was proposed for this request goes with schedule {schedule!r}"
    return "nothing was proposed for this request"


def _lacking(state: State, short: Shortage) -> list[str]:
    """Return the shortage of the nearest plan, and a remedy."""
    problem = state.problem
    need = layers_need(short.first_layer, short.last_layer, problem.layer_names)
    lack = shortage(short.needed_bytes, short.available_bytes, f"device {problem.devices[short.device].name!r}")
    clause = f"in the nearest one, {need} {lack}"
    if not state.setting.prove_bounds:
        return [clause]
    if state.remedy:
        return [clause, f"this works: {state.remedy}"]
    if state.setting.deadline.passed:
        return [clause, "the time limit came before a remedy was found"]
    return [clause, "no remedy tried here works"]


def _quicker(state: State) -> list[str]:
    """Return the planners that would have been in time, as others examine too many plans."""
    many = state.problem.num_devices
    if many <= MOST_LABELLED or "spread" in state.unfinished or "synchronous" not in state.problem.update_rules:
        return []
    return [f"at {many:,} devices use planner spread, which auto asks first"]


def _unfinished(state: State) -> list[str]:
    """Return a clause with the planners that a limit ended, if it did."""
    return [f"{_limit(state)} came before {', '.join(state.unfinished)} had finished"] if state.unfinished else []


def _limit(state: State) -> str:
    if state.setting.deadline.passed:
        return "the time limit"
    number = state.setting.max_plans
    return f"the limit of {number} plan{'' if number == 1 else 's'}"


# ---- over choices of degrees -----------------------------------------------------------------------------------------


def why_best(search: Search, result: Result, bound: Bound) -> tuple[str, ...]:
    """Return the clauses on the best plan of a search: its choice, why it is best, the planners not run."""
    assert search.best is not None
    assert result.best is not None
    if not search.problem.choices:  # the planner's own words on the one choice of degrees
        return (*result.why, *_next_best(search, result.best.value_ns))
    parts = (*at(search.best.choice, result.why), _gap(search, result.best.value_ns, bound))
    return (*parts, *_unlike(search.problem), *_next_best(search, result.best.value_ns), *spared(search))


def _unlike(problem: Problem) -> Iterator[str]:
    """Yield each axis whose open values train differently, so that times do not decide between them."""
    every: dict[str, dict[str, None]] = {}
    for choice in problem.choices:
        for name, value in choice.values:
            every.setdefault(name, {})[value] = None
    for name, values in every.items():
        if len(values) > 1 and not AXES[name].trains_alike:
            yield f"{name} {' and '.join(values)} train differently, and only their times are compared"


def at(choice: Choice, clauses: Sequence[str]) -> tuple[str, ...]:
    """Return the clauses on a search at one choice, with its name."""
    return (f"{choice}: {clauses[0]}", *clauses[1:]) if clauses else (str(choice),)


def idle(whole: Searched, best: Searched) -> tuple[str, ...]:
    """Return the clauses on a plan that leaves a kind of devices out, and how long plans on all of them take."""
    assert best.result is not None
    assert best.value_ns is not None
    clause = f"all devices of kind {best.choice.excluded} stay idle"
    if whole.value_ns is not None:
        longer = 100 * (whole.value_ns / best.value_ns - 1)
        clause += f", as the best plan found that may use them takes {longer:.1f} % longer"
    return (clause, *best.result.why)


def _gap(search: Search, best_ns: int, bound: Bound) -> str:
    """Return how far the plan is above the bound over all choices."""
    if best_ns <= bound.bound_ns + bound.tolerance_ns:
        return f"it meets the lower bound over {_choices(search)}"
    above = 100 * (best_ns / bound.bound_ns - 1)
    return f"{above:.2f} % above the lower bound over {_choices(search)} ({bound.method})"


def _next_best(search: Search, best_ns: int) -> Iterator[str]:
    """Yield what the next best choice takes, and the choices that cannot be made."""
    others = [each for each in search.choices if each is not search.best and each.value_ns is not None]
    if rivals := [each for each in others if each.choice.excluded is None or each.value_ns != best_ns]:
        nearest = min(rivals, key=Searched.by_value)
        assert nearest.value_ns is not None
        longer = 100 * (nearest.value_ns / best_ns - 1)
        yield f"the next best choice found, {_name(search, nearest)}, takes {longer:.1f} % longer"
    refused = {choice: reason for choice, reason in search.refused.items() if choice.excluded is None}
    if refused:
        choice, reason = next(iter(refused.items()))
        more = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
        yield f"left out: {choice} ({reason.detail}){more}"


def _name(search: Search, each: Searched) -> str:
    if search.problem.choices:
        return str(each.choice)
    return "all devices" if each.choice.excluded is None else f"all devices but {each.choice.excluded}"


def spared(search: Search) -> Iterator[str]:
    """Yield the planners that did not run, at how many of the searched choices, and why other choices were not
    searched.

    Yield nothing if the request names a planner or a target decides it.
    """
    if not search.asks_others:
        return
    searched = [each.not_asked for each in search.choices if each.not_asked is not None]
    yield from not_asked(searched, len(searched))
    counts = Counter(_why_spared(search, each) for each in search.choices if each.not_asked is None)
    if counts:
        listed = ", ".join(f"{number} as {reason}" for reason, number in counts.most_common())
        yield f"all planners were asked at {len(searched)} of {_choices(search)}, the rest spared: {listed}"


def _why_spared(search: Search, each: Searched) -> str:
    """Return why only the planners that rank choices searched a choice, if any did."""
    if each.choice in search.refused or each.impossible:
        return NO_PLAN
    if not each.dropped and not search.is_open(each):
        return "bounds show that none of their plans is better"
    if each.far:
        return f"no plain layout of theirs is within {ROUNDS[0].near:g} times the best"
    if each.dropped:
        return each.dropped
    if search.deadline.passed:
        return "the time limit came first"
    return f"effort {search.setting.effort.name} asks them at the best ones alone"


def alternatives(search: Search) -> tuple[Alternative, ...]:
    """Return a row for each choice: the best plans first, then the least bounds, then choices that cannot be made."""
    rows = [_row(search, each) for each in sorted(search.choices, key=Searched.by_value)]
    choices = {each.choice for each in search.choices}
    refused = ((choice, error.detail) for choice, error in search.refused.items() if choice not in choices)
    return (*rows, *(Alternative(choice, None, None, None, detail) for choice, detail in refused))


def _row(search: Search, each: Searched) -> Alternative:
    plan = None if each.result is None else each.result.best
    if plan is not None and search.best_ns is not None:
        longer = 100 * (plan.value_ns / search.best_ns - 1)
        why = "" if each is search.best else f"takes {longer:.1f} % longer"
        return Alternative(each.choice, plan.value_ns, plan.timeline.peak_memory_bytes, each.least_ns, why)
    if each.choice in search.refused:
        why = search.refused[each.choice].detail
    elif each.result is not None:
        why = each.result.sentence
    elif each.dropped:
        why = each.dropped
    else:
        why = _why_spared(search, each) if search.is_open(each) else "its bound rules out a better plan"
    return Alternative(each.choice, None, None, each.least_ns, why)


def _choices(search: Search) -> str:
    number = len(search.choices)
    kinds = " and devices" if any(each.choice.excluded for each in search.choices) else ""
    return "one choice of degrees" if number == 1 else f"{number} choices of degrees{kinds}"

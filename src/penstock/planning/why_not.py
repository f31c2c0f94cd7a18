"""Answers to "why not these degrees": the choices that words name, their quickest plan, and its comparison.

A plan file holds no plan of other choices, so they are planned again: with planner ``even``, which is quick and always
gives the same plan, or with the one that is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from penstock.convert import to_problem
from penstock.convert.requested_degrees import degrees_with, refuse_sharding, to_degrees
from penstock.convert.requests import inline_documents
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.profile import WITH_DEGREES, ModelProfile
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import Sharding, listed
from penstock.shapes.profiled_degrees import refuse_illegal
from penstock.solvers.bounds.schedule_bound import request_bound
from penstock.solvers.degrees.axes import AXES
from penstock.solvers.degrees.contract import contract
from penstock.solvers.explanation.why_not import Planned
from penstock.solvers.model.degrees import Choice, Degrees
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Result, Status
from penstock.solvers.planners.catalogue import EXCLUDE, PHASES
from penstock.solvers.solve import driver
from penstock.solvers.solve.eligible import QUICK

NEXT = "next"
"""The text for the best of the other degrees that the request allows; without any, of other shardings and values."""
DEFAULT = "default"
"""The text for ``NEXT`` where the request allows another choice, and for nothing otherwise."""
EXAMPLE = "tensor=4, expert=8, sharding=none, tensor=4,sharding=none or next"


class PlannedChoice(NamedTuple):
    """The best of some choices, the bound on its plans, and the result with its plan or the reason for having none."""

    choice: Choice
    problem: Problem
    bound_ns: int
    planner: str
    result: Result

    @property
    def planned(self) -> Planned | None:
        """Return its plan with its problem; None without a plan."""
        return None if self.result.best is None else Planned(self.problem, self.result.best)


def other_choices(
    request: PlanRequest, current: Choice | None, texts: Sequence[str], planner: str | None, max_plans: int
) -> Iterator[tuple[str, PlannedChoice]]:
    """Yield each text with the best of the choices that it names, for a plan at ``current``.

    Degrees and values that a text does not name are free where the request leaves them open. ``default`` is ``next``
    where the request allows another choice, otherwise nothing. All texts are read first. Raises InvalidDocument for a
    text that names no other choice, UnsupportedRequest for degrees that the model, its profile or the cluster cannot
    have.
    """
    if not texts:
        return
    problem = to_problem(request)
    profile, _topology = inline_documents(request)
    mine = _settled(problem, current or Choice())
    named = []
    for text in texts:
        if text != DEFAULT:
            named.append((text, _others(problem, profile, mine, text)))
        elif len(problem.choices) > 1:
            named.append((NEXT, _others(problem, profile, mine, NEXT)))
    for text, others in named:
        yield text, _best(problem, others, planner, max_plans)


def _others(problem: Problem, profile: ModelProfile, current: Choice, text: str) -> list[Choice]:
    """Return the choices that a text names, without the plan's current one."""
    named = _named(text)
    if named and all(_value(current, name) == value for name, value in named.items()):
        raise InvalidDocument(
            f"the plan already has {text!r}: it is at {current}", remedy=f"name another choice: {EXAMPLE}"
        )
    every = dict.fromkeys(_settled(problem, each) for each in _candidates(problem, profile, current, named))
    others = [each for each in every if each != current]
    if not named:
        others = [each for each in others if each.degrees != current.degrees] or others
    if not others:
        raise InvalidDocument(
            f"the request allows no other choice than the plan's {current}", remedy="name one: tensor=4"
        )
    return others


def _value(choice: Choice, name: str) -> object:
    """Return a choice's value by its name: a degree, ``sharding``, or a further axis (None: as the request has it)."""
    return getattr(choice.degrees, name, choice.sharding if name == "sharding" else dict(choice.values).get(name))


def _settled(problem: Problem, choice: Choice) -> Choice:
    """Return the choice with its sharding filled in, where that is left to the memory rules."""
    rules: Sharding = "optimizer" if problem.memory.shard_states else "none"
    return choice._replace(sharding=choice.sharding or rules)


def _named(text: str) -> Mapping[str, Any]:
    """Return the degrees, the sharding and the values of further axes that a text names."""
    if text == NEXT:
        return {}
    named: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        name = name.replace("-", "_")
        whole = name in Degrees._fields and value.isdecimal() and len(value) < 6
        values = AXES[name].values if name in AXES else get_args(Sharding) if name == "sharding" else ()
        if not equals or name in named or not (whole or value in values):
            raise InvalidDocument(f"{text!r} is not a choice of degrees", remedy=f"such as {EXAMPLE}")
        named[name] = int(value) if whole else value
    return named


def _candidates(problem: Problem, profile: ModelProfile, current: Choice, named: Mapping[str, Any]) -> Iterator[Choice]:
    """Yield the choices that have the named values; the rest is as the request allows."""
    degree_values = {name: value for name, value in named.items() if name in Degrees._fields}
    values = tuple((name, value) for name, value in sorted(named.items()) if name in AXES)
    if not problem.variants and (degree_values or not (values or any(each.values for each in problem.choices))):
        raise UnsupportedRequest(
            f"the profile {profile.name!r} has no costs at degrees above 1",
            remedy=WITH_DEGREES,
        )
    refuse_sharding(profile, named.get("sharding"))
    open_to = problem.choices or (current,)
    degrees = list(dict.fromkeys(each.degrees for each in open_to))
    if degree_values:
        degrees = _with(problem, profile, degrees, degree_values)
    shardings = [named["sharding"]] if "sharding" in named else dict.fromkeys(each.sharding for each in open_to)
    others = dict.fromkeys(tuple(sorted((dict(each.values) | dict(values)).items())) for each in open_to)
    for each in degrees:
        for sharding in shardings:
            yield from (Choice(each, sharding, None, other) for other in others)


def _with(
    problem: Problem, profile: ModelProfile, open_to: Sequence[Degrees], degree_values: Mapping[str, int]
) -> list[Degrees]:
    """Return the open degrees that have the named values; where there are none, these values with all others 1.

    Raises UnsupportedRequest with the rule that they break, or with the degrees that the profile has.
    """
    wanted = Degrees(**degree_values)
    if min(degree_values.values()) > 0:
        refuse_illegal(profile, to_degrees(wanted))
    open_matches = degrees_with(open_to, degree_values)
    profile_degrees = [Degrees(), *(each.degrees for each in problem.variants)]
    if not open_matches and wanted not in profile_degrees:
        raise UnsupportedRequest(
            f"the profile {profile.name!r} has no costs at {_words(degree_values)}",
            remedy=f"choose degrees that the profile has costs at: {listed(map(to_degrees, profile_degrees))}",
        )
    return open_matches or [wanted]


def _words(degree_values: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in degree_values.items())


def _best(problem: Problem, allowed: Sequence[Choice], planner: str | None, max_plans: int) -> PlannedChoice:
    """Return the best of some choices. The least bound comes first; choices whose bound is no better are skipped."""
    waiting, refused = [], []
    for choice in allowed:
        try:
            cells = contract(problem, choice)
        except UnsupportedRequest as error:
            refused.append(error)
        else:
            waiting.append((request_bound(cells).bound_ns, choice, cells))
    if not waiting:
        raise refused[0]
    results: list[PlannedChoice] = []
    for bound_ns, choice, cells in sorted(waiting, key=lambda each: each[0]):
        best = min((each.planned.plan.value_ns for each in results if each.planned is not None), default=None)
        if best is None or bound_ns < best:
            results.append(_planned(choice, cells, bound_ns, planner, max_plans))
    return min(results, key=_by_value)


def _by_value(choice: PlannedChoice) -> tuple[bool, int, int]:
    """Return the key of plans by time; without a plan, by the least missing memory."""
    planned, short = choice.planned, choice.result.shortage
    if planned is not None:
        return False, planned.plan.value_ns, choice.bound_ns
    return True, choice.bound_ns if short is None else short.missing_bytes, choice.bound_ns


def _planned(choice: Choice, cells: Problem, bound_ns: int, planner: str | None, max_plans: int) -> PlannedChoice:
    """Plan one choice with planner ``even``, or with all planners where that finds nothing.

    If they find nothing either, the result of ``even`` remains, which states what is missing.
    """
    if planner is not None:
        result = driver.solve(cells, planner, max_plans=max_plans, prove_bounds=False)
        return PlannedChoice(choice, cells, bound_ns, planner, result)
    quick: Result | None = None
    with suppress(UnsupportedRequest):  # plans with a flush are not asked for
        quick = driver.solve(cells, QUICK, workers=1, prove_bounds=False)
    if quick is not None and (quick.best is not None or quick.status is Status.INFEASIBLE):
        return PlannedChoice(choice, cells, bound_ns, QUICK, quick)
    options = {EXCLUDE.name: ",".join(PHASES)}
    every = driver.solve(cells, "auto", max_plans=max_plans, options=options, workers=1, prove_bounds=False)
    if every.best is None and quick is not None:
        return PlannedChoice(choice, cells, bound_ns, QUICK, replace(quick, status=every.status))
    return PlannedChoice(choice, cells, bound_ns, "auto", every)

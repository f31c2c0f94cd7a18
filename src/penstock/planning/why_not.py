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
"""Names the best of the other degrees that the request allows, or of what else may be sharded at the same ones."""
DEFAULT = "default"
"""Names the same where there is one."""
EXAMPLE = "tensor=4, expert=8, sharding=none, tensor=4,sharding=none or next"


class Found(NamedTuple):
    """The best of some choices, the bound on all of its plans, and the result with its plan or the reason for none."""

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
    request: PlanRequest, own: Choice | None, asked: Sequence[str], planner: str | None, max_plans: int
) -> Iterator[tuple[str, Found]]:
    """Yield each text with the best that is found at the choices that it names, for a plan at ``own``.

    What a text does not name is free where the request leaves it open. ``default`` is ``next`` where the request
    allows another choice, and else nothing. Raises InvalidDocument for words that name no other choice,
    UnsupportedRequest for degrees that the model, its profile or the cluster cannot have; all words are read first.
    """
    if not asked:
        return
    problem = to_problem(request)
    profile, _topology = inline_documents(request)
    mine = _settled(problem, own or Choice())
    named = []
    for text in asked:
        if text != DEFAULT:
            named.append((text, _others(problem, profile, mine, text)))
        elif len(problem.choices) > 1:
            named.append((NEXT, _others(problem, profile, mine, NEXT)))
    for text, others in named:
        yield text, _best(problem, others, planner, max_plans)


def _others(problem: Problem, profile: ModelProfile, own: Choice, text: str) -> list[Choice]:
    """Return the choices besides the plan's own that a text names."""
    named = _named(text)
    if named and all(_value(own, name) == value for name, value in named.items()):
        raise InvalidDocument(
            f"{text!r} is what the plan has: it is at {own}", remedy=f"name another choice: {EXAMPLE}"
        )
    every = dict.fromkeys(_settled(problem, each) for each in _candidates(problem, profile, own, named))
    others = [each for each in every if each != own]
    if not named:
        others = [each for each in others if each.degrees != own.degrees] or others
    if not others:
        raise InvalidDocument(f"the request allows no choice but the plan's own, {own}", remedy="name one: tensor=4")
    return others


def _value(choice: Choice, name: str) -> object:
    """Return a choice's value by its name: of a degree, of ``sharding``, or of a further axis (None: as asked)."""
    return getattr(choice.degrees, name, choice.sharding if name == "sharding" else dict(choice.values).get(name))


def _settled(problem: Problem, choice: Choice) -> Choice:
    """Return the choice with what its replicas share out, where that is left to the memory rules."""
    rules: Sharding = "optimizer" if problem.memory.shard_states else "none"
    return choice._replace(sharding=choice.sharding or rules)


def _named(text: str) -> Mapping[str, Any]:
    """Return degrees, sharding and values of further axes that words name."""
    if text == NEXT:
        return {}
    named: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (each.strip() for each in part.partition("="))
        name = name.replace("-", "_")
        whole = name in Degrees._fields and value.isdecimal() and len(value) < 6
        values = AXES[name].values if name in AXES else get_args(Sharding) if name == "sharding" else ()
        if not equals or name in named or not (whole or value in values):
            raise InvalidDocument(f"{text!r} names no choice of degrees", remedy=EXAMPLE)
        named[name] = int(value) if whole else value
    return named


def _candidates(problem: Problem, profile: ModelProfile, own: Choice, named: Mapping[str, Any]) -> Iterator[Choice]:
    """Yield the choices with what is named; the rest as the request allows."""
    asked = {name: value for name, value in named.items() if name in Degrees._fields}
    values = tuple((name, value) for name, value in sorted(named.items()) if name in AXES)
    if not problem.variants and (asked or not (values or any(each.values for each in problem.choices))):
        raise UnsupportedRequest(
            f"the profile {profile.name!r} has no costs at degrees above 1",
            remedy=WITH_DEGREES,
        )
    refuse_sharding(profile, named.get("sharding"))
    open_to = problem.choices or (own,)
    degrees = list(dict.fromkeys(each.degrees for each in open_to))
    if asked:
        degrees = _with(problem, profile, degrees, asked)
    shardings = [named["sharding"]] if "sharding" in named else dict.fromkeys(each.sharding for each in open_to)
    others = dict.fromkeys(tuple(sorted((dict(each.values) | dict(values)).items())) for each in open_to)
    for each in degrees:
        for sharding in shardings:
            yield from (Choice(each, sharding, None, other) for other in others)


def _with(
    problem: Problem, profile: ModelProfile, open_to: Sequence[Degrees], asked: Mapping[str, int]
) -> list[Degrees]:
    """Return the open degrees with what is asked; where there are none, those with nothing else above 1.

    Raises UnsupportedRequest with the rule that they break, or what the profile has instead.
    """
    wanted = Degrees(**asked)
    if min(asked.values()) > 0:
        refuse_illegal(profile, to_degrees(wanted))
    found = degrees_with(open_to, asked)
    known = [Degrees(), *(each.degrees for each in problem.variants)]
    if not found and wanted not in known:
        raise UnsupportedRequest(
            f"the profile {profile.name!r} has no costs at {_words(asked)}",
            remedy=f"it has them at {listed(map(to_degrees, known))}",
        )
    return found or [wanted]


def _words(asked: Mapping[str, int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asked.items())


def _best(problem: Problem, allowed: Sequence[Choice], planner: str | None, max_plans: int) -> Found:
    """Return the best of some choices, the least bound first; one whose bound is above the best is not planned."""
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
    found: list[Found] = []
    for bound_ns, choice, cells in sorted(waiting, key=lambda each: each[0]):
        best = min((each.planned.plan.value_ns for each in found if each.planned is not None), default=None)
        if best is None or bound_ns < best:
            found.append(_planned(choice, cells, bound_ns, planner, max_plans))
    return min(found, key=_by_value)


def _by_value(found: Found) -> tuple[bool, int, int]:
    """Return the key of plans by time; without a plan, by the least missing memory."""
    planned, short = found.planned, found.result.shortage
    if planned is not None:
        return False, planned.plan.value_ns, found.bound_ns
    return True, found.bound_ns if short is None else short.missing_bytes, found.bound_ns


def _planned(choice: Choice, cells: Problem, bound_ns: int, planner: str | None, max_plans: int) -> Found:
    """Plan one choice; where planner ``even`` finds nothing, with all planners, and if need be say what it lacks."""
    if planner is not None:
        result = driver.solve(cells, planner, max_plans=max_plans, prove_bounds=False)
        return Found(choice, cells, bound_ns, planner, result)
    quick: Result | None = None
    with suppress(UnsupportedRequest):  # plans with a flush are not asked for
        quick = driver.solve(cells, QUICK, workers=1, prove_bounds=False)
    if quick is not None and (quick.best is not None or quick.status is Status.INFEASIBLE):
        return Found(choice, cells, bound_ns, QUICK, quick)
    options = {EXCLUDE.name: ",".join(PHASES)}
    every = driver.solve(cells, "auto", max_plans=max_plans, options=options, workers=1, prove_bounds=False)
    if every.best is None and quick is not None:
        return Found(choice, cells, bound_ns, QUICK, replace(quick, status=every.status))
    return Found(choice, cells, bound_ns, "auto", every)

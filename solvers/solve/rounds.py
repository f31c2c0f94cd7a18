"""Which tasks a solve runs, in rounds: each begins when the one before has ended.

A planner that is asked alone has one round: its proposals, and the bound on all plans of one pipeline. ``auto`` has
three:

1. every planner that goes with the request, each as if it were asked alone with the same limits, so that ``auto`` is
   never worse than any of them. Planners whose update rules the request does not allow, those that ``exclude`` names,
   and those that cannot take the request are left out; with a target only those that stay within it are asked;
2. a neighbourhood search from the best plan, while its order is improved or proven;
3. the same improvement or proof for what that search has made of the plan.

Where a plan of several pipelines or with split backwards is best, the best of all others is searched from and closed
as well. With a target there is the first round only: what follows makes plans beyond its limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.network import MAX_DENSE_DEVICES
from penstock.solvers.model.options import checked
from penstock.solvers.model.update_rules import PERIODIC_RULES
from penstock.solvers.planners.catalogue import EXCLUDE, PHASES, PLANNERS, Planner, Tier
from penstock.solvers.schedules.catalogue import tried_with
from penstock.solvers.solve.judging import Unheard
from penstock.solvers.solve.limits import Setting
from penstock.solvers.solve.outcome import Found
from penstock.solvers.solve.state import State
from penstock.solvers.solve.tasks import Ask, Close, Polish, Prove, Task

EFFORT = 1.0
"""Effort of closing a plan, without a time limit."""
SHARE = 8
"""With one, closing gets 1/8 of it."""
POLISHING = 3
"""The neighbourhood search's effort, as a multiple of that of closing a plan."""
CLOSED_TWICE = 2
"""Plans that are closed: the best of the planners, and what the neighbourhood search makes of it."""


def rounds(state: State, planner: Planner, values: Mapping[str, object]) -> Iterator[list[Task]]:
    """Yield the tasks of each round; ``values`` are all options of the planner.

    Raises ``UnsupportedRequest`` where a planner that is asked alone cannot take the request.
    """
    setting = state.setting
    bounds: list[Task] = [] if setting.first_feasible else [Prove()]
    if planner.proposals is not None:
        yield [Ask(planner.name, values), *bounds]
        if state.refused:
            raise state.refused[0]
        return
    excluded = _excluded(EXCLUDE.of(values))
    yield [*bounds, *asked(setting, _rows(setting, excluded))]
    only_planners = setting.first_feasible or setting.problem.within is not None
    closed: set[object] = set()
    for number in range(0 if only_planners or setting.problem.num_devices > MAX_DENSE_DEVICES else CLOSED_TWICE):
        following: list[Task] = []
        for start in _starts(state):
            if number == 0 and "polish" not in excluded and _polishable(state, start):
                following.append(Polish(start, tuple(state.proofs.by_class.values()), POLISHING * _effort(setting)))
            if "closing" not in excluded and start.allocation not in closed:
                following.append(Close(start, _effort(setting)))
            closed.add(start.allocation)
        yield following


def first_plan(state: State, values: Mapping[str, object]) -> None:
    """Offer the first plan of a simple planner that fits, before worker processes are there."""
    rows = _rows(state.setting, _excluded(EXCLUDE.of(values)))
    setting = replace(state.setting, first_feasible=True)
    wide = [row for row in rows if row.least_devices > 1]
    for task in asked(setting, wide or [row for row in rows if row.tier is Tier.SIMPLE]):
        if state.best is None and not setting.deadline.passed:
            found = task.run(setting, Unheard()).found
            if found is not None:
                state.offer(found)


def asked(setting: Setting, rows: list[Planner]) -> list[Task]:
    """Return the planners with their default options, and the schedules that name them."""
    tasks: list[Task] = []
    for row in rows:
        also = [each for each in tried_with(row.name) if each.drafted]
        makes = row.makes(setting.problem) if row.makes and not any(each.split for each in also) else None
        values = checked(row.name, row.options, {})
        tasks.append(Ask(row.name, values, tuple(each.name for each in also), makes, row.early))
    return tasks


def _rows(setting: Setting, excluded: set[str]) -> list[Planner]:
    """Return the planners that a request is given to, in the order in which they are asked and ties are decided.

    Where the first plan that fits is enough, none that is exact.
    """
    problem, size = setting.problem, setting.problem.num_devices
    targeted = problem.within is not None
    rows = [row for row in PLANNERS.values() if row.proposals is not None and row.target == targeted]
    rows = [row for row in rows if row.name not in excluded and row.least_devices <= size]
    if setting.first_feasible:
        rows = [row for row in rows if not row.exact]
    unlimited = [row for row in rows if size <= row.most_devices and row.supports & problem.update_rules]
    rows = [row for row in unlimited or rows if _goes_with(setting, row)]
    return sorted(rows, key=lambda row: (row.least_devices == 1, row.tier))


def _goes_with(setting: Setting, row: Planner) -> bool:
    """Return whether a planner knows the schedule that is asked for, or makes its own, and one of the update rules."""
    knows = setting.schedule == "auto" or setting.schedule in row.accepts
    return knows and bool(row.supports & setting.problem.update_rules)


def _starts(state: State) -> list[Found]:
    """Return the best plan, and the best plain one where that is another: closed, it may be the better one of both."""
    best, plain = state.incumbent.best, state.plain.best
    if best is None:
        return []
    return [best] if best.plain or plain is None else [plain, best]


def _polishable(state: State, start: Found) -> bool:
    """Return whether a neighbourhood search knows the plan's update rule and the schedule that was asked for."""
    own = "eager" if start.update_rule in PERIODIC_RULES else "early-backward"
    known = start.update_rule == "synchronous" or start.update_rule in PERIODIC_RULES
    return known and state.setting.schedule in ("auto", own) and not state.done


def _effort(setting: Setting) -> float:
    """Return the effort of closing: by the limit that was asked for, not by the time that is left."""
    limit_s = setting.deadline.limit_s
    return EFFORT if limit_s is None else limit_s / SHARE


def _excluded(names: str) -> set[str]:
    """Return the planners named. Raises ``UnsupportedRequest`` for one that is not contained."""
    known = {*(row.name for row in PLANNERS.values() if row.proposals is not None), *PHASES}
    excluded = {name.strip() for name in names.split(",") if name.strip()}
    for name in sorted(excluded - known):
        near = get_close_matches(name, known, n=1)
        raise UnsupportedRequest(
            f"planner 'auto' contains no {name!r}; it contains {', '.join(sorted(known))}",
            remedy=f"did you mean {near[0]!r}?" if near else None,
        )
    return excluded

"""The planners that ``auto`` runs for a request, and why it does not run the others.

A reason states the values that decided. At several choices of degrees, reasons of one kind have different values; such
reasons are combined into one, with the least and the greatest value (``Reason.combined``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from penstock.schemas.errors import UnsupportedRequest, meant
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.micro_batches import size_of
from penstock.solvers.model.network import MAX_DENSE_DEVICES
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import Reason
from penstock.solvers.planners.catalogue import EXCLUDE, PHASES, PLANNERS, Planner, Tier
from penstock.solvers.planners.effort import LARGE
from penstock.solvers.planners.setting import Setting
from penstock.solvers.solve.searched import Searched

MOST_CELLS = 1024
"""Most cells of an open choice of degrees for ordinary planners, which take minutes each on more.

With more cells, only planners for any number of devices run.
"""
EXACT = tuple(row.name for row in PLANNERS.values() if row.exact)
PROVING = tuple(row.name for row in PLANNERS.values() if row.tier is Tier.PROOF and row.least_devices == 1)


class Chosen(NamedTuple):
    """The planners that ``auto`` runs, in order, and the reason for each planner left out."""

    rows: list[Planner]
    left_out: dict[str, Reason]


def chosen(setting: Setting, excluded: set[str]) -> Chosen:
    """Return the planners that ``auto`` runs; ties between plans are decided in their order.

    If the first plan that fits is enough, no exact planner runs. With an effort that ends planners early, planners that
    prove the best plan of a small request do not run for a large request. A planner limited to fewer devices than the
    problem has runs only where no other planner takes the request; its error is then the answer.
    """
    every = [row for row in PLANNERS.values() if row.proposals is not None]
    fit = [row for row in every if row.name not in excluded and _unfit(setting, row) is None]
    of_size = [row for row in fit if _oversized(setting, row) is None and row.supports & setting.problem.update_rules]
    rows = [row for row in of_size or fit if _mismatched(setting, row) is None]
    reasons = {row.name: _reason(setting, row) for row in every if row not in rows and row.name not in excluded}
    reasons |= {name: reason for name, reason in setting.excluded.items() if reason}
    by_name = Reason(f"option {EXCLUDE.name} names them")
    reasons |= dict.fromkeys(sorted(excluded - set(setting.excluded)), by_name)
    wide = any(row.least_devices > 1 for row in rows)

    def turn(row: Planner) -> tuple[bool, bool, Tier]:
        return wide and row.tier is not Tier.SIMPLE and not row.listed, row.least_devices == 1, row.tier

    return Chosen(sorted(rows, key=turn), reasons)


def _reason(setting: Setting, row: Planner) -> Reason:
    """Return why a planner is not run: what the user requested comes before what takes too long."""
    reason = _unfit(setting, row, by_target_alone=True) or _mismatched(setting, row)
    reason = reason or _unfit(setting, row) or _oversized(setting, row)
    assert reason is not None, row.name
    return reason


def _unfit(setting: Setting, row: Planner, *, by_target_alone: bool = False) -> Reason | None:
    """Return why a planner does not suit a request of this target, number of devices, and effort."""
    problem, size = setting.problem, setting.problem.num_devices
    if problem.within is not None and not row.target:
        return Reason(f"their plans are not kept within what target {problem.within.trainer} can express")
    if problem.within is None and row.target:
        return Reason("the request names no target")
    if by_target_alone:
        return None
    if row.least_devices > size:
        return Reason(_devices(problem) + " fewer than the {} from which on it is asked", (size, row.least_devices))
    if setting.first_feasible:
        return Reason("the first plan that fits is enough") if row.exact else None
    large = setting.effort.patience is not None and row.tier is Tier.PROOF and row.least_devices == 1
    if large and size_of(problem) > LARGE:
        return too_large(size_of(problem))
    return None


def too_large(size: int) -> Reason:
    """Return why planners that prove the best plan of small requests are not run for a large one."""
    kind = "layers × devices × numbers of micro-batches are {}, above the {} up to which they are asked"
    return Reason(kind, (size, LARGE))


def _devices(problem: Problem) -> str:
    """Return the beginning of a reason, up to its verb; its first value is the number of devices."""
    number = problem.num_devices
    return f"{{}} {problem.units(number)} {'is' if number == 1 else 'are'}"


def _oversized(setting: Setting, row: Planner) -> Reason | None:
    """Return why a planner is not run for this number of devices, if another planner is."""
    problem, size = setting.problem, setting.problem.num_devices
    if reach(problem) <= row.most_devices:
        return None
    most = row.most_devices if size > row.most_devices else MOST_CELLS
    return Reason(_devices(problem) + " more than the {} up to which they are asked", (size, most))


def _mismatched(setting: Setting, row: Planner) -> Reason | None:
    """Return why a planner has no plans with the requested update rules and schedule."""
    rules = setting.problem.update_rules
    if not row.supports & rules:
        return Reason(f"the request allows only update rule {' and '.join(sorted(rules))}")
    if setting.schedule != "auto" and setting.schedule not in row.accepts:
        return Reason(f"they do not make schedule {setting.schedule!r}")
    return None


def reach(problem: Problem) -> int:
    """Return the number of devices that planners, and searches from their plans, have to support."""
    many = problem.choice is not None and problem.num_devices > MOST_CELLS
    return max(problem.num_devices, MAX_DENSE_DEVICES + 1) if many else problem.num_devices


def why_unsearched(setting: Setting) -> Reason | None:
    """Return why neither plans nor orders are searched from the best plan; None where they are."""
    problem, size = setting.problem, setting.problem.num_devices
    if problem.within is not None:
        return Reason(f"it makes plans beyond target {problem.within.trainer}")
    if reach(problem) > MAX_DENSE_DEVICES:
        most = MAX_DENSE_DEVICES if size > MAX_DENSE_DEVICES else MOST_CELLS
        return Reason(_devices(problem) + " more than the {} up to which it follows", (size, most))
    return None


def excluded_by(setting: Setting, names: str) -> set[str]:
    """Return the names of the planners and phases that are left out: by the user, or because the setting excludes them.

    Raises ``UnsupportedRequest`` for a name that ``auto`` does not contain.
    """
    contained = {*(row.name for row in PLANNERS.values() if row.proposals is not None), *PHASES}
    excluded = {name.strip() for name in names.split(",") if name.strip()}
    for name in sorted(excluded - contained):
        raise UnsupportedRequest(
            f"planner 'auto' contains no {name!r}; it contains {', '.join(sorted(contained))}",
            remedy=meant(name, contained),
        )
    return excluded | set(setting.excluded)


# ---- in words --------------------------------------------------------------------------------------------------------


def not_asked(left_out: Sequence[Mapping[str, Reason]], choices: int = 1) -> Iterator[str]:
    """Yield a clause for each reason, with its planners: "not asked, as the request names no target: uniform".

    ``left_out``: one mapping for each search, such as one at each of ``choices`` choices of degrees, from the planner
    to
    the reason. A clause says at how many of the searches it holds, unless it holds for all.
    """
    alike: dict[tuple[str, str], list[Reason]] = {}
    for each in left_out:
        for name, reason in each.items():
            alike.setdefault((name, reason.kind), []).append(reason)
    clauses: dict[tuple[str, int], list[str]] = {}
    for (name, _), reasons in alike.items():
        clauses.setdefault((Reason.combined(reasons), len(reasons)), []).append(name)
    for (words, number), planners in clauses.items():
        where = "" if number == choices else f" at {number} of {choices} choices"
        yield f"not asked{where}, as {words}: {', '.join(planners)}"


# ---- at choices of degrees -------------------------------------------------------------------------------------------

QUICK = "even"
"""The planner that ranks the choices first."""
LISTED = tuple(row.name for row in PLANNERS.values() if row.listed)
"""The planners that rank the choices next: they find their best plans early."""


class Round(NamedTuple):
    """A round over choices: ``plans`` are simulated per planner; choices within ``near`` times the best plan continue.

    ``planners``: only these run, one after the other, with all plans that their effort allows.
    """

    plans: int | None
    near: float
    planners: tuple[str, ...] = ()


ROUNDS = (Round(None, 1.4, (QUICK,)), Round(None, 1.12, LISTED), Round(1, 1.12), Round(8, 1.03))
"""The rounds of planner ``auto``."""
NO_PLAN = "no plan of theirs was found to fit"
NEAR = 1.12
"""Choices within this multiple of the best plan of planner ``QUICK`` get the whole effort of another planner."""
LEAST_S = 2.0
"""Least time of planners at a choice, with the start of their processes, to be worth comparing, in seconds."""


def most_comparable(deadline: Deadline) -> float:
    """Return how many choices many planners can compare in half of the time left."""
    return inf if deadline.left_s is None else deadline.left_s / (2 * LEAST_S)


def left_out(each: Searched) -> dict[str, Reason | None]:
    """Return the planners that do not run at a choice: planners that ended a search; for a large one ``PROVING``."""
    unfit = {} if each.size <= LARGE else dict.fromkeys(PROVING, too_large(each.size))
    return {**dict.fromkeys(each.finished_planners), **unfit}


def excluding(setting: Setting, others: Mapping[str, Reason | None]) -> Setting:
    """Return the setting of ``auto`` without these planners or phases; the answer gives the reason for each."""
    return replace(setting, excluded={**setting.excluded, **others})

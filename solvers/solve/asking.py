"""Which planners ``auto`` asks for a request, and why it does not ask the others.

A reason says which values decided. Over choices of degrees the same reason has other numbers at each, so that reasons
are distinguished without their numbers, and named once with the least and the greatest (``gathered``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from math import inf
from typing import Any, NamedTuple

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.deadline import Deadline
from penstock.solvers.model.micro_batches import size_of
from penstock.solvers.model.network import MAX_DENSE_DEVICES
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.catalogue import EXCLUDE, PHASES, PLANNERS, Planner, Tier
from penstock.solvers.solve.effort import LARGE
from penstock.solvers.solve.searched import Searched
from penstock.solvers.solve.setting import Setting

MOST_CELLS = 1024
"""Where degrees are a choice, more cells are for planners of any number of devices alone: others take minutes each."""
EXACT = tuple(row.name for row in PLANNERS.values() if row.exact)
PROVING = tuple(row.name for row in PLANNERS.values() if row.tier is Tier.PROOF and row.least_devices == 1)
_NUMBER = re.compile(r"(?<![\w./\-])\d+(?:,\d{3})*(?![\w/\-]|\.\d)")
"""A number of its own in a reason: neither part of a name nor of a decimal."""


class Chosen(NamedTuple):
    """The planners that a request is given to, in the order in which they are asked; of the others the reason."""

    rows: list[Planner]
    left_out: dict[str, str]


def chosen(setting: Setting, excluded: set[str]) -> Chosen:
    """Return the planners that ``auto`` asks; ties are decided in their order.

    Where the first plan that fits is enough, none that is exact; with an effort that ends planners, none that proves
    what is best of a small request, if this one is large. Planners of fewer devices than there are are asked only where
    no other takes the request: what they say of it is the answer then.
    """
    every = [row for row in PLANNERS.values() if row.proposals is not None]
    fit = [row for row in every if row.name not in excluded and _unfit(setting, row) is None]
    of_size = [row for row in fit if _oversized(setting, row) is None and row.supports & setting.problem.update_rules]
    rows = [row for row in of_size or fit if _mismatched(setting, row) is None]
    reasons = {row.name: _reason(setting, row) for row in every if row not in rows and row.name not in excluded}
    reasons |= {name: reason for name, reason in setting.without.items() if reason}
    reasons |= dict.fromkeys(sorted(excluded - set(setting.without)), f"option {EXCLUDE.name} names them")
    wide = any(row.least_devices > 1 for row in rows)

    def turn(row: Planner) -> tuple[bool, bool, Tier]:
        return wide and row.tier is not Tier.SIMPLE and not row.listed, row.least_devices == 1, row.tier

    return Chosen(sorted(rows, key=turn), reasons)


def _reason(setting: Setting, row: Planner) -> str:
    """Return why a planner is not asked: what the user has asked for comes before what takes too long."""
    found = _unfit(setting, row, by_target_alone=True) or _mismatched(setting, row)
    found = found or _unfit(setting, row) or _oversized(setting, row)
    assert found is not None, row.name
    return found


def _unfit(setting: Setting, row: Planner, *, by_target_alone: bool = False) -> str | None:
    """Return why a planner is not for a request of this target, number of devices, and effort."""
    problem, size = setting.problem, setting.problem.num_devices
    if problem.within is not None and not row.target:
        return f"their plans are not kept within what target {problem.within.trainer} can express"
    if problem.within is None and row.target:
        return "the request names no target"
    if by_target_alone:
        return None
    if row.least_devices > size:
        there = f"{problem.counted(size)} {'is' if size == 1 else 'are'}"
        return f"{there} fewer than the {row.least_devices:,} from which on it is asked"
    if setting.first_feasible:
        return "the first plan that fits is enough" if row.exact else None
    large = setting.effort.patience is not None and row.tier is Tier.PROOF and row.least_devices == 1
    if large and size_of(problem) > LARGE:
        return too_large(size_of(problem))
    return None


def too_large(size: int) -> str:
    """Return why planners that prove what is best of small requests are not asked for a large one."""
    return f"layers × devices × numbers of micro-batches are {size:,}, above the {LARGE:,} up to which they are asked"


def _oversized(setting: Setting, row: Planner) -> str | None:
    """Return why a planner is not asked for this number of devices, as long as another one is."""
    problem, size = setting.problem, setting.problem.num_devices
    if reach(problem) <= row.most_devices:
        return None
    most = row.most_devices if size > row.most_devices else MOST_CELLS
    return f"{problem.counted(size)} are more than the {most:,} up to which they are asked"


def _mismatched(setting: Setting, row: Planner) -> str | None:
    """Return why a planner has no plans with the update rules and the schedule that were asked for."""
    rules = setting.problem.update_rules
    if not row.supports & rules:
        return f"the request allows only update rule {' and '.join(sorted(rules))}"
    if setting.schedule != "auto" and setting.schedule not in row.accepts:
        return f"they do not make schedule {setting.schedule!r}"
    return None


def reach(problem: Problem) -> int:
    """Return the number of devices that planners have to take, and searches from their plans."""
    many = problem.choice is not None and problem.num_devices > MOST_CELLS
    return max(problem.num_devices, MAX_DENSE_DEVICES + 1) if many else problem.num_devices


def why_unsearched(setting: Setting) -> str:
    """Return why neither plans nor orders are searched for from the best plan; empty where they are."""
    problem, size = setting.problem, setting.problem.num_devices
    if problem.within is not None:
        return f"it makes plans beyond target {problem.within.trainer}"
    if reach(problem) > MAX_DENSE_DEVICES:
        most = MAX_DENSE_DEVICES if size > MAX_DENSE_DEVICES else MOST_CELLS
        return f"{problem.counted(size)} are more than the {most:,} up to which it follows"
    return ""


def excluded_by(setting: Setting, names: str) -> set[str]:
    """Return the planners and phases that are left out: those named, and those that the setting is ``without``.

    Raises ``UnsupportedRequest`` for a name that is not contained.
    """
    known = {*(row.name for row in PLANNERS.values() if row.proposals is not None), *PHASES}
    excluded = {name.strip() for name in names.split(",") if name.strip()}
    for name in sorted(excluded - known):
        near = get_close_matches(name, known, n=1)
        raise UnsupportedRequest(
            f"planner 'auto' contains no {name!r}; it contains {', '.join(sorted(known))}",
            remedy=f"did you mean {near[0]!r}?" if near else None,
        )
    return excluded | set(setting.without)


# ---- in words --------------------------------------------------------------------------------------------------------


def refusal(detail: str) -> str:
    """Return a planner's own words, that it cannot take the request, as a reason."""
    return detail.rstrip(".").replace("; ", ", ")


def not_asked(left_out: Sequence[Mapping[str, str]], choices: int = 1) -> Iterator[str]:
    """Yield a clause for each reason, with the planners: "not asked, as the request names no target: uniform".

    ``left_out``: of each search, such as those at ``choices`` choices of degrees that were searched, the reason by the
    planner. A clause says at how many of them, unless it holds at all.
    """
    names: dict[tuple[str, str], list[str]] = {}
    for each in left_out:
        for name, reason in each.items():
            names.setdefault((name, _NUMBER.sub("#", reason)), []).append(reason)
    clauses: dict[tuple[str, int], list[str]] = {}
    for (name, _), reasons in names.items():
        clauses.setdefault((gathered(reasons), len(reasons)), []).append(name)
    for (reason, number), planners in clauses.items():
        where = "" if number == choices else f" at {number} of {choices} choices"
        yield f"not asked{where}, as {reason}: {', '.join(planners)}"


def gathered(reasons: Sequence[str]) -> str:
    """Return one sentence for several that differ in numbers alone, each of which becomes ``least to greatest``."""
    numbers = zip(*(map(_value, _NUMBER.findall(reason)) for reason in reasons), strict=True)
    ranges = iter([_range(values) for values in numbers])
    return _NUMBER.sub(lambda _: next(ranges), reasons[0])


def _value(number: str) -> int:
    return int(number.replace(",", ""))


def _range(values: Iterable[int]) -> str:
    known = sorted(values)
    low, high = known[0], known[-1]
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


# ---- at choices of degrees -------------------------------------------------------------------------------------------

QUICK = "even"
"""The planner that ranks the choices first."""
LISTED = tuple(row.name for row in PLANNERS.values() if row.listed)
"""The planners that rank the choices next: they have their best plans soon."""


class Round(NamedTuple):
    """``plans`` of each planner that are simulated; who is ``near`` the best goes on.

    ``planners``: these alone are asked, one after the other, for all plans that their effort allows.
    """

    plans: int | None
    near: float
    planners: tuple[str, ...] = ()


ROUNDS = (Round(None, 1.4, (QUICK,)), Round(None, 1.12, LISTED), Round(1, 1.12), Round(8, 1.03))
"""Of planner ``auto``."""
NO_PLAN = "no plan of theirs was found to fit"
NEAR = 1.12
"""How near the best of planner ``QUICK`` a choice is that gets the whole effort of another planner."""
LEAST_S = 2.0
"""Seconds that planners need at least at a choice, with the start of their processes, to be worth comparing."""


def most_comparable(deadline: Deadline) -> float:
    """Return how many choices can be compared by many planners in half of the time left."""
    return inf if deadline.left_s is None else deadline.left_s / (2 * LEAST_S)


def left_out(each: Searched) -> dict[str, str]:
    """Return the planners that a choice is not given to: those that had their effort; for a large one ``PROVING``."""
    return dict.fromkeys(each.asked, "") | dict.fromkeys(PROVING if each.size > LARGE else (), too_large(each.size))


def without(asked: Mapping[str, Any], others: Mapping[str, str]) -> dict[str, Any]:
    """Return what is asked of ``auto`` without these planners or phases; of each the reason that the answer gives."""
    return {**asked, "without": {**asked.get("without", {}), **others}}

"""``auto``: every planner's best plan, the simple ones first, then a search from the best of all, then its proof.

Rounds (``portfolio``): all planners, each as if it were run alone with the same limits, so that ``auto`` is never worse
than any of them; a neighbourhood search from the best plan, while its order is improved or proven; the same for the
search's own result. Where a plan of several pipelines or with split backwards is best, the best of all others is
searched from and closed as well. Planners whose update rules the request does not allow, those that ``exclude`` names,
and those that cannot take the request are left out. With a target, ``uniform`` alone is asked: all others, and what
follows them, make plans beyond its limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from enum import IntEnum
from typing import TYPE_CHECKING

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.network import MAX_DENSE_DEVICES
from penstock.solvers.model.options import Option, checked
from penstock.solvers.model.update_rules import PERIODIC_RULES
from penstock.solvers.planners.trainer import planner as uniform
from penstock.solvers.schedules.catalogue import tried_with
from penstock.solvers.solve.outcome import Found
from penstock.solvers.solve.rounds import Tasks
from penstock.solvers.solve.session import Session
from penstock.solvers.solve.tasks import Ask, Close, Polish, Prove, Setting, Task
from penstock.solvers.solve.workers import Crew

if TYPE_CHECKING:
    from penstock.solvers.planners.catalogue import Planner

PHASES = ("polish", "closing")
"""What follows the planners."""
EFFORT = 1.0
"""Of closing a plan, without a time limit."""
SHARE = 8
"""With one, 1/8 of it."""
POLISHING = 3
"""Times the effort of closing a plan, for the neighbourhood search."""
CLOSED_TWICE = 2
"""Plans that are closed: the best of the planners, and what the neighbourhood search makes of it."""
EXCLUDE = Option("exclude", "", "contained planners to leave out, separated by commas; also 'polish' and 'closing'")
OPTIONS = (EXCLUDE, uniform.TRANSFORMER)


class Tier(IntEnum):
    """When ``auto`` asks a planner; ties between plans go to the one that was asked first."""

    SIMPLE = 0
    """One of these has a plan within a second."""
    SEARCH = 1
    PROOF = 2
    """Long at work, for a proof or for many devices."""


def run(session: Session, values: Mapping[str, object], planners: Mapping[str, Planner], crew: Crew) -> None:
    """All rounds."""
    excluded = _excluded(EXCLUDE.of(values), planners)
    bounds = [] if session.first_feasible else [Prove()]
    Tasks(session, [*bounds, *_asked(session, _rows(session, excluded, planners))]).run(crew)
    done = session.best is None or session.first_feasible
    if done or session.problem.within is not None or session.problem.num_devices > MAX_DENSE_DEVICES:
        return
    closed: set[object] = set()
    for number in range(CLOSED_TWICE):
        following: list[Task] = []
        for start in _starts(session):
            if number == 0 and "polish" not in excluded and _polishable(session, start):
                following.append(Polish(start, tuple(session.proofs.values()), POLISHING * _effort(session)))
            if "closing" not in excluded and start.allocation not in closed:
                following.append(Close(start, _effort(session)))
            closed.add(start.allocation)
        Tasks(session, following).run(crew)


def _rows(session: Session, excluded: set[str], planners: Mapping[str, Planner]) -> list[Planner]:
    """The planners that a request is given to, in the order in which they are asked and ties are decided."""
    problem = session.problem
    size = problem.num_devices
    targeted = problem.within is not None
    rows = [row for row in planners.values() if row.proposals is not None and row.target == targeted]
    rows = [row for row in rows if row.name not in excluded and row.least_devices <= size]
    if session.first_feasible:
        rows = [row for row in rows if not row.exact]
    unlimited = [row for row in rows if size <= row.most_devices and row.supports & problem.update_rules]
    rows = [row for row in unlimited or rows if _goes_with(session, row)]
    return sorted(rows, key=lambda row: (row.least_devices == 1, row.tier))


def _starts(session: Session) -> list[Found]:
    """The best plan, and the best plain one where that is another: closed, it may be the better one of both."""
    assert session.best is not None
    best = Found.of(session.best)
    return [best] if best.plain or session.plain is None else [session.plain, best]


def first_plan(session: Session, values: Mapping[str, object], planners: Mapping[str, Planner]) -> None:
    """The first plan of a simple planner that fits, told before processes are there."""
    setting = replace(Setting.of(session, planners), first_feasible=True)
    rows = _rows(session, _excluded(EXCLUDE.of(values), planners), planners)
    wide = [row for row in rows if row.least_devices > 1]
    for task in _asked(session, wide or [row for row in rows if row.tier is Tier.SIMPLE]):
        if session.best is None and not session.deadline.passed:
            found = task.run(setting, _Silent()).found
            if found is not None:
                session.offer(found)


def remarks(session: Session) -> str:
    """What is added to ``why``: processes that died."""
    return "".join(f"; the process of {name} ended with {how}" for name, how in session.lost.items())


class _Silent:
    """A link to nobody."""

    def best_ns(self) -> int | None:
        return None

    def found(self, found: object) -> None:
        """Not told."""

    def proven(self, bound: object) -> None:
        """Not told."""


def _asked(session: Session, rows: list[Planner]) -> list[Task]:
    """The planners with their default options, and the schedules that name them."""
    asked: list[Task] = []
    for row in rows:
        also = [each for each in tried_with(row.name) if each.drafted]
        makes = row.makes(session.problem) if row.makes and not any(each.split for each in also) else None
        values = checked(row.name, row.options, {})
        asked.append(Ask(row.name, values, tuple(each.name for each in also), makes, row.early))
    return asked


def _goes_with(session: Session, row: Planner) -> bool:
    """Whether it knows the schedule, or makes its own, and one of the update rules."""
    knows = session.schedule == "auto" or session.schedule in row.accepts
    return knows and bool(row.supports & session.problem.update_rules)


def _polishable(session: Session, start: Found) -> bool:
    """Whether a neighbourhood search knows the plan's update rule and the schedule that was asked for."""
    own = "eager" if start.update_rule in PERIODIC_RULES else "early-backward"
    known = start.update_rule == "synchronous" or start.update_rule in PERIODIC_RULES
    return known and session.schedule in ("auto", own) and not session.done


def _effort(session: Session) -> float:
    """Deterministic: by the limit that was asked for, not by the time that is left."""
    limit_s = session.deadline.limit_s
    return EFFORT if limit_s is None else limit_s / SHARE


def _excluded(names: str, planners: Mapping[str, Planner]) -> set[str]:
    """The planners named. Raises ``UnsupportedRequest`` for one that is not contained."""
    known = {*(row.name for row in planners.values() if row.proposals is not None), *PHASES}
    excluded = {name.strip() for name in names.split(",") if name.strip()}
    for name in sorted(excluded - known):
        near = get_close_matches(name, known, n=1)
        raise UnsupportedRequest(
            f"planner 'auto' contains no {name!r}; it contains {', '.join(sorted(known))}",
            remedy=f"did you mean {near[0]!r}?" if near else None,
        )
    return excluded

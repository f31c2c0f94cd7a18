"""``auto``: every planner's best plan, the simple ones first, then a search from the best of all, then its proof.

Rounds (``portfolio``): all planners, each as if it were run alone with the same limits, so that ``auto`` is never worse
than any of them; a neighbourhood search from the best plan, while its order is improved or proven; the same for the
search's own result. Where a plan of several pipelines or with split backwards is best, the best of all others is
searched from and closed as well. Planners whose update rules the request does not allow, those that ``exclude`` names,
and those that cannot take the request are left out. With a target, ``uniform`` alone is asked: all others, and what
follows them, make plans beyond its limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from penstock.schemas.coverage import Covers
from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.coverage import one_pipeline, planned_apart
from penstock.solvers.network import MAX_DENSE_DEVICES
from penstock.solvers.planners import uniform
from penstock.solvers.planners.options import Option, checked
from penstock.solvers.planners.session import Session
from penstock.solvers.portfolio.crew import Crew
from penstock.solvers.portfolio.outcome import Found
from penstock.solvers.portfolio.rounds import Tasks
from penstock.solvers.portfolio.tasks import MOST_LABELLED, Ask, Close, Known, Polish, Prove, Setting, Task
from penstock.solvers.problem import Problem
from penstock.solvers.update_rules import PERIODIC_RULES

CONTAINED = (
    "dp",
    "gpipe",
    "model-parallel",
    "dapple",
    "spp",
    "hetpipe",
    "interleaved",
    "zero-bubble",
    "chimera",
    "pipedream",
    "pipedream-2bw",
    "wpipe",
    "avgpipe",
    "madpipe",
    "relax",
    "spread",
    "exact",
)
"""Planners in the order in which they are asked, and in which ties are decided."""
TARGET = "target"
"""What planners support that stay within what another trainer can express."""
WITHIN = ("uniform",)
"""With a target, these are asked and nothing else."""
SIMPLE = CONTAINED[:3]
"""One of these has a plan within a second."""
WIDE = ("spread",)
"""For more devices than ``relax`` takes: asked first, and the only ones where bandwidths cannot stand in a matrix."""
MAKERS: dict[str, Callable[[Problem], Covers]] = {
    **dict.fromkeys((*SIMPLE, "dapple", "spp", "relax", "exact", "spread"), planned_apart),
    "interleaved": one_pipeline,
}
"""Planners whose plans all belong to a class that a bound may cover: the bound can make them needless."""
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
OPTIONS: tuple[Option, ...] = (
    Option(
        "exclude",
        "",
        "contained planners to leave out, separated by commas; also 'polish' and 'closing'",
    ),
    uniform.TRANSFORMER,
)


def run(session: Session, values: Mapping[str, object], planners: Mapping[str, Known], crew: Crew) -> None:
    """All rounds."""
    excluded = _excluded(str(values["exclude"]))
    if session.problem.within is not None:
        able = [name for name in WITHIN if _may_be_asked(session, planners[name])]
        asked = _asked(session.problem, able, planners)
        Tasks(session, [*([] if session.first_feasible else [Prove()]), *asked]).run(crew)
        return
    contained = _contained(session.problem, [name for name in CONTAINED if name not in excluded])
    contained = [name for name in contained if _may_be_asked(session, planners[name])]
    if session.first_feasible:
        contained = [name for name in contained if name != "exact"]
    bounds = [] if session.first_feasible else [Prove()]
    Tasks(session, [*bounds, *_asked(session.problem, contained, planners)]).run(crew)
    if session.best is None or session.first_feasible or session.problem.num_devices > MAX_DENSE_DEVICES:
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


def _contained(problem: Problem, names: list[str]) -> list[str]:
    """Those of the planners that a request of this size is given to, in order."""
    wide = [name for name in names if name in WIDE]
    others = [name for name in names if name not in WIDE]
    if problem.num_devices <= MOST_LABELLED:
        return others
    alone = problem.num_devices > MAX_DENSE_DEVICES and wide and "synchronous" in problem.update_rules
    return wide if alone else [*wide, *others]


def _starts(session: Session) -> list[Found]:
    """The best plan, and the best plain one where that is another: closed, it may be the better one of both."""
    assert session.best is not None
    best = Found.of(session.best)
    return [best] if best.plain or session.plain is None else [session.plain, best]


def first_plan(session: Session, values: Mapping[str, object], planners: Mapping[str, Known]) -> None:
    """The first plan of a simple planner that fits, told before processes are there."""
    excluded = _excluded(str(values["exclude"]))
    setting = replace(Setting.of(session, planners), first_feasible=True)
    simple = WIDE if session.problem.num_devices > MOST_LABELLED else SIMPLE
    for task in _asked(session.problem, [name for name in simple if name not in excluded], planners):
        if session.best is None and not session.deadline.passed and _may_be_asked(session, planners[task.name]):
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


def _asked(problem: Problem, names: list[str], planners: Mapping[str, Known]) -> list[Task]:
    """The planners with their default options."""
    return [
        Ask(
            name,
            checked(name, planners[name].options, {}),
            under_gpipe=name == "dapple",
            makes=MAKERS[name](problem) if name in MAKERS else None,
        )
        for name in names
    ]


def _may_be_asked(session: Session, entry: Known) -> bool:
    """Whether it knows the schedule, or makes its own, one of the update rules, and the target if there is one."""
    knows = session.schedule == "auto" or session.schedule in entry.accepts
    within = session.problem.within is None or TARGET in entry.supports
    return knows and within and bool(entry.supports & session.problem.update_rules)


def _polishable(session: Session, start: Found) -> bool:
    """Whether a neighbourhood search knows the plan's update rule and the schedule that was asked for."""
    own = "eager" if start.update_rule in PERIODIC_RULES else "early-backward"
    known = start.update_rule == "synchronous" or start.update_rule in PERIODIC_RULES
    return known and session.schedule in ("auto", own) and not session.done


def _effort(session: Session) -> float:
    """Deterministic: by the limit that was asked for, not by the time that is left."""
    limit_s = session.deadline.limit_s
    return EFFORT if limit_s is None else limit_s / SHARE


def _excluded(names: str) -> set[str]:
    """The planners named. Raises ``UnsupportedRequest`` for one that is not contained."""
    known = {*CONTAINED, *PHASES}
    excluded = {name.strip() for name in names.split(",") if name.strip()}
    for name in sorted(excluded - known):
        near = get_close_matches(name, known, n=1)
        raise UnsupportedRequest(
            f"planner 'auto' contains no {name!r}; it contains {', '.join(sorted(known))}",
            remedy=f"did you mean {near[0]!r}?" if near else None,
        )
    return excluded

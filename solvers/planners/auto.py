"""``auto``: every planner's best plan, the simple ones first, then a search from the best of all, then its proof.

Rounds (``portfolio``): all planners, each as if it were run alone with the same limits, so that ``auto`` is never worse
than any of them; a neighbourhood search from the best plan, while its order is improved or proven; the same for the
search's own result. Planners whose update rules the request does not allow, those that ``exclude`` names, and those
that cannot take the request are left out. Where plans have to be ``runnable``, planners of plans that ranks cannot run
yet are asked as well, and the best of their plans is mentioned where it would be faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.all_plans.kinds import CONTIGUOUS, EVERY_PLAN, ONE_PIPELINE
from penstock.solvers.planners.options import Option, checked
from penstock.solvers.planners.session import Session
from penstock.solvers.portfolio.crew import Crew
from penstock.solvers.portfolio.outcome import Found
from penstock.solvers.portfolio.rounds import Tasks
from penstock.solvers.portfolio.tasks import Ask, Close, Known, Polish, Prove, Setting, Task

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
    "exact",
)
"""Planners in the order in which they are asked, and in which ties are decided."""
SIMPLE = CONTAINED[:3]
"""One of these has a plan within a second."""
KINDS_MADE = {
    **dict.fromkeys((*SIMPLE, "dapple", "spp", "relax", "exact"), CONTIGUOUS),
    "interleaved": ONE_PIPELINE,
}
"""Planners whose plans are all of a kind that a bound may speak of: it can make them needless."""
RANKS_CANNOT_RUN = "hetpipe,zero-bubble,chimera"
"""Planners of synchronous plans with several pipelines or split backwards, which the executor does not take yet."""
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
    Option(
        "runnable",
        True,
        "only plans that `penstock run` takes today; `why` says what the others would gain",
    ),
)


def run(session: Session, values: Mapping[str, object], planners: Mapping[str, Known], crew: Crew) -> None:
    """All rounds."""
    excluded = _excluded(str(values["exclude"]))
    only_mentioned = set(RANKS_CANNOT_RUN.split(",")) if values["runnable"] else set()
    contained = [name for name in CONTAINED if name not in excluded and _may_be_asked(session, planners[name])]
    if session.first_feasible:
        contained = [name for name in contained if name not in {"exact", *only_mentioned}]
    bounds = [] if session.first_feasible else [Prove()]
    Tasks(session, [*bounds, *_asked(contained, planners, only_mentioned)]).run(crew)
    if session.best is None or session.first_feasible:
        return
    closed: set[object] = set()
    for _ in range(CLOSED_TWICE):
        start = Found.of(session.best)
        following: list[Task] = []
        if not closed and "polish" not in excluded and _polishable(session):
            following.append(Polish(start, tuple(session.proofs.values()), POLISHING * _effort(session)))
        if "closing" not in excluded and start.allocation not in closed:
            following.append(Close(start, _effort(session)))
        closed.add(start.allocation)
        Tasks(session, following).run(crew)


def first_plan(session: Session, values: Mapping[str, object], planners: Mapping[str, Known]) -> None:
    """The first plan of a simple planner that fits, told before processes are there."""
    excluded = _excluded(str(values["exclude"]))
    setting = replace(Setting.of(session, planners), first_feasible=True)
    for task in _asked([name for name in SIMPLE if name not in excluded], planners, set()):
        if session.best is None and not session.deadline.passed and _may_be_asked(session, planners[task.name]):
            found = task.run(setting, _Silent()).found
            if found is not None:
                session.offer(found)


def remarks(session: Session) -> str:
    """What is added to ``why``: processes that died, and what a plan that ranks cannot run yet would gain."""
    died = "".join(f"; the process of {name} ended with {how}" for name, how in session.lost.items())
    return died + _beside(session)


def _beside(session: Session) -> str:
    other, best = session.beside, session.best
    if other is None or (best is not None and other.value_ns >= best.value_ns):
        return ""
    gain = "fits" if best is None else f"takes {100 * (1 - other.value_ns / best.value_ns):.2f} % less"
    return f"; a plan of {other.planner}, which ranks cannot run yet, {gain}: --set runnable=false"


class _Silent:
    """A link to nobody."""

    def best_ns(self) -> int | None:
        return None

    def found(self, found: object) -> None:
        """Not told."""

    def proven(self, bound: object) -> None:
        """Not told."""


def _asked(names: list[str], planners: Mapping[str, Known], beside: set[str]) -> list[Task]:
    """The planners with their default options; what is only mentioned comes last."""
    tasks = [
        Ask(
            name,
            checked(name, planners[name].options, {}),
            under_gpipe=name == "dapple",
            kind=KINDS_MADE.get(name, EVERY_PLAN),
            beside=name in beside,
        )
        for name in names
    ]
    return sorted(tasks, key=lambda task: task.beside)


def _may_be_asked(session: Session, entry: Known) -> bool:
    """Whether it knows the schedule, or makes its own, and one of the update rules."""
    knows = session.schedule == "auto" or session.schedule in entry.accepts
    return knows and bool(entry.supports & session.problem.update_rules)


def _polishable(session: Session) -> bool:
    flushed = "synchronous" in session.problem.update_rules
    return flushed and session.schedule in ("auto", "early-backward") and not session.done


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

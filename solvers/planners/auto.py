"""``auto``: every planner in turn, the simple ones first, so that a plan is there within a second.

All contained planners share one session: each proposal that one of them would judge alone is judged here, or ruled
out by a proven bound, so ``auto`` is never worse than any of them that ``exclude`` lets in. Planners whose update
rules the request does not allow, and those that cannot take it, are left out. ``relax`` comes behind the planners of
other kinds of plans, because its proof, which may end the search, does not speak of those. At last ``exact``, where
the plans are few enough to be listed, and else ``polish``, a neighbourhood search from the best plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Protocol

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.planners.options import Option, checked
from penstock.solvers.planners.polish import polish
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.session import Session
from penstock.solvers.problem import Problem

Proposals = Callable[[Problem, Mapping[str, object]], Iterator[Proposal]]

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
)
"""Planners in the order in which they are asked; ``exact`` and ``polish`` follow."""
RANKS_CANNOT_RUN = "hetpipe,zero-bubble,chimera"
"""Planners of synchronous plans with several pipelines or split backwards, which the executor does not take yet."""
OPTIONS: tuple[Option, ...] = (
    Option(
        "exclude",
        RANKS_CANNOT_RUN,
        "contained planners to leave out, separated by commas; also 'exact' and 'polish'; by default those whose plans "
        "`penstock run` does not take yet",
    ),
)


class Known(Protocol):
    """What ``auto`` asks of an entry of the planners' table."""

    @property
    def proposals(self) -> Proposals | None:
        """What it proposes."""

    @property
    def options(self) -> tuple[Option, ...]:
        """Its settings."""

    @property
    def supports(self) -> frozenset[str]:
        """Update rules and request features."""

    @property
    def accepts(self) -> tuple[str, ...]:
        """Schedules that may be asked for."""


def run(session: Session, values: Mapping[str, object], planners: Mapping[str, Known]) -> None:
    """Judge what each planner of ``CONTAINED`` proposes with its default options, then search on from the best."""
    excluded = _excluded(str(values["exclude"]))
    for name in CONTAINED:
        entry = planners[name]
        asked = session.schedule == "auto" or session.schedule in entry.accepts
        if name not in excluded and asked and entry.supports & session.problem.update_rules:
            with suppress(UnsupportedRequest):  # what this planner cannot take, another may
                found = _proposed(name, entry, session.problem)
                session.judge_all(name, _under_gpipe(found) if name == "dapple" else found)
    if session.done or session.first_feasible or "synchronous" not in session.problem.update_rules:
        return
    if session.deadline.passed:
        session.unfinished.append("polish")
        return
    if session.schedule == "auto" and "exact" not in excluded:
        with suppress(UnsupportedRequest):  # too many plans to list them
            session.judge_all("exact", _proposed("exact", planners["exact"], session.problem))
    if session.schedule in ("auto", "early-backward") and "polish" not in excluded and not session.done:
        session.judge_all("polish", polish(session))


def _proposed(name: str, entry: Known, problem: Problem) -> Iterator[Proposal]:
    """What a planner proposes with its default options."""
    assert entry.proposals is not None
    return entry.proposals(problem, checked(name, entry.options, {}))


def _excluded(names: str) -> set[str]:
    """The planners named. Raises ``UnsupportedRequest`` for one that is not contained."""
    known = {*CONTAINED, "exact", "polish"}
    excluded = {name.strip() for name in names.split(",") if name.strip()}
    for name in sorted(excluded - known):
        near = get_close_matches(name, known, n=1)
        raise UnsupportedRequest(
            f"planner 'auto' contains no {name!r}; it contains {', '.join(sorted(known))}",
            remedy=f"did you mean {near[0]!r}?" if near else None,
        )
    return excluded


def _under_gpipe(proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    for proposal in proposals:
        yield proposal
        if len(proposal.allocation.stages) > 1:
            yield proposal._replace(schedules=("gpipe",))

"""Timelines as data for the script that draws them, and as one file that needs no service.

The judge takes seconds to load, so it is imported where it is needed: the service listens before.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.schemas.errors import NotFound
from penstock.schemas.machine.collector import no_collection
from penstock.service.jobs import judging
from penstock.service.pages.sources import Sources

if TYPE_CHECKING:
    from penstock.report.drawing.payload import Mark
    from penstock.report.drawing.picture import Picture


class Part(NamedTuple):
    """A part of a timeline, and in how many columns it is wanted."""

    from_ns: int
    to_ns: int
    columns: int


class _Drawn(NamedTuple):
    picture: Picture
    path: tuple[Mark, ...]
    view: dict[str, Any]


def plan_view(sources: Sources, address: str) -> dict[str, Any]:
    """Return the values of a plan's page. Raises NotFound, and InvalidPlan where it cannot be simulated."""
    return _drawn(sources, address).view


def of_plan(sources: Sources, address: str, part: Part | None) -> dict[str, Any]:
    """Return a plan's timeline, or a part of it in finer columns. Raises as ``plan_view``."""
    from penstock.report.drawing.payload import finer, payload

    drawn = _drawn(sources, address)
    if part is not None:
        return finer(drawn.picture, *part)
    return payload(drawn.picture, "predicted", drawn.path)


def of_run(sources: Sources, run_id: str, part: Part | None) -> dict[str, Any]:
    """Return a run's predicted and measured timelines. Raises NotFound before anything is measured."""
    from penstock.report.drawing.payload import finer, payload
    from penstock.report.drawing.picture import picture_of_trace

    trace = sources.trace(run_id)
    if trace is None:
        raise NotFound(f"run {run_id!r} has not measured a step yet")
    drawn = _drawn(sources, trace.plan_hash)
    if part is not None:
        return finer(drawn.picture, *part)
    measured = picture_of_trace(trace, sources.store.plan(trace.plan_hash))
    return payload(drawn.picture, "predicted and measured", drawn.path, measured=measured)


def as_json(data: dict[str, Any]) -> bytes:
    """Encode data as compact JSON."""
    return json.dumps(data, separators=(",", ":")).encode()


def report(sources: Sources, plan_or_job: str) -> str:
    """Render a plan's report as one file. Raises as ``plan_view``."""
    return judging.report(sources.plan_file(plan_or_job))


def run_report(sources: Sources, run_id: str) -> str:
    """Render a run's report as one file. Raises NotFound before anything is measured."""
    trace = sources.trace(run_id)
    if trace is None:
        raise NotFound(f"run {run_id!r} has not measured a step yet")
    return judging.report(sources.store.plan_file(trace.plan_hash), trace)


@lru_cache(maxsize=8)
@no_collection()
def _drawn(sources: Sources, address: str) -> _Drawn:
    from penstock.planning.explain import explanation, judged
    from penstock.report.explained import marks
    from penstock.report.plan_files import picture
    from penstock.service.pages.plan_view import view

    file = sources.store.plan_file(address)
    simulated = judged(file)
    explained = explanation(file, simulated, (), None, 1, None, lambda _words: None)
    drawn = picture(simulated)
    return _Drawn(drawn, marks(explained, simulated.judgement.plan, drawn), view(file, simulated, explained, drawn))

"""The HTML report: one file with its own styles, script and data, which works without a network.

The script of ``assets`` draws timeline and memory on canvases; everything they show is also in tables. What the plan is
and how good it is fills one screen, with the timeline below; everything else is opened on demand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined

from penstock.report.baselines import baselines
from penstock.report.device_names import together
from penstock.report.drawing.assets import script, style
from penstock.report.drawing.figure import embedded_figure
from penstock.report.drawing.payload import Mark, payload
from penstock.report.drawing.picture import Picture, Piece, picture_of_timeline, picture_of_trace
from penstock.report.explained import marks
from penstock.report.traffic import traffic
from penstock.report.view import search, view_of
from penstock.schemas.api.explanation import Explanation
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.trace import Trace
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.timeline import Timeline


def html_report(
    file: PlanFile,
    plan: Plan,
    problem: Problem,
    timeline: Timeline,
    *,
    allocation: Allocation | None = None,
    trace: Trace | None = None,
    faults: Sequence[str] = (),
    explanation: Explanation | None = None,
    idle: Mapping[tuple[int, ...], Sequence[Piece]] | None = None,
) -> str:
    """Return the page. ``plan`` is the judged plan of ``file``, ``allocation`` its own; a ``trace`` adds measurements.

    With its ``explanation`` the critical path is marked on the timeline and listed in tables below; with ``idle`` the
    timeline shows why devices wait.
    """
    picture = replace(picture_of_timeline(problem, timeline, allocation, idle), together=together(plan))
    time_ns = timeline.time_per_global_batch_ns
    view = view_of(
        file,
        plan,
        picture,
        flows=traffic(problem, allocation, time_ns, plan.update_rule) if allocation is not None else (),
        names=[device.name for device in problem.devices],
        explanation=explanation,
        faults=faults,
        trace=trace,
        others=baselines(file.request) if explanation is not None else (),
    )
    if file.why:
        view = view.having(search(file.why))
    path = marks(explanation, plan, picture) if explanation else ()
    measured = picture_of_trace(trace, plan) if trace is not None else None
    title = "Timeline" if measured is None else "Predicted and measured timeline"
    return (
        _environment()
        .get_template("report.html")
        .render(
            view=view,
            style=style(),
            script=script(),
            timeline_title=title,
            notes=" ".join(_notes(picture, path, measured, view.rows)),
            figure=embedded_figure("timeline-data", payload(picture, title, path, measured=measured)),
        )
    )


def _notes(picture: Picture, path: Sequence[Mark], measured: Picture | None, rows: str | None) -> Iterator[str]:
    """Yield sentences on the marks of the timeline."""
    if measured is not None:
        yield "Predicted blocks are above the measured ones of the same device; a block shows how they differ."
    if rows is not None:
        yield rows
    if path:
        yield "The critical path is marked in red."
    if picture.window is not None:
        yield f"The blue line above is the {picture.window}; all shares and times are measured there."


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("penstock.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

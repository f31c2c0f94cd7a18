"""Plan files as pages and pictures: the HTML report, the timeline as SVG, events for Perfetto."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.planning.explain import Judged, explanation, judged
from penstock.report.chrome_trace import chrome_events, compared_events, write_events
from penstock.report.device_names import together
from penstock.report.drawing.picture import Picture, picture_of_timeline, picture_of_trace
from penstock.report.drawing.svg import svg_timeline
from penstock.report.explained import marks
from penstock.report.page import html_report
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.machine.collector import no_collection
from penstock.schemas.plan import PlanFile
from penstock.schemas.trace import Trace


@no_collection()
def page(file: PlanFile, trace: Trace | None = None) -> str:
    """Return the HTML report of a plan with its explanation. Raises InvalidPlan where it cannot be simulated.

    Raises InvalidDocument for the trace of another plan.
    """
    _check_trace(file, trace)
    simulated = judged(file)
    judgement = simulated.judgement
    assert judgement.timeline is not None
    return html_report(
        file,
        judgement.plan,
        judgement.problem,
        judgement.timeline,
        allocation=judgement.allocation,
        trace=trace,
        faults=judgement.faults,
        explanation=explanation(file, simulated, (), None, 1, None, lambda _words: None),
        idle=simulated.idle,
    )


def picture(simulated: Judged) -> Picture:
    """Return the timeline of a judged plan as a picture that includes why devices idle."""
    judgement = simulated.judgement
    assert judgement.timeline is not None
    drawn = picture_of_timeline(judgement.problem, judgement.timeline, judgement.allocation, simulated.idle)
    return replace(drawn, together=together(judgement.plan))


@no_collection()
def svg(file: PlanFile, trace: Trace | None = None) -> str:
    """Return a plan's timeline as an SVG file, with its critical path. Raises as ``page``."""
    _check_trace(file, trace)
    simulated = judged(file)
    drawn = picture(simulated)
    explained = explanation(file, simulated, (), None, 1, None, lambda _words: None)
    measured = picture_of_trace(trace, file.plan) if trace is not None else None
    return svg_timeline(drawn, marks(explained, simulated.judgement.plan, drawn), measured=measured)


def write_comparison(file: PlanFile, trace: Trace | None, path: Path) -> None:
    """Write prediction and measurement as two tracks for Perfetto. Raises InvalidPlan where simulation is impossible.

    Raises InvalidDocument for the trace of another plan.
    """
    _check_trace(file, trace)
    judgement = judged(file).judgement
    assert judgement.timeline is not None
    predicted = picture_of_timeline(judgement.problem, judgement.timeline, judgement.allocation)
    write_events(chrome_events(predicted) if trace is None else compared_events(predicted, trace, file.plan), path)


def _check_trace(file: PlanFile, trace: Trace | None) -> None:
    if trace is not None and trace.plan_hash != file.plan.content_hash():
        raise InvalidDocument(f"the trace is of plan {trace.plan_hash}, not of plan {file.plan.content_hash()}")

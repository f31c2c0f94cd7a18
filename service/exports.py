"""Plans in other forms, for files. A new form is a line in ``FORMS``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from penstock.schemas.plan import PlanFile


@dataclass(frozen=True)
class Form:
    """What a plan can be turned into."""

    media_type: str
    ending: str
    help: str
    """What it is and for whom, in a line."""
    make: Callable[[PlanFile], bytes]
    """Raises InvalidPlan for a plan that it cannot be made from, UnsupportedRequest for what the form has no word."""


def _plan(file: PlanFile) -> bytes:
    return file.canonical_json()


def _program(file: PlanFile) -> bytes:
    from penstock.service.judging import lowered

    return json.dumps([program for program, *_ in lowered(file).programs], separators=(",", ":")).encode()


def _bundle(file: PlanFile) -> bytes:
    from penstock.bundles import make_bundle

    return make_bundle(file).canonical_json()


def _chrome_trace(file: PlanFile) -> bytes:
    from penstock.explaining import judged
    from penstock.report.chrome_trace import chrome_events
    from penstock.report.picture import picture_of_timeline

    judgement = judged(file).judgement
    assert judgement.timeline is not None
    picture = picture_of_timeline(judgement.problem, judgement.timeline, judgement.allocation)
    document = {"displayTimeUnit": "ms", "traceEvents": list(chrome_events(picture))}
    return json.dumps(document, separators=(",", ":")).encode()


def _csv(file: PlanFile) -> bytes:
    from penstock.plan_schedules import schedule_csv

    return schedule_csv(file).encode()


def _svg(file: PlanFile) -> bytes:
    from penstock.explaining import svg

    return svg(file).encode()


def _report(file: PlanFile) -> bytes:
    from penstock.explaining import page

    return page(file).encode()


FORMS: dict[str, Form] = {
    "plan": Form("application/json", "json", "the plan with its request inline, for verify, run and explain", _plan),
    "program": Form("application/json", "programs.json", "the programs of all ranks", _program),
    "bundle": Form(
        "application/json", "job.json", "what `penstock rank` needs where another launcher starts ranks", _bundle
    ),
    "chrome-trace": Form(
        "application/json", "trace.json", "the predicted timeline, for Perfetto and chrome://tracing", _chrome_trace
    ),
    "csv": Form("text/csv", "csv", "the order of the schedule, for PyTorch's pipeline runtime and torchtitan", _csv),
    "svg": Form("image/svg+xml", "svg", "the predicted timeline as a picture", _svg),
    "report": Form(
        "text/html", "html", "a page with timeline, memory, stages and bounds that needs no network", _report
    ),
}

"""``penstock verify``, ``simulate``, ``explain`` and ``report``: what the judge says of a plan of anybody's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documents import STANDARD, print_json, read_document, read_plan, refuse_unwritable

if TYPE_CHECKING:
    from penstock.api import Judgement
    from penstock.schemas.plan import PlanFile
    from penstock.solvers.timeline import Timeline

PlanPath = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, or - for standard input.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (verify, simulate, explain, report):
        app.command(command.__name__)(command)


def verify(plan: PlanPath) -> None:
    """Check a plan from the problem alone. Silent when it is good; a sentence per fault, and 1, when it is not."""
    file = read_plan(plan)
    from penstock import api

    faults = api.judge(file).faults
    for fault in faults:
        print(fault)
    if faults:
        raise typer.Exit(1)


def simulate(
    plan: PlanPath,
    chrome_trace: Annotated[
        str | None, typer.Option("--chrome-trace", help="Write the timeline for chrome://tracing or Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the prediction as JSON.")] = False,
) -> None:
    """Run a plan through the judge: time, idle time, memory, timeline."""
    file = read_plan(plan)
    judgement, timeline = _judged(file)
    from penstock.cli.show import Screen, show_plan
    from penstock.report.chrome_trace import write_chrome_trace
    from penstock.report.picture import picture_of_timeline

    if chrome_trace is not None:
        picture = picture_of_timeline(judgement.problem, timeline, judgement.allocation)
        write_chrome_trace(picture, Path(chrome_trace))
    if as_json:
        print_json(judgement.plan.prediction)
    screen = Screen.of(quiet=as_json)
    show_plan(screen, file.request, judgement)
    _say_faults(judgement)


def explain(plan: PlanPath) -> None:
    """Say in a few sentences what a plan does, what limits it, and what would help."""
    judgement, timeline = _judged(read_plan(plan))
    from penstock.cli.explaining import sentences
    from penstock.cli.show import Screen

    screen = Screen.of()
    for sentence in sentences(judgement, timeline):
        screen.say(sentence)
    _say_faults(judgement)


def report(
    plan: PlanPath,
    output: Annotated[str, typer.Option("--output", "-o", help="The HTML file; - is standard output.")],
    trace: Annotated[str | None, typer.Option(help="A trace of a run, shown beside the prediction.")] = None,
) -> None:
    """Write one HTML file with timeline, memory, stages and bounds that needs no network."""
    refuse_unwritable(output)
    file = read_plan(plan)
    judgement, timeline = _judged(file)
    from penstock.report.page import html_report
    from penstock.schemas.trace import Trace

    measured = None if trace is None else read_document(Trace, trace)
    page = html_report(
        file,
        judgement.plan,
        judgement.problem,
        timeline,
        allocation=judgement.allocation,
        trace=measured,
        faults=judgement.faults,
    )
    if output == STANDARD:
        sys.stdout.write(page)
    else:
        Path(output).write_text(page, encoding="utf-8")


def _judged(file: PlanFile) -> tuple[Judgement, Timeline]:
    """The judgement of a plan that can be simulated. Raises InvalidPlan for any other."""
    from penstock import api
    from penstock.schemas.errors import Fault, InvalidPlan

    judgement = api.judge(file)
    if judgement.timeline is None:
        raise InvalidPlan(
            "the plan cannot be simulated", faults=tuple(Fault("plan", sentence) for sentence in judgement.faults)
        )
    return judgement, judgement.timeline


def _say_faults(judgement: Judgement) -> None:
    for fault in judgement.faults:
        print(f"penstock: {fault}", file=sys.stderr)
    if judgement.faults:
        raise typer.Exit(1)

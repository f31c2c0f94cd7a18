"""``penstock verify``, ``simulate``, ``explain`` and ``report``: any plan, checked and simulated."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from penstock.cli.groups import grouped
from penstock.cli.input_files import STANDARD, prepare_output, print_json, read_document, read_plan
from penstock.cli.options import OUTPUT, AsJson, PlanPath
from penstock.cli.panels import PLAN
from penstock.cli.questions import ask
from penstock.cli.service.remote import Server, connect, export_there, plan_or_hash, plan_there, refuse_here

if TYPE_CHECKING:
    from penstock.planning.judge import Judgement
    from penstock.schemas.api.explanation import Explanation
    from penstock.schemas.api.jobs import Verdict
    from penstock.schemas.plan import PlanFile
    from penstock.solvers.model.timeline import Timeline

WHAT_IF = "What if"


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (verify, simulate, explain, report):
        app.command(command.__name__, rich_help_panel=PLAN)(grouped(command))


def verify(*, plan: PlanPath, as_json: AsJson = False, server: Server = None) -> None:
    """Check a plan from the problem alone: print one line per fault and exit 1; print nothing if valid.

    Example: penstock verify plan.json
    """
    from penstock.schemas.plan import PlanQuestion

    verdict: Verdict = ask("verify", PlanQuestion(plan=plan_or_hash(plan, server)), server)
    if as_json:
        print_json(verdict)
    for fault in () if as_json else verdict.sentences:
        print(fault)
    if not verdict.valid:
        raise typer.Exit(1)


def simulate(
    *,
    plan: PlanPath,
    chrome_trace: Annotated[
        str | None,
        typer.Option(
            "--chrome-trace",
            metavar="FILE",
            help="JSON file for the timeline, for chrome://tracing or Perfetto.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Simulate a plan, and show its time, idle time, memory and timeline.

    With --server the timeline is not drawn.

    Example: penstock simulate plan.json --chrome-trace plan-trace.json
    """
    if server is not None:
        refuse_here(chrome_trace=chrome_trace)
        _simulate_there(server, plan, as_json)
        return
    file = read_plan(plan)
    judgement, timeline = _judged(file)
    from penstock.cli.show import Screen, show_plan
    from penstock.report.chrome_trace import write_chrome_trace
    from penstock.report.drawing.picture import picture_of_timeline

    if chrome_trace is not None:
        picture = picture_of_timeline(judgement.problem, timeline, judgement.allocation)
        write_chrome_trace(picture, Path(chrome_trace))
    if as_json:
        print_json(judgement.plan.prediction)
    screen = Screen.of(quiet=as_json)
    show_plan(screen, file.request, judgement)
    _say(judgement.faults)


def _simulate_there(server: str, plan: str, as_json: bool) -> None:
    from penstock.cli.show import Screen, show_stages
    from penstock.schemas.plan import PlanQuestion

    with connect(server) as client:
        file = plan_there(client, plan)
        answer = client.simulate(PlanQuestion(plan=file))
    if as_json:
        print_json(answer.plan.prediction)
    else:
        show_stages(Screen.of(), file.request, answer.plan)
    _say(answer.sentences)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Another layout, compared with the plan's."""

    PANEL: ClassVar[str] = "Compare with another layout"

    cuts: Annotated[
        str | None,
        typer.Option(metavar="LAYERS", help="Layers, by number or name, at which its later stages begin: 12,24,36."),
    ] = None
    replicas: Annotated[
        str | None,
        typer.Option(metavar="COUNTS", help="Number of devices of each stage: 2,2,2,2 (default: shared out evenly)."),
    ] = None
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICES",
            help="Devices of each stage, a semicolon between stages: 'a/0,a/1;b/0' (default: chosen).",
        ),
    ] = None
    schedule: Annotated[str | None, typer.Option(help="Schedule, such as gpipe (default: the plan's).")] = None
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", help="Number of micro-batches, such as 16 (default: the best).")
    ] = None


def explain(
    *,
    plan: PlanPath,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="CHANGE",
            help="Change to try, such as bandwidth=2, devices=+8 or recompute=here; default, all or none. Repeatable.",
            rich_help_panel=WHAT_IF,
        ),
    ] = None,
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            "--why-not",
            metavar="CHOICE",
            help="Degrees or sharding to compare: tensor=4,sharding=none; next, the next best; none. Repeatable.",
            rich_help_panel=WHAT_IF,
        ),
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(
            help="Planner that plans again for every change and --why-not, such as dapple (default: a quick one).",
            rich_help_panel=WHAT_IF,
        ),
    ] = None,
    max_plans: Annotated[
        int, typer.Option("--max-plans", help="Plans that are judged for a change.", rich_help_panel=WHAT_IF)
    ] = 20,
    layout: Layout,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Show what a plan's time consists of, what limits it, what would help, and how another layout compares.

    With --cuts or --why-not only that comparison is shown, and what --what-if
    asks for.

    Example: penstock explain plan.json --what-if bandwidth=2 --cuts 12,24,36
    """
    from penstock.cli.plan.explaining import USUAL, layout_of, show_explanation
    from penstock.cli.show import Screen
    from penstock.schemas.api.explanation import ExplainRequest
    from penstock.schemas.machine.collector import no_collection

    screen = Screen.of(quiet=as_json)
    other = layout_of(layout.cuts, layout.replicas, layout.devices, layout.schedule, layout.micro_batches)
    compares = other is not None or bool(why_not)
    with no_collection():
        meant = plan_or_hash(plan, server)
    question = ExplainRequest.parse(
        {
            "plan": meant,
            "what_if": _without_none(what_if or ["none" if compares else USUAL]),
            "why_not": _without_none(why_not or ["none" if compares or what_if else USUAL]),
            "planner": planner,
            "max_plans": max_plans,
            "layout": other,
        }
    )
    try:
        explanation: Explanation = ask("explain", question, server, screen.progress)
    finally:
        screen.done()
    if as_json:
        print_json(explanation)
    show_explanation(screen, explanation, whole=not compares)
    _say(explanation.faults)


def _without_none(texts: list[str]) -> list[str]:
    return [text for text in texts if text != "none"]


def report(
    *,
    plan: PlanPath,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="HTML file, or SVG by its name; - is standard output (default: plan.html for plan.json).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Trace of a run, shown next to the prediction.", rich_help_panel=OUTPUT),
    ] = None,
    server: Server = None,
) -> None:
    """Write a plan's timeline, memory, stages and bounds as one HTML file, or its timeline as SVG.

    The file needs no network.

    Example: penstock report plan.json -o report.html
    """
    if output is None:
        output = _page_of(plan, server)
        print(f"writing {output}", file=sys.stderr)
    prepare_output(output)
    if server is not None:
        refuse_here(trace=trace)
        text = export_there(server, plan, "svg" if output.endswith(".svg") else "report").decode()
    else:
        text = _reported(plan, trace, svg=output.endswith(".svg"))
    if output == STANDARD:
        sys.stdout.write(text)
    else:
        Path(output).write_text(text, encoding="utf-8")


def _page_of(plan: str, server: str | None) -> str:
    """Return the file of a report without ``-o``: the plan's name with .html, in the current directory."""
    if plan == STANDARD or server is not None:
        raise typer.BadParameter("name the report's file: -o report.html", param_hint="-o")
    return Path(plan).with_suffix(".html").name


def _reported(plan: str, trace: str | None, *, svg: bool) -> str:
    from penstock.schemas.machine.collector import no_collection
    from penstock.schemas.trace import Trace

    with no_collection():
        file = read_plan(plan)
        from penstock.report import plan_files

        measured = None if trace is None else read_document(Trace, trace)
        return (plan_files.svg if svg else plan_files.page)(file, measured)


def _judged(file: PlanFile) -> tuple[Judgement, Timeline]:
    """Return the judgement and the timeline of a plan. Raises InvalidPlan for a plan that cannot be simulated."""
    from penstock.planning.explain import judged

    judgement = judged(file).judgement
    assert judgement.timeline is not None
    return judgement, judgement.timeline


def _say(faults: tuple[str, ...]) -> None:
    for fault in faults:
        print(f"penstock: {fault}", file=sys.stderr)
    if faults:
        raise typer.Exit(1)

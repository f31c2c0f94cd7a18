"""``penstock verify``, ``simulate``, ``explain`` and ``report``: what the judge says of a plan of anybody's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documents import STANDARD, print_json, read_document, read_plan, refuse_unwritable
from penstock.cli.service.remote import Server, connect, export_there, plan_there, refuse_here

if TYPE_CHECKING:
    from penstock.planning.api import Judgement
    from penstock.schemas.api.jobs import Verdict
    from penstock.schemas.plan import PlanFile
    from penstock.solvers.model.timeline import Timeline

PlanPath = Annotated[
    str,
    typer.Argument(metavar="PLAN", help="A plan file, or - for standard input; with --server also a hash or a job."),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (verify, simulate, explain, report):
        app.command(command.__name__)(command)


def verify(
    plan: PlanPath,
    server: Server = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON.")] = False,
) -> None:
    """Check a plan from the problem alone. Silent when it is good; a sentence per fault, and 1, when it is not."""
    found = _verdict(plan, server)
    if as_json:
        print_json(found)
    for fault in () if as_json else found.sentences:
        print(fault)
    if not found.valid:
        raise typer.Exit(1)


def _verdict(plan: str, server: str | None) -> Verdict:
    if server is not None:
        with connect(server) as client:
            return client.plans.verify(plan_there(client, plan))
    file = read_plan(plan)
    from penstock.planning import api
    from penstock.schemas.api.jobs import Verdict

    faults = api.judge(file).faults
    return Verdict(valid=not faults, plan_hash=file.plan.content_hash(), sentences=faults)


def simulate(
    plan: PlanPath,
    chrome_trace: Annotated[
        str | None, typer.Option("--chrome-trace", help="Write the timeline for chrome://tracing or Perfetto.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the prediction as JSON.")] = False,
    server: Server = None,
) -> None:
    """Run a plan through the judge: time, idle time, memory, timeline (which is drawn without --server only)."""
    if server is not None:
        refuse_here(chrome_trace=chrome_trace)
        _simulate_there(server, plan, as_json)
        return
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
    _say(judgement.faults)


def _simulate_there(server: str, plan: str, as_json: bool) -> None:
    from penstock.cli.show import Screen, show_found

    with connect(server) as client:
        file = plan_there(client, plan)
        found = client.plans.simulate(file)
    if as_json:
        print_json(found.plan.prediction)
    else:
        show_found(Screen.of(), file.request, found.plan)
    _say(found.sentences)


def explain(
    plan: PlanPath,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            help="A change to try: bandwidth=2, latency=0, memory=1/2, devices=+8, micro-batches=2, recompute=here, "
            "speed=2; may be repeated. 'default' is the usual table, 'none' is none.",
        ),
    ] = None,
    planner: Annotated[
        str | None, typer.Option(help="Plan anew for every change; without it only where the plan itself cannot tell.")
    ] = None,
    max_plans: Annotated[int, typer.Option("--max-plans", help="Plans that are judged for a change.")] = 20,
    cuts: Annotated[
        str | None, typer.Option(help="Why not this layout: where its stages begin, by layer number or name: 12,24,36.")
    ] = None,
    replicas: Annotated[str | None, typer.Option(help="Devices of each stage of that layout: 2,2,2,2.")] = None,
    devices: Annotated[
        str | None, typer.Option(help="The devices themselves, a semicolon between stages: a/0,a/1;b/0.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="The schedule of that layout; else the plan's.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", help="The micro-batches of that layout; else the plan's.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the explanation as JSON.")] = False,
    server: Server = None,
) -> None:
    """Say what a plan's time is made of, what binds it, what would help, and why not another layout."""
    from penstock.cli.plan.explaining import USUAL, explained_here, explained_there, layout_fields, show_explanation
    from penstock.cli.show import Screen

    screen = Screen.of(quiet=as_json)
    layout = layout_fields(cuts, replicas, devices, schedule, micro_batches)
    asked = [text for text in what_if or [USUAL if layout is None else "none"] if text != "none"]
    try:
        if server is None:
            file = read_plan(plan)
            found = explained_here(file, asked, planner, max_plans, layout, screen.progress)
        else:
            screen.progress(f"{server} explains")
            found = explained_there(server, plan, asked, planner, max_plans, layout)
    finally:
        screen.done()
    if as_json:
        print_json(found)
    show_explanation(screen, found)
    _say(found.faults)


def report(
    plan: PlanPath,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="The HTML file, or SVG where it ends with .svg; - is HTML to standard output. For plan.json it is "
            "plan.html.",
        ),
    ] = None,
    trace: Annotated[str | None, typer.Option(help="A trace of a run, shown beside the prediction.")] = None,
    server: Server = None,
) -> None:
    """Write one HTML file with timeline, memory, stages and bounds that needs no network, or its timeline as SVG."""
    if output is None:
        output = _beside(plan, server)
        print(f"writing {output}", file=sys.stderr)
    refuse_unwritable(output)
    if server is not None:
        refuse_here(trace=trace)
        text = export_there(server, plan, "svg" if output.endswith(".svg") else "report").decode()
    else:
        text = _reported(plan, trace, svg=output.endswith(".svg"))
    if output == STANDARD:
        sys.stdout.write(text)
    else:
        Path(output).write_text(text, encoding="utf-8")


def _beside(plan: str, server: str | None) -> str:
    """Where the report of a plan file goes when nobody says: to the file of its name in the current directory."""
    if plan == STANDARD or server is not None:
        raise typer.BadParameter("say where the report goes: -o report.html", param_hint="-o")
    return Path(plan).with_suffix(".html").name


def _reported(plan: str, trace: str | None, *, svg: bool) -> str:
    file = read_plan(plan)
    from penstock.planning import explain as explaining
    from penstock.schemas.trace import Trace

    measured = None if trace is None else read_document(Trace, trace)
    return (explaining.svg if svg else explaining.page)(file, measured)


def _judged(file: PlanFile) -> tuple[Judgement, Timeline]:
    """The judgement of a plan that can be simulated. Raises InvalidPlan for any other."""
    from penstock.planning.explain import judged

    judgement = judged(file).judgement
    assert judgement.timeline is not None
    return judgement, judgement.timeline


def _say(faults: tuple[str, ...]) -> None:
    for fault in faults:
        print(f"penstock: {fault}", file=sys.stderr)
    if faults:
        raise typer.Exit(1)

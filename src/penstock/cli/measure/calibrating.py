"""``penstock calibrate`` and ``penstock export chrome``: what ranks measured, as costs and next to the prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from penstock.cli.durations import duration_ns
from penstock.cli.groups import grouped
from penstock.cli.input_files import STANDARD, prepare_output, print_json, read_document, read_plan, write_document
from penstock.cli.options import MEASUREMENT, OUTPUT, Document, PlanPath
from penstock.cli.panels import MEASURE
from penstock.cli.service.remote import Server, export_there, refuse_here

if TYPE_CHECKING:
    from penstock.calibration.calibrate import Calibration
    from penstock.schemas.api.throughput import ThroughputOut


def register(app: typer.Typer, exporting: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("calibrate", rich_help_panel=MEASURE)(grouped(calibrate))
    exporting.command("chrome")(export_chrome)


@dataclass(frozen=True, kw_only=True)
class OneFigure:
    """The pace of one run instead of traces."""

    PANEL: ClassVar[str] = MEASUREMENT

    from_throughput: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS|TIME",
            help="Pace of one run instead of traces: tokens per second and GPU (1650), or a step's time (850ms).",
        ),
    ] = None
    plan: Annotated[str | None, typer.Option(metavar="FILE", help="Plan of that run, as planned or by hand.")] = None
    show: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Plan to predict before and after it. Repeatable.", rich_help_panel=OUTPUT),
    ] = None


def calibrate(
    profile: Annotated[
        str | None,
        typer.Argument(
            metavar="PROFILE",
            help="Profile file that the plans were made from; with --from-throughput any of its kind of device.",
        ),
    ] = None,
    traces: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRACE...", help="Traces of `penstock run --trace`; those of differently cut plans tell most."
        ),
    ] = None,
    figure: OneFigure = OneFigure(),
    output: Document = STANDARD,
    output_topology: Annotated[
        str | None,
        typer.Option(
            "--output-topology",
            metavar="FILE",
            help="File for the calibrated topology; with it the links are fitted, too.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    any_factor: Annotated[
        bool,
        typer.Option(
            "--any-factor",
            help="Accept costs that change by more than a factor of 3, either way.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print each run before and after calibration as JSON; needs -o.", rich_help_panel=OUTPUT
        ),
    ] = False,
) -> None:
    """Correct a profile by traces of runs, or by the pace of one run.

    Example: penstock calibrate profile.json trace.json -o calibrated.json

    Example: penstock calibrate --from-throughput 1650 --plan plan.json --show other.json -o calibrated.json
    """
    if as_json and STANDARD in (output, output_topology):
        raise typer.BadParameter(
            "standard output cannot hold both --json and a document; write the document to a file", param_hint="-o"
        )
    for target in (output, output_topology):
        prepare_output(target)
    from penstock.cli.show import Screen

    screen = Screen.of(quiet=as_json or STANDARD in (output, output_topology))
    if figure.from_throughput is not None:
        _refuse_traces(figure, traces, output_topology)
        lines = _by_figure(figure.from_throughput, figure, profile, output, as_json, any_factor)
    else:
        if profile is None or not traces or figure.plan is not None or figure.show:
            raise typer.BadParameter(
                "give PROFILE and at least one TRACE, or --from-throughput with --plan and, if you like, --show"
            )
        lines = _by_traces(profile, traces, output, output_topology, as_json, any_factor)
    for line in lines:
        screen.say(line)
    for target in filter(None, (output, output_topology)):
        screen.say(f"written to {target}")


def _refuse_traces(figure: OneFigure, traces: list[str] | None, output_topology: str | None) -> None:
    if figure.plan is None:
        raise typer.BadParameter("--from-throughput needs the plan of the run: --plan plan.json")
    if traces:
        raise typer.BadParameter("--from-throughput replaces traces; leave the traces out")
    if output_topology is not None:
        raise typer.BadParameter("--from-throughput measures no links; leave --output-topology out")


def _by_traces(
    profile: str, traces: list[str], output: str, output_topology: str | None, as_json: bool, any_factor: bool
) -> list[str]:
    """Write the documents, and return the lines to print."""
    from penstock.calibration.calibrate import calibrate as calibrated
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.trace import Trace

    documents = [read_document(Trace, each) for each in traces]
    links = output_topology is not None
    fit = calibrated(read_document(ModelProfile, profile), documents, links=links, any_factor=any_factor)
    write_document(fit.profile, output)
    write_document(fit.topology, output_topology)
    if as_json:
        print_json(fit.out().model_dump(mode="json", exclude={"profile", "topology"}))
    return calibrated_lines(fit, links)


def _by_figure(
    text: str, figure: OneFigure, profile: str | None, output: str, as_json: bool, any_factor: bool
) -> list[str]:
    """Write the profile, and return the lines to print."""
    from penstock.calibration.throughput import calibrate_throughput
    from penstock.schemas.profile import ModelProfile

    assert figure.plan is not None
    tokens, step_ns = _pace(text)
    result = calibrate_throughput(
        read_plan(figure.plan),
        tokens_per_s_per_gpu=tokens,
        step_ns=step_ns,
        profile=None if profile is None else read_document(ModelProfile, profile),
        show=[read_plan(each) for each in figure.show or ()],
        any_factor=any_factor,
    )
    write_document(result.profile, output)
    if as_json:
        print_json(result.model_dump(mode="json", exclude={"profile"}))
    return throughput_lines(result, figure.show or ())


def _pace(text: str) -> tuple[float | None, int | None]:
    """Parse a pace: tokens per second and GPU, or the time of a step in ns, which is written with a unit."""
    try:
        return float(text), None
    except ValueError:
        return None, duration_ns(text)


def throughput_lines(result: ThroughputOut, names: Sequence[str]) -> list[str]:
    """Return lines with the factor, and with each plan before and after calibration."""
    from penstock.schemas.amounts import duration

    lines = [
        f"computation of {result.device_kind} × {result.factor:.4g}: the run took {duration(result.measured_ns)} per "
        f"global batch, of which {duration(result.least_ns)} would remain if computation took no time"
    ]
    for name, one in zip(("the run", *names), (result.run, *result.shown), strict=True):
        change = one.after_ns / one.before_ns - 1
        pace = ""
        if one.tokens_per_s_per_gpu_before is not None and one.tokens_per_s_per_gpu_after is not None:
            pace = f", {one.tokens_per_s_per_gpu_before:,.0f} → {one.tokens_per_s_per_gpu_after:,.0f} tokens/s per GPU"
        lines.append(
            f"{name} ({one.model})  predicted {duration(one.before_ns)} before, {duration(one.after_ns)} after "
            f"({change:+.1%}){pace}"
        )
    return lines


def calibrated_lines(fit: Calibration, links: bool) -> list[str]:
    """Return lines with each run before and after calibration, what no cost explains, and the messages behind it."""
    from penstock.calibration.comparing import compared
    from penstock.schemas.amounts import duration

    lines = []
    for run in fit.runs:
        before = compared(run.before_ns, run.measured_ns, ())
        words = before.factor or f"predicted {duration(run.before_ns)} ({before.percent})"
        lines.append(
            f"{run.plan_hash[:15]}  measured {duration(run.measured_ns)}, {words} before, {duration(run.after_ns)} "
            f"({run.error:+.1%}) after"
        )
        if run.note is not None:
            lines.append(f"note             {run.note}")
    lines.append(f"the rest {fit.unaccounted - 1:+.1%}: barriers, jitter, a slow host")
    lines.append(f"issuing messages takes {duration(round(fit.issue_ns))} per operation")
    if links:
        lines.append(f"links fitted to {fit.num_messages} messages that a rank waited for")
    lines.append(f"expected error ± {fit.profile.source.expected_error:.1%}")
    return lines


def export_chrome(
    plan: PlanPath,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="JSON file for chrome://tracing or Perfetto.",
            rich_help_panel=OUTPUT,
        ),
    ],
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Trace of a run, shown as a second track.", rich_help_panel=OUTPUT),
    ] = None,
    server: Server = None,
) -> None:
    """Write a plan's timeline for Perfetto, next to what its ranks measured.

    Example: penstock export chrome plan.json --trace trace.json -o both.json
    """
    prepare_output(output)
    if server is not None:
        refuse_here(trace=trace)
        Path(output).write_bytes(export_there(server, plan, "chrome-trace"))
        return
    file = read_plan(plan)
    from penstock.report.plan_files import write_comparison
    from penstock.schemas.trace import Trace

    write_comparison(file, None if trace is None else read_document(Trace, trace), Path(output))

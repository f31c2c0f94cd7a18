"""``penstock calibrate`` and ``penstock export chrome``: what ranks measured, as costs and next to the prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documents import STANDARD, print_json, read_document, read_plan, refuse_unwritable, write_document
from penstock.cli.options import OUTPUT, Document, PlanPath
from penstock.cli.panels import MEASURE
from penstock.cli.service.remote import Server, export_there, refuse_here

if TYPE_CHECKING:
    from penstock.calibration.calibrate import Calibration


def register(app: typer.Typer, exporting: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("calibrate", rich_help_panel=MEASURE)(calibrate)
    exporting.command("chrome")(export_chrome)


def calibrate(
    profile: Annotated[str, typer.Argument(metavar="PROFILE", help="Profile file that the plans were made from.")],
    traces: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACE...", help="Traces of `penstock run --trace`; those of differently cut plans tell most."
        ),
    ],
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
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print each run before and after calibration as JSON; needs -o.", rich_help_panel=OUTPUT
        ),
    ] = False,
) -> None:
    """Correct a profile by traces of runs, so that the next plans are predicted from what was measured.

    Example: penstock calibrate profile.json trace.json -o calibrated.json
    """
    if as_json and STANDARD in (output, output_topology):
        raise typer.BadParameter("standard output can hold one of them; write the document to a file", param_hint="-o")
    for target in (output, output_topology):
        refuse_unwritable(target)
    from penstock.calibration.calibrate import calibrate as calibrated
    from penstock.cli.show import Screen
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.trace import Trace

    given = [read_document(Trace, each) for each in traces]
    found = calibrated(read_document(ModelProfile, profile), given, links=output_topology is not None)
    write_document(found.profile, output)
    write_document(found.topology, output_topology)
    if as_json:
        print_json(found.out().model_dump(mode="json", exclude={"profile", "topology"}))
    screen = Screen.of(quiet=as_json or STANDARD in (output, output_topology))
    for line in calibrated_lines(found, output_topology is not None):
        screen.say(line)
    for target in filter(None, (output, output_topology)):
        screen.say(f"written to {target}")


def calibrated_lines(found: Calibration, links: bool) -> list[str]:
    """Each run before and after, what is left, and what it rests on."""
    from penstock.report.words import duration

    lines = []
    for run in found.runs:
        before = run.before_ns / run.measured_ns - 1
        lines.append(
            f"{run.plan_hash[:15]}  measured {duration(run.measured_ns)}, predicted {duration(run.before_ns)} "
            f"({before:+.1%}) before, {duration(run.after_ns)} ({run.error:+.1%}) after"
        )
    lines.append(
        f"beyond the instructions {found.unaccounted - 1:+.1%}; messages are issued in {found.issue_ns:.0f} ns"
    )
    if links:
        lines.append(f"links fitted to {found.num_messages} messages that a rank waited for")
    lines.append(f"expected error ± {found.profile.source.expected_error:.1%}")
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
    refuse_unwritable(output)
    if server is not None:
        refuse_here(trace=trace)
        Path(output).write_bytes(export_there(server, plan, "chrome-trace"))
        return
    file = read_plan(plan)
    from penstock.planning.explain import write_comparison
    from penstock.schemas.trace import Trace

    write_comparison(file, None if trace is None else read_document(Trace, trace), Path(output))

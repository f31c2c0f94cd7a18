"""``penstock import schedule`` and ``penstock export schedule``: the order of a plan as PyTorch's schedule CSV."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.convert.exporting import say_notes
from penstock.cli.input_files import STANDARD, prepare_output, read_plan, write_document
from penstock.cli.options import MODEL, Document, PlanPath
from penstock.cli.service.remote import Server, export_there

ELSEWHERE = "a schedule has no place for replicas and recomputation; those of the plan: penstock export PLAN --to plan"
"""The note for a plan that a service keeps."""


def register(importing: typer.Typer, exporting: typer.Typer) -> None:
    """Add this module's commands."""
    importing.command("schedule")(import_schedule)
    exporting.command("schedule")(export_schedule)


def import_schedule(
    file: Annotated[str, typer.Argument(metavar="CSV", help="Compute-only schedule of PyTorch; - is standard input.")],
    plan: Annotated[
        str,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="Plan file whose stages and devices are taken.",
            rich_help_panel=MODEL,
        ),
    ],
    output: Document = STANDARD,
) -> None:
    """Replace a plan's order by PyTorch's schedule CSV, and compare the two.

    The result is a plan like any other, for verify, simulate, report and run.

    Example: penstock import schedule rows.csv --plan plan.json -o other.json
    """
    from penstock.schemas.document import read_text

    prepare_output(output)
    original = read_plan(plan)
    text = sys.stdin.read() if file == STANDARD else read_text(file)
    from penstock.cli.show import Screen
    from penstock.planning.plan_schedules import with_schedule
    from penstock.schemas.amounts import duration

    result = with_schedule(original, text)
    write_document(result, output)
    if output == STANDARD:
        return
    before, after = (
        each.plan.prediction.time_per_global_batch_ns if each.plan.prediction else 0 for each in (original, result)
    )
    screen = Screen.of()
    against = f"; the plan's own order ({original.plan.schedule.name}) {duration(before)}" if before else ""
    screen.say(f"the imported order takes {duration(after)} per global batch{against}")
    screen.say(f"written to {output}")


def export_schedule(plan: PlanPath, output: Document = STANDARD, server: Server = None) -> None:
    """Write a plan's order as the schedule CSV of PyTorch and torchtitan.

    Example: penstock export schedule plan.json -o rows.csv
    """
    prepare_output(output)
    text, notes = _csv(plan) if server is None else (export_there(server, plan, "csv").decode(), (ELSEWHERE,))
    if output == STANDARD:
        sys.stdout.write(text)
    else:
        Path(output).write_text(text, encoding="utf-8")
    say_notes(notes)


def _csv(plan: str) -> tuple[str, tuple[str, ...]]:
    file = read_plan(plan)
    from penstock.planning.plan_schedules import schedule_csv

    return schedule_csv(file)

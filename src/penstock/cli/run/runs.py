"""``penstock runs``: the training runs of a service, listed, shown, followed and stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.input_files import print_json
from penstock.cli.options import AsJson
from penstock.cli.panels import SERVICE
from penstock.cli.service.remote import LOCAL, TheServer, connect

if TYPE_CHECKING:
    from penstock.schemas.api.jobs import RunOut

FILTER = "Filter"

Id = Annotated[str, typer.Argument(metavar="RUN", help="Id of the run, as `penstock runs list` prints it.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    runs = typer.Typer(help="List, follow and stop the training runs of a service.", no_args_is_help=True)
    runs.command("list")(list_runs)
    for command in (show, watch, cancel):
        runs.command(command.__name__)(command)
    app.add_typer(runs, name="runs", rich_help_panel=SERVICE)


def list_runs(
    limit: Annotated[
        int, typer.Option(min=1, max=500, help="Largest number of runs to list.", rich_help_panel=FILTER)
    ] = 50,
    as_json: AsJson = False,
    server: TheServer = LOCAL,
) -> None:
    """List training runs, the newest first.

    Example: penstock runs list --server http://planner:8642
    """
    with connect(server) as client:
        page = client.runs.page(limit=limit)
    if as_json:
        print_json(page.model_dump(mode="json"))
        return
    from penstock.cli.show import Screen

    rows = (
        (run.id, run.state, run.model, f"{run.steps_done:,} of {run.steps:,}", ", ".join(run.agents) or "–")
        for run in page.items
    )
    more = page.next_cursor is not None
    heads = ("run", "state", "job", "steps", "agents")
    Screen.of().page(heads, rows, whole=("run", "state", "steps"), more=more, limit=limit)


def show(run: Id, as_json: AsJson = False, server: TheServer = LOCAL) -> None:
    """Show a run's state, steps and times, or why it failed.

    Example: penstock runs show RUN --server http://planner:8642
    """
    with connect(server) as client:
        _print_run(client.runs.get(run), as_json)


def watch(run: Id, as_json: AsJson = False, server: TheServer = LOCAL) -> None:
    """Follow a run to its end.

    Example: penstock runs watch RUN --server http://planner:8642
    """
    from penstock.cli.run.running_there import RunProgress
    from penstock.cli.show import Screen

    screen = Screen.of(quiet=as_json)
    progress = RunProgress(screen)
    with connect(server) as client:
        for state in client.runs.watch(run):
            progress(state)
        screen.done()
        _print_run(client.runs.get(run), as_json)


def cancel(run: Id, as_json: AsJson = False, server: TheServer = LOCAL) -> None:
    """Stop a run on all its agents; its ranks write a checkpoint first.

    Example: penstock runs cancel RUN --server http://planner:8642
    """
    with connect(server) as client:
        _print_run(client.runs.cancel(run), as_json)


def _print_run(run: RunOut, as_json: bool) -> None:
    if as_json:
        print_json(run)
        return
    from penstock.cli.show import Screen
    from penstock.schemas.amounts import duration

    screen = Screen.of()
    screen.say(f"run {run.id}: {run.state}, {run.steps_done:,} of {run.steps:,} steps of {run.model}")
    screen.say(f"  plan {run.plan_hash} on {', '.join(run.agents) or 'no agent yet'}")
    screen.say(f"  predicted {duration(run.predicted_time_per_global_batch_ns)} per global batch")
    if run.measured_time_per_global_batch_ns is not None:
        screen.say(f"  measured {duration(run.measured_time_per_global_batch_ns)} per global batch")
    if run.error is not None:
        screen.say(f"  {run.error.detail}")

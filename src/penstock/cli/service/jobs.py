"""``penstock jobs``: the plan jobs of a service, listed, followed, stopped and started again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.input_files import print_json
from penstock.cli.options import AsJson
from penstock.cli.panels import SERVICE
from penstock.cli.service.remote import LOCAL, TheServer, connect, progress_line, watched

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.client import Client
    from penstock.schemas.api.jobs import JobOut

FILTER = "Filter"

Id = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job, as `penstock jobs list` prints it.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    jobs = typer.Typer(help="List, follow, stop and retry the plan jobs of a service.", no_args_is_help=True)
    jobs.command("list")(list_jobs)
    for command in (show, watch, cancel, finish, retry, delete):
        jobs.command(command.__name__)(command)
    app.add_typer(jobs, name="jobs", rich_help_panel=SERVICE)


def list_jobs(
    state: Annotated[
        str | None,
        typer.Option(
            metavar="queued|running|succeeded|failed|cancelled",
            help="State of the jobs to list (default: any).",
            rich_help_panel=FILTER,
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="Tag of the jobs to list (default: any).", rich_help_panel=FILTER)
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(help="Planner that the jobs asked for, such as dapple (default: any).", rich_help_panel=FILTER),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=500, help="Largest number of jobs to list.", rich_help_panel=FILTER)
    ] = 50,
    as_json: AsJson = False,
    server: TheServer = LOCAL,
) -> None:
    """List plan jobs, the newest first.

    Example: penstock jobs list --server http://planner:8642 --state running
    """
    with connect(server) as client:
        page = client.jobs.page(limit=limit, state=state, tag=tag, planner=planner)  # type: ignore[arg-type]
    if as_json:
        print_json(page.model_dump(mode="json"))
        return
    from penstock.cli.show import Screen

    rows = (
        (job.id, job.state, job.planner or "–", job.created_at, _line(job, state=False) or "–") for job in page.items
    )
    heads = ("job", "state", "planner", "created", "best and bound")
    more = page.next_cursor is not None
    Screen.of().page(heads, rows, whole=("job", "state"), more=more, limit=limit)


def show(job: Id, as_json: AsJson = False, server: TheServer = LOCAL) -> None:
    """Show a job's state, its best plan and bound, or why it has no plan.

    Example: penstock jobs show JOB --server http://planner:8642
    """
    with connect(server) as client:
        _print_job(client, client.jobs.get(job), as_json)


def watch(job: Id, as_json: AsJson = False, server: TheServer = LOCAL) -> None:
    """Follow a job to its end, with its incumbent, bound and gap.

    Example: penstock jobs watch JOB --server http://planner:8642
    """
    with connect(server) as client:
        _print_job(client, watched(client, client.jobs.get(job), _screen(as_json)), as_json)


def cancel(job: Id, as_json: AsJson = False, server: TheServer = LOCAL) -> None:
    """Stop a job, and drop what it has found.

    Example: penstock jobs cancel JOB --server http://planner:8642
    """
    with connect(server) as client:
        _print_job(client, client.jobs.cancel(job), as_json)


def finish(job: Id, as_json: AsJson = False, server: TheServer = LOCAL) -> None:
    """Stop a job, and make its best plan so far its result.

    Example: penstock jobs finish JOB --server http://planner:8642
    """
    with connect(server) as client:
        _print_job(client, client.jobs.finish(job), as_json)


def retry(job: Id, as_json: AsJson = False, server: TheServer = LOCAL) -> None:
    """Start a job again that failed or was cancelled.

    Example: penstock jobs retry JOB --server http://planner:8642
    """
    with connect(server) as client:
        _print_job(client, client.jobs.retry(job), as_json)


def delete(job: Id, server: TheServer = LOCAL) -> None:
    """Delete a job that has ended; its plan stays under its hash.

    Example: penstock jobs delete JOB --server http://planner:8642
    """
    with connect(server) as client:
        client.jobs.delete(job)


def _screen(as_json: bool) -> Screen:
    from penstock.cli.show import Screen

    return Screen.of(quiet=as_json)


def _print_job(client: Client, job: JobOut, as_json: bool) -> None:
    if as_json:
        print_json(job)
        return
    from penstock.cli.show import show_answer

    screen = _screen(False)
    screen.say(f"job {job.id}: {_line(job)}")
    if job.error is not None:
        screen.say(f"  {job.error.detail}")
    if job.result is not None and job.result.plan is not None:
        show_answer(screen, client.plans.file(job.id).request, job.result)
    elif job.result is not None:
        screen.say(f"  {job.result.sentence}")


def _line(job: JobOut, *, state: bool = True) -> str:
    fields = {"state": job.state if state else None, "incumbent_ns": job.incumbent_ns, "bound_ns": job.bound_ns}
    return progress_line({name: value for name, value in fields.items() if value is not None})

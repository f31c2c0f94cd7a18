"""``penstock jobs``: the plan jobs of a service, listed, followed, stopped and started again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documents import print_json
from penstock.cli.service.remote import LOCAL, TheServer, connect, progress_line, watched

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.client import Client
    from penstock.schemas.api.jobs import JobOut

Id = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as `penstock jobs list` has it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    jobs = typer.Typer(help="List, follow, stop and retry the plan jobs of a service.", no_args_is_help=True)
    jobs.command("list")(list_jobs)
    for command in (show, watch, cancel, finish, retry, delete):
        jobs.command(command.__name__)(command)
    app.add_typer(jobs, name="jobs")


def list_jobs(
    server: TheServer = LOCAL,
    state: Annotated[str | None, typer.Option(help="queued, running, succeeded, failed or cancelled.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only those with this tag.")] = None,
    planner: Annotated[str | None, typer.Option(help="Only those that asked for this planner.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many, the newest first.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    with connect(server) as client:
        found = client.jobs.page(limit=limit, state=state, tag=tag, planner=planner)  # type: ignore[arg-type]
    if as_json:
        print_json(found.model_dump(mode="json"))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from penstock.cli.show import Screen

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in ("job", "state", "planner", "created", "best and bound"):
        table.add_column(head, overflow="fold", no_wrap=head in ("job", "state"))
    for job in found.items:
        table.add_row(job.id, job.state, job.planner or "–", job.created_at, _line(job, state=False) or "–")
    screen = Screen.of()
    screen.table(table)
    if found.next_cursor is not None:
        screen.say(f"there are more; --limit shows up to 500 (now {limit})")


def show(job: Id, server: TheServer = LOCAL, as_json: AsJson = False) -> None:
    """Show a job: its state, its best plan and bound, or why there is none."""
    with connect(server) as client:
        _tell(client, client.jobs.get(job), as_json)


def watch(job: Id, server: TheServer = LOCAL, as_json: AsJson = False) -> None:
    """Follow a job to its end, with its incumbent, bound and gap."""
    with connect(server) as client:
        _tell(client, watched(client, client.jobs.get(job), _screen(as_json)), as_json)


def cancel(job: Id, server: TheServer = LOCAL, as_json: AsJson = False) -> None:
    """Stop a job and drop what it has found."""
    with connect(server) as client:
        _tell(client, client.jobs.cancel(job), as_json)


def finish(job: Id, server: TheServer = LOCAL, as_json: AsJson = False) -> None:
    """Stop a job; its best plan so far becomes its result."""
    with connect(server) as client:
        _tell(client, client.jobs.finish(job), as_json)


def retry(job: Id, server: TheServer = LOCAL, as_json: AsJson = False) -> None:
    """Start a job again that has failed or was cancelled."""
    with connect(server) as client:
        _tell(client, client.jobs.retry(job), as_json)


def delete(job: Id, server: TheServer = LOCAL) -> None:
    """Delete a job that has ended; a stored plan stays under its hash."""
    with connect(server) as client:
        client.jobs.delete(job)


def _screen(as_json: bool) -> Screen:
    from penstock.cli.show import Screen

    return Screen.of(quiet=as_json)


def _tell(client: Client, job: JobOut, as_json: bool) -> None:
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
        screen.say(f"  {job.result.why}")


def _line(job: JobOut, *, state: bool = True) -> str:
    known = {"state": job.state if state else None, "incumbent_ns": job.incumbent_ns, "bound_ns": job.bound_ns}
    return progress_line({name: value for name, value in known.items() if value is not None})

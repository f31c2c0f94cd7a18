"""Commands that a service answers instead of this machine: the option, the plan, and the progress of a job."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.input_files import STANDARD, read_plan
from penstock.cli.options import OUTPUT, SERVICE

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.client import Client
    from penstock.schemas.api.jobs import JobEvent, JobOut
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.request import PlanRequest

WAIT_S = 20
PATIENCE_S = 5.0
"""Seconds for which a command retries while the service is busy or away: a user waits at a terminal."""
ENDED = ("succeeded", "failed", "cancelled")

VARIABLE = "PENSTOCK_SERVER"
"""The environment variable that replaces a missing ``--server``; ``--server ''`` selects this machine again."""

Server = Annotated[
    str | None,
    typer.Option(
        "--server",
        metavar="URL",
        envvar=VARIABLE,
        callback=lambda url: url or None,
        help="Service that does the work, such as http://planner:8642; its key is PENSTOCK_API_KEY.",
        rich_help_panel=SERVICE,
    ),
]
LOCAL = "http://127.0.0.1:8642"
TheServer = Annotated[
    str,
    typer.Option(
        "--server",
        metavar="URL",
        envvar=VARIABLE,
        callback=lambda url: url or LOCAL,
        help="Service to ask, such as http://planner:8642; its key is read from PENSTOCK_API_KEY.",
        rich_help_panel=SERVICE,
    ),
]
Post = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Service that also gets the document, such as http://planner:8642.",
        rich_help_panel=OUTPUT,
    ),
]


def connect(server: str) -> Client:
    """Return a client, which the caller closes."""
    from penstock.client import Client

    return Client(server, patience_s=PATIENCE_S)


def is_file(source: str) -> bool:
    """Return whether a plan is given as a document, and not as the hash or the job of a plan in a service."""
    return source == STANDARD or Path(source).exists() or Path(source).suffix in {".json", ".yaml", ".yml"}


def plan_there(client: Client, source: str) -> PlanFile:
    """Return the plan file of that name, or the plan that the service keeps under a hash or found for a job."""
    return read_plan(source) if is_file(source) else client.plans.file(source)


def plan_or_hash(source: str, server: str | None) -> PlanFile | str:
    """Return a plan file that is here, or the hash of a plan that a service stores, also by the id of its job."""
    if server is None or is_file(source):
        return read_plan(source)
    with connect(server) as client:
        return client.jobs.hash_of(source)


def export_there(server: str, source: str, to: Any) -> bytes:
    """Return a stored plan in another form. Raises typer.BadParameter for a file, which the service does not keep."""
    refuse_file(source)
    with connect(server) as client:
        return client.plans.export(source, to)


def refuse_file(source: str) -> None:
    """Raise typer.BadParameter for a plan that is given as a document: with a service, it is a plan that it keeps."""
    if is_file(source):
        raise typer.BadParameter(
            f"with --server PLAN is the hash or the job of a plan in the service, not a file ({source!r})"
        )


def refuse_here(**options: object) -> None:
    """Raise typer.BadParameter for options that only this machine can follow."""
    for name, value in options.items():
        if value:
            raise typer.BadParameter(
                f"works only on this machine; leave it out, or use no service (--server '', or unset {VARIABLE})",
                param_hint=_flag(name),
            )


def solved_there(client: Client, request: PlanRequest, screen: Screen) -> JobOut:
    """Request a plan, and show its progress. Raises the error of the job."""
    return watched(client, client.plans.create(request, wait=False), screen)


def watched(client: Client, job: JobOut, screen: Screen) -> JobOut:
    """Wait for a job and return it; an interrupt leaves it running, and says so. Raises the job's error."""
    from penstock.client import error_of

    progress = Progress(screen)
    try:
        for event in client.jobs.events(job.id) if job.state not in ENDED else ():
            progress(event)
        while job.state not in ENDED:
            job = client.jobs.get(job.id, wait_s=WAIT_S)
    except KeyboardInterrupt:
        screen.done()
        print(f"penstock: job {job.id} continues; `penstock jobs watch` or `cancel` it", file=sys.stderr)
        raise
    finally:
        screen.done()
    if job.error is not None:
        raise error_of(job.error)
    return job


class Progress:
    """A line of progress from a job's events: state, time and planner of the best plan, bound, gap, busy planners."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._fields: dict[str, Any] = {}

    def __call__(self, event: JobEvent) -> None:
        """Show one event."""
        self._fields |= {name: value for name, value in event.data.items() if value is not None}
        self._screen.progress(progress_line(self._fields))


def progress_line(fields: dict[str, Any]) -> str:
    """Return a line with the state of a job, its best plan, bound and gap."""
    from penstock.schemas.amounts import duration, percent

    parts = [fields["state"]] if "state" in fields else []
    if "incumbent_ns" in fields:
        by = f" by {fields['planner']}" if "planner" in fields else ""
        parts.append(f"{duration(fields['incumbent_ns'])}{by}")
    if "bound_ns" in fields:
        parts.append(f"bound {duration(fields['bound_ns'])}")
    if "gap" in fields:
        parts.append(f"gap {percent(fields['gap'])}")
    return ", ".join(parts) + (f"; {', '.join(fields['working'])}" if fields.get("working") else "")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

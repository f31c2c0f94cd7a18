"""``penstock keys``: the keys of a service, in its database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.durations import METAVAR, duration_ns, seconds
from penstock.cli.options import AsJson, Database
from penstock.cli.panels import SERVICE

if TYPE_CHECKING:
    from penstock.service.security.keys import Key, Keys

LONGEST_S = 100 * 366 * 86400
KEYS = "Keys"
DEFAULT_QUEUED = 1000
"""Default limit on the waiting jobs of a key: the default limit on the cases of a sweep."""

Id = Annotated[str, typer.Argument(metavar="KEY", help="Id of the key, as `penstock keys list` prints it.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    keys = typer.Typer(help="Make, list, rotate and revoke keys of the service.", no_args_is_help=True)
    keys.command("create")(create)
    keys.command("list")(list_keys)
    keys.command("rotate")(rotate)
    keys.command("revoke")(revoke)
    app.add_typer(keys, name="keys", rich_help_panel=SERVICE)


def create(
    name: Annotated[str, typer.Option(help="Name of the person or program that will use it.", rich_help_panel=KEYS)],
    scope: Annotated[
        list[str],
        typer.Option(
            metavar="read|solve|run|agent|admin", help="What the key allows. Repeatable.", rich_help_panel=KEYS
        ),
    ],
    tenant: Annotated[
        str, typer.Option(help="Tenant whose plans, runs and agents the key sees.", rich_help_panel=KEYS)
    ] = "default",
    expires: Annotated[
        str,
        typer.Option(
            metavar=METAVAR, help="Time after which the key ends: 90d, 12h, 30min; or never.", rich_help_panel=KEYS
        ),
    ] = "90d",
    max_running: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of jobs of this key that run at the same time (default: no limit).",
            rich_help_panel=KEYS,
        ),
    ] = None,
    max_queued: Annotated[
        int,
        typer.Option(min=0, help="Largest number of jobs of this key that wait.", rich_help_panel=KEYS),
    ] = DEFAULT_QUEUED,
    node: Annotated[
        str | None,
        typer.Option(help="Name of the one agent that a key of scope agent is for.", rich_help_panel=KEYS),
    ] = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print it, once: it cannot be shown again.

    Example: penstock keys create --name ci --scope solve --scope read
    """
    lifetime_s = seconds_of(expires, "--expires")
    with _opened(database) as keys:
        key, text = keys.create(
            tenant, name, scope, lifetime_s=lifetime_s, max_running=max_running, max_queued=max_queued, node=node
        )
    _print_new(key, text, as_json)


def list_keys(
    tenant: Annotated[
        str | None, typer.Option(help="Tenant whose keys are listed (default: all).", rich_help_panel=KEYS)
    ] = None,
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """List the keys, without their secrets.

    Example: penstock keys list --json
    """
    with _opened(database) as keys:
        rows = keys.listed(tenant)
    if as_json:
        print(json.dumps([_plain(key) for key in rows], indent=1))
    else:
        _print_table(rows)


def rotate(
    id: Id,
    overlap: Annotated[
        str,
        typer.Option(metavar=METAVAR, help="Time for which the old key stays valid: 1h, 1d, 0s.", rich_help_panel=KEYS),
    ] = "1h",
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Replace a key by a new one; the old one ends after the overlap.

    Example: penstock keys rotate KEY --overlap 1d
    """
    overlap_s = seconds_of(overlap, "--overlap")
    if overlap_s is None:
        raise typer.BadParameter("an overlap has to end; give 0s, 1h or 2d", param_hint="--overlap")
    with _opened(database) as keys:
        key, text = keys.rotate(id, overlap_s)
    _print_new(key, text, as_json)


def revoke(id: Id, database: Database = None, as_json: AsJson = False) -> None:
    """End a key; services notice within seconds.

    Example: penstock keys revoke KEY
    """
    with _opened(database) as keys:
        key = keys.revoke(id)
    print(json.dumps(_plain(key), indent=1) if as_json else f"key {key.id} ({key.name} of {key.tenant}) is revoked")


def seconds_of(text: str, option: str) -> float | None:
    """Return the seconds of a duration such as ``90d``; None for ``never``. Raises typer.BadParameter."""
    if text == "never":
        return None
    try:
        time_s = seconds(duration_ns(text))
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{error.message}, or never", param_hint=option) from None
    if time_s > LONGEST_S:
        raise typer.BadParameter(f"{text!r} is longer than a hundred years; give never", param_hint=option)
    return time_s


@contextmanager
def _opened(database: str | None) -> Iterator[Keys]:
    from penstock.service.db.database import Database as Service
    from penstock.service.security.keys import Keys
    from penstock.service.settings import Settings

    settings = Settings.load(**({} if database is None else {"database": database}))
    opened = Service.of(settings)
    try:
        opened.create()
        yield Keys(opened)
    finally:
        opened.close()


def _print_new(key: Key, text: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_plain(key) | {"key": text}, indent=1))
        return
    until = "for ever" if key.expires_ms is None else f"until {_time(key.expires_ms)}"
    print(text)
    typer.echo(
        f"This key of tenant {key.tenant} opens {', '.join(key.scopes)} {until}. Save it now: only its hash is stored.",
        err=True,
    )


def _print_table(keys: list[Key]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("id", "tenant", "name", "scopes", "state", "expires", "last used", "jobs"):
        # An id goes into `rotate` and `revoke`, so a narrow terminal must not shorten it. A date takes 10 characters.
        width = 10 if head in ("expires", "last used", "jobs") else None
        table.add_column(head, no_wrap=head in ("id", "state"), min_width=width, overflow="fold")
    for key in keys:
        limits = {"running": key.max_running, "queued": key.max_queued}
        table.add_row(
            key.id,
            key.tenant,
            key.name,
            ", ".join(key.scopes) + (f" of {key.node}" if key.node else ""),
            key.state,
            "never" if key.expires_ms is None else _time(key.expires_ms),
            "never" if key.last_used_ms is None else _time(key.last_used_ms),
            ", ".join(f"{most} {what}" for what, most in limits.items() if most is not None) or "any",
        )
    Console().print(table if keys else "no keys yet; make one with `penstock keys create`", markup=False)


def _plain(key: Key) -> dict[str, Any]:
    """Return a key as JSON."""
    from penstock.service.db.tables import iso

    times = {
        f"{name}_at": None if (at := getattr(key, f"{name}_ms")) is None else iso(at)
        for name in ("created", "expires", "revoked", "last_used")
    }
    same = ("id", "tenant", "name", "scopes", "state", "max_running", "max_queued", "node")
    return {name: getattr(key, name) for name in same} | times


def _time(milliseconds: int) -> str:
    from penstock.service.db.tables import iso

    return iso(milliseconds)[:16].replace("T", " ")

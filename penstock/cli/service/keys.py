"""``penstock keys``: who may ask the service, straight in its database."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from penstock.service.security.keys import Key, Keys

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_S = 100 * 366 * 86400

Url = Annotated[
    str | None, typer.Option(help="The service's database: a file, or a URL; by default that of the settings.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Id = Annotated[str, typer.Argument(help="The key's id, as `penstock keys list` has it.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    keys = typer.Typer(help="Make, list, rotate and revoke keys of the service.", no_args_is_help=True)
    keys.command("create")(create)
    keys.command("list")(list_keys)
    keys.command("rotate")(rotate)
    keys.command("revoke")(revoke)
    app.add_typer(keys, name="keys")


def create(
    name: Annotated[str, typer.Option(help="Who or what will use it.")],
    scope: Annotated[
        list[str], typer.Option(help="What it opens: read, solve, run, agent, admin; may be given several times.")
    ],
    tenant: Annotated[str, typer.Option(help="Whose plans, runs and agents it sees.")] = "default",
    expires: Annotated[str, typer.Option(help="After how long it ends: 90d, 12h, 30m; or never.")] = "90d",
    max_running: Annotated[int | None, typer.Option(min=1, help="Most jobs of it at a time.")] = None,
    max_queued: Annotated[int | None, typer.Option(min=0, help="Most jobs of it that wait.")] = None,
    database: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, and print it: nobody can tell it again."""
    lifetime_s = seconds_of(expires, "--expires")
    with _opened(database) as keys:
        key, text = keys.create(
            tenant, name, scope, lifetime_s=lifetime_s, max_running=max_running, max_queued=max_queued
        )
    _print_new(key, text, as_json)


def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's.")] = None,
    database: Url = None,
    as_json: AsJson = False,
) -> None:
    """List the keys, without their secrets."""
    with _opened(database) as keys:
        found = keys.listed(tenant)
    if as_json:
        print(json.dumps([_plain(key) for key in found], indent=1))
    else:
        _print_table(found)


def rotate(
    id: Id,
    overlap: Annotated[str, typer.Option(help="How long the old key stays valid.")] = "1h",
    database: Url = None,
    as_json: AsJson = False,
) -> None:
    """Make another key for the same, with a new id and secret; the old one ends after the overlap."""
    overlap_s = seconds_of(overlap, "--overlap")
    if overlap_s is None:
        raise typer.BadParameter("an overlap ends; give 0s, 1h, 2d", param_hint="--overlap")
    with _opened(database) as keys:
        key, text = keys.rotate(id, overlap_s)
    _print_new(key, text, as_json)


def revoke(id: Id, database: Url = None, as_json: AsJson = False) -> None:
    """End a key; services notice within seconds."""
    with _opened(database) as keys:
        key = keys.revoke(id)
    print(json.dumps(_plain(key), indent=1) if as_json else f"key {key.id} ({key.name} of {key.tenant}) is revoked")


def seconds_of(text: str, option: str) -> float | None:
    """A duration such as ``90d``; None for ``never``. Raises typer.BadParameter."""
    if text == "never":
        return None
    parts = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if parts is None:
        raise typer.BadParameter(f"{text!r} is no duration; give 30m, 12h, 90d or never", param_hint=option)
    seconds = int(parts[1]) * UNITS_S[parts[2]]
    if seconds > LONGEST_S:
        raise typer.BadParameter(f"{text!r} is longer than a hundred years; give never", param_hint=option)
    return float(seconds)


@contextmanager
def _opened(database: str | None) -> Iterator[Keys]:
    from penstock.service.db.database import Database
    from penstock.service.security.keys import Keys
    from penstock.service.settings import Settings

    settings = Settings.load(**({} if database is None else {"database": database}))
    opened = Database.of(settings)
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
        f"This key of tenant {key.tenant} opens {', '.join(key.scopes)} {until}. Keep it now: only its hash is stored.",
        err=True,
    )


def _print_table(keys: list[Key]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("id", "tenant", "name", "scopes", "state", "expires", "last used", "jobs", box=None, pad_edge=False)
    for key in keys:
        limits = {"running": key.max_running, "queued": key.max_queued}
        table.add_row(
            key.id,
            key.tenant,
            key.name,
            ", ".join(key.scopes),
            key.state,
            "never" if key.expires_ms is None else _time(key.expires_ms),
            "never" if key.last_used_ms is None else _time(key.last_used_ms),
            ", ".join(f"{most} {what}" for what, most in limits.items() if most is not None) or "any",
        )
    Console().print(table if keys else "no keys yet; make one with `penstock keys create`", markup=False)


def _plain(key: Key) -> dict[str, Any]:
    """A key as JSON."""
    from penstock.service.db.tables import iso

    times = {
        f"{name}_at": None if (at := getattr(key, f"{name}_ms")) is None else iso(at)
        for name in ("created", "expires", "revoked", "last_used")
    }
    same = ("id", "tenant", "name", "scopes", "state", "max_running", "max_queued")
    return {name: getattr(key, name) for name in same} | times


def _time(milliseconds: int) -> str:
    from penstock.service.db.tables import iso

    return iso(milliseconds)[:16].replace("T", " ")

"""``penstock db``: upgrade, check, back up, restore and prune the service's database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.durations import METAVAR
from penstock.cli.options import AsJson, Database
from penstock.cli.panels import SERVICE
from penstock.cli.service.keys import seconds_of
from penstock.schemas.errors import NotFound

if TYPE_CHECKING:
    from penstock.service.db.database import Database as Service
    from penstock.service.db.upkeep.checking import Condition

DAY_S = 86400

BackupFile = Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="File of the backup.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    database = typer.Typer(
        help="Upgrade, check, back up, restore and prune the service's database.", no_args_is_help=True
    )
    database.command("upgrade")(upgrade)
    database.command("check")(check)
    database.command("backup")(backup)
    database.command("restore")(restore)
    database.command("prune")(prune)
    app.add_typer(database, name="db", rich_help_panel=SERVICE)


def upgrade(database: Database = None, as_json: AsJson = False) -> None:
    """Upgrade a database to this version of Penstock, or create it; take a backup first.

    Example: penstock db upgrade --database penstock.sqlite
    """
    from penstock.service.db import migrations

    with _opened(database, may_be_new=True) as opened:
        before = opened.upgrade()
    words = {None: "made", migrations.HEAD: "nothing to do"}.get(before, f"upgraded from {before}")
    _say(
        {"database": opened.name, "before": before, "revision": migrations.HEAD},
        f"{opened.name} is at revision {migrations.HEAD} ({words})",
        as_json,
    )


def check(database: Database = None, as_json: AsJson = False) -> int:
    """Check that a database can be written, is up to date and whole, and exit 1 when it is not.

    Example: penstock db check --database penstock.sqlite
    """
    from penstock.service.db.upkeep import checking

    with _opened(database) as opened:
        condition = checking.check(opened)
    _say(asdict(condition) | {"ok": not condition.faults}, _lines(condition), as_json)
    return 1 if condition.faults else 0


def backup(file: BackupFile, database: Database = None, as_json: AsJson = False) -> None:
    """Copy a database into a new file, as it is at one moment, while services use it.

    Example: penstock db backup saved.sqlite --database penstock.sqlite
    """
    from penstock.service.db.upkeep import backups

    with _opened(database) as opened:
        size = backups.backup(opened, file)
    shown = {"database": opened.name, "file": str(file), "size_bytes": size}
    _say(shown, f"{opened.name} is in {file} now ({_size(size)})", as_json)


def restore(
    file: BackupFile,
    database: Database = None,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Delete what the database holds; stop services and workers first.",
            rich_help_panel=SERVICE,
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Fill a database from a backup.

    Example: penstock db restore saved.sqlite --database penstock.sqlite --replace
    """
    from penstock.service.db.migrations import HEAD
    from penstock.service.db.upkeep import backups

    if not file.is_file():
        raise NotFound(f"there is no file {str(file)!r}", remedy="name one that `penstock db backup` wrote")
    with _opened(database, may_be_new=True) as opened:
        revision = backups.restore(opened, file, replace=replace)
    hint = "" if revision == HEAD else f", but this Penstock needs {HEAD}: run `penstock db upgrade`"
    shown = {"database": opened.name, "file": str(file), "revision": revision}
    _say(shown, f"{opened.name} now holds the data of {file}, at revision {revision}{hint}", as_json)


def prune(
    older_than: Annotated[
        str,
        typer.Option(
            metavar=METAVAR,
            help="Time since when a job has to have ended to be removed: 90d; at least 2d.",
            rich_help_panel=SERVICE,
        ),
    ],
    database: Database = None,
    as_json: AsJson = False,
) -> None:
    """Remove jobs and sweeps that ended long ago, their answers, and documents that nothing names any more.

    Example: penstock db prune --older-than 90d
    """
    from penstock.service.db.upkeep.pruning import prune as prune_now

    age_s = seconds_of(older_than, "--older-than")
    if age_s is None:
        raise typer.BadParameter(
            "with never, nothing would be removed; give a time such as 90d", param_hint="--older-than"
        )
    with _opened(database) as opened:
        opened.create()
        gone = asdict(prune_now(opened, age_s / DAY_S))
    _say(gone, "removed: " + ", ".join(f"{number} {name}" for name, number in gone.items()), as_json)


@contextmanager
def _opened(database: str | None, *, may_be_new: bool = False) -> Iterator[Service]:
    from penstock.service.db.database import Database as Service
    from penstock.service.settings import Settings

    settings = Settings.load(**({} if database is None else {"database": database}))
    opened = Service.of(settings)
    try:
        if opened.is_sqlite and not may_be_new and not Path(opened.url.database or "").is_file():
            raise NotFound(
                f"there is no database {opened.url.database!r}", remedy="name it by --database, or PENSTOCK_DATABASE"
            )
        yield opened
    finally:
        opened.close()


def _lines(condition: Condition) -> str:
    lines = [f"{condition.database}: {condition.engine}, revision {condition.revision} of {condition.head}"]
    if condition.size_bytes is not None:
        free = "" if condition.free_bytes is None else f", {_size(condition.free_bytes)} free on its disk"
        lines.append(f"{_size(condition.size_bytes)}{free}")
    if condition.rows:
        lines.append(
            "rows: " + ", ".join(f"{name} {number}" for name, number in sorted(condition.rows.items()) if number)
        )
        lines.append(f"{condition.documents} documents compared with their addresses")
    lines += [f"FAULT: {fault}" for fault in condition.faults] or ["all is well"]
    return "\n".join(lines)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.1f} MB" if size_bytes < 1e9 else f"{size_bytes / 1e9:,.1f} GB"


def _say(shown: dict[str, Any], words: str, as_json: bool) -> None:
    print(json.dumps(shown, indent=1) if as_json else words)

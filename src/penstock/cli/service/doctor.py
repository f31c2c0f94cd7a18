"""``penstock doctor``: what this machine and a service lack, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import typer

from penstock.cli import kernels
from penstock.cli.options import AsJson, Database, SettingsFile
from penstock.cli.panels import SERVICE
from penstock.cli.service.remote import Server
from penstock.schemas.errors import PenstockError

if TYPE_CHECKING:
    import httpx

    from penstock.schemas.api.agents import AgentOut
    from penstock.service.settings import Settings

EXTRAS = {
    "solvers": ("numpy", "numba", "networkx", "ortools"),
    "service": ("fastapi", "uvicorn", "sqlalchemy", "alembic", "structlog", "prometheus_client"),
    "executor": ("torch",),
    "cluster": ("distributed",),
}
OPTIONAL = ("executor", "cluster")
LITTLE_BYTES, TOO_LITTLE_BYTES = 2 * 10**9, 2 * 10**8
CLOCK_S = 5.0
"""Difference of clocks in seconds that is noted: ages are shown by this machine's clock, leases by the database's."""

REACH_S = 3.0

Verdict = Literal["ok", "note", "FAILED"]


class Check(NamedTuple):
    """One line of the table; ``remedy`` says what to do where it is not ok."""

    name: str
    verdict: Verdict
    result: str
    remedy: str = ""


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("doctor", rich_help_panel=SERVICE)(doctor)


def doctor(
    server: Server = None, database: Database = None, settings: SettingsFile = None, as_json: AsJson = False
) -> None:
    """Check what is missing on this machine and on a service, and exit 1 when a check fails.

    Prints one line per check, with what to do about it.

    Example: penstock doctor --server http://planner:8642
    """
    checks = [_of_penstock(), *_of_python(), *_of_machine()]
    if all(find_spec(name) is not None for name in EXTRAS["service"]):
        checks += _of_service(settings, {} if database is None else {"database": database})
    if server is not None:
        checks += _of_server(server)
    if as_json:
        from penstock.cli.input_files import print_json

        print_json([check._asdict() for check in checks])
    else:
        _show(checks)
    if any(check.verdict == "FAILED" for check in checks):
        raise typer.Exit(1)


def _of_penstock() -> Check:
    version, code = _installed()
    return Check("Penstock", "ok", f"{version}, code {code}: stored answers of other code are not used")


def _of_python() -> Iterator[Check]:
    wanted = (3, 11)
    version = platform.python_version()
    yield Check("Python", "ok" if sys.version_info >= wanted else "FAILED", version, "use Python 3.11 or newer")
    for extra, names in EXTRAS.items():
        missing = [name for name in names if find_spec(name) is None]
        verdict: Verdict = "ok" if not missing else "note" if extra in OPTIONAL else "FAILED"
        state = "installed" if not missing else f"without {', '.join(missing)}"
        yield Check(f"extra [{extra}]", verdict, state, f"pip install 'penstock[{extra}]'")


def _of_machine() -> Iterator[Check]:
    from penstock.schemas.machine.processors import available_processors

    ours, all_of_them = available_processors(), os.cpu_count() or 1
    yield Check("processors", "ok", f"{ours} of {all_of_them} (affinity, control group)")
    yield _memory()
    yield _kernels()
    yield _disk("temporary files", Path(tempfile.gettempdir()))


def _memory() -> Check:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        allowed = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
    except (OSError, ValueError):
        allowed = physical
    size = min(physical, allowed)
    few = size < LITTLE_BYTES
    return Check("memory", "note" if few else "ok", _size(size), "large models may not fit: fewer slots" if few else "")


def _kernels() -> Check:
    from penstock.solvers.compiled.kept import kept

    count, place = kept()
    if not count:
        text = f"none compiled under {place}: the first plan takes longer"
        return Check("kernels", "note", text, kernels.REMEDY)
    return Check("kernels", "ok", f"{count} compiled under {place}")


def _disk(name: str, place: Path) -> Check:
    try:
        free = shutil.disk_usage(place).free
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"penstock")
    except OSError as error:
        return Check(name, "FAILED", f"{place}: {error.strerror}", "create the directory, and make it writable")
    verdict: Verdict = "FAILED" if free < TOO_LITTLE_BYTES else "note" if free < LITTLE_BYTES else "ok"
    return Check(name, verdict, f"{_size(free)} free in {place}", "make room")


def _of_service(path: Path | None, options: dict[str, str]) -> Iterator[Check]:
    from penstock.service.settings import Settings

    try:
        settings, origins = Settings.load_with_origins(path, **options)
    except PenstockError as error:
        yield Check(
            "settings", "FAILED", str(error), "penstock serve --show-settings; docs/settings.md has all of them"
        )
        return
    yield Check("settings", "ok", f"{len(origins)} given, defaults for the others")
    yield from _of_database(settings)
    yield _port(settings)


def _of_database(settings: Settings) -> Iterator[Check]:
    import sqlalchemy as sa

    from penstock.service.db.database import Database
    from penstock.service.db.migrations import HEAD, revision_of
    from penstock.service.readiness import living_workers
    from penstock.service.security.keys import UNHEEDED_REMEDY, unheeded

    url = sa.make_url(settings.database_url())
    is_file = url.get_backend_name() == "sqlite"
    if is_file:
        yield _disk("database's disk", Path(url.database or ".").absolute().parent)
        if not Path(url.database or "").exists():
            yield Check("database", "ok", f"{url.database} does not exist yet: `penstock serve` creates it")
            return
    try:
        database = Database(settings.database_url())
        with database.read() as connection:
            revision = revision_of(connection)
            living = connection.scalar(living_workers(settings.lease_s)) if revision == HEAD else 0
        words = unheeded(database) if revision == HEAD and settings.security == "off" else None
        database.close()
    except PenstockError as error:
        yield Check("database", "FAILED", error.detail, error.remedy or "")
        return
    verdict: Verdict = "ok" if revision in (HEAD, None) else "FAILED"
    remedy = "take a backup, then `penstock db upgrade`"
    yield Check("database", verdict, f"{database.name}: revision {revision or 'none yet'} of {HEAD}", remedy)
    remedy = "`penstock serve` runs a worker unless its slots are 0; `penstock worker` starts another"
    if words is not None:
        yield Check("keys", "note", words, UNHEEDED_REMEDY)
    yield Check("workers", "ok" if living else "note", f"{living} alive on this database", remedy)


def _port(settings: Settings) -> Check:
    where = f"{settings.host}:{settings.port}"
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return Check("port", "note", f"{where}: {error.strerror}", "another service may use it: --port")
    return Check("port", "ok", f"{where} is free")


def _of_server(server: str) -> Iterator[Check]:
    import httpx

    try:
        with httpx.Client(base_url=server, timeout=10.0) as http:
            began = time.time()
            answer = http.get("/version")
            yield _version(server, answer)
            yield _clock(answer, (began + time.time()) / 2)
            yield _ready(http.get("/readyz"))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        yield Check("service", "FAILED", f"{server}: {error}", "penstock serve; or name another --server")
        return
    yield from _of_agents(server)


def _installed() -> tuple[str, str]:
    """Return the version of Penstock here, and the digest of the code that answers depend on."""
    from importlib.metadata import version

    from penstock.planning.code_digest import code_digest

    return version("penstock"), code_digest()


def _version(server: str, answer: httpx.Response) -> Check:
    body = answer.json()
    if body.get("name") != "penstock":
        return Check("service", "FAILED", f"{server} is not a Penstock service", "name another --server")
    theirs, ours = (f"{each[0]} (code {each[1]})" for each in ((body["version"], body.get("code")), _installed()))
    verdict: Verdict = "ok" if theirs == ours else "note"
    return Check("service", verdict, f"Penstock {theirs} at {server}, {ours} here", "install the same version")


def _clock(answer: httpx.Response, now: float) -> Check:
    theirs = parsedate_to_datetime(answer.headers["date"]).timestamp()
    apart = theirs + 0.5 - now  # the header has whole seconds
    verdict: Verdict = "ok" if abs(apart) < CLOCK_S else "note"
    return Check("clock", verdict, f"the service's clock is {apart:+.1f} s from this one's", "use NTP on both")


def _ready(answer: httpx.Response) -> Check:
    if answer.status_code == 200:
        return Check("readiness", "ok", ", ".join(f"{name} {value}" for name, value in answer.json().items()))
    return Check("readiness", "FAILED", answer.json()["detail"], "see the service's log")


def _of_agents(server: str) -> Iterator[Check]:
    from penstock.client import Client

    try:
        with Client(server) as client:
            agents = client.agents()
    except PenstockError as error:
        yield Check("agents", "note", error.detail, error.remedy or "set PENSTOCK_API_KEY")
        return
    alive = [agent for agent in agents if agent.alive]
    yield Check("agents", "ok", f"{len(alive)} of {len(agents)} alive, {sum(len(a.devices) for a in alive)} devices")
    for agent in alive:
        if agent.probe_address is not None:
            yield _reach(agent, agent.probe_address)


def _reach(agent: AgentOut, address: str) -> Check:
    host, _, port = address.rpartition(":")
    began = time.perf_counter()
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
    except (OSError, ValueError) as error:
        remedy = "its `interface` and `probe_port` have to be reachable from the other nodes"
        return Check(f"agent {agent.id}", "note", f"{address} does not answer from here: {error}", remedy)
    return Check(f"agent {agent.id}", "ok", f"{address} answers in {1000 * (time.perf_counter() - began):.1f} ms")


def _show(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("check", "", "result", "try"):
        table.add_column(heading, overflow="fold")
    colours: dict[Verdict, str] = {"ok": "green", "note": "yellow", "FAILED": "bold red"}
    for check in checks:
        remedy = "" if check.verdict == "ok" else check.remedy
        table.add_row(Text(check.name), Text(check.verdict, colours[check.verdict]), Text(check.result), Text(remedy))
    Console().print(table)


def _size(number: int) -> str:
    return f"{number / 10**9:.1f} GB"

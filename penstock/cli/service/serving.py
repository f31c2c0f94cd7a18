"""``penstock serve``, ``penstock worker`` and ``penstock agent``: those that stay."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("serve")(serve)
    app.command("worker")(worker)
    app.command("agent")(agent)


def serve(
    host: Annotated[
        str | None, typer.Option(help="Where to listen; other machines can reach anything but loopback.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="0 takes any free port.")] = None,
    database: Annotated[str | None, typer.Option(help="An SQLite file, or a SQLAlchemy URL.")] = None,
    slots: Annotated[
        int | None, typer.Option(min=0, help="Solves at a time; 0 leaves them to `penstock worker`.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option(help="A TOML file with settings; variables PENSTOCK_… and options go before it.")
    ] = None,
    show_settings: Annotated[
        bool, typer.Option("--show-settings", help="Print all settings and where they come from, as TOML, and end.")
    ] = False,
) -> None:
    """Answer plan requests over HTTP, keep the plans, and run them on agents."""
    from penstock.service.settings import Settings

    options = {"host": host, "port": port, "database": database, "slots": slots}
    given = {name: value for name, value in options.items() if value is not None}
    chosen, origins = Settings.load_with_origins(settings, **given)
    if show_settings:
        from penstock.service.configuration import shown

        print(shown(chosen, origins), end="")
        return
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))  # until it serves; nothing was taken that could be lost
    from penstock.service.http.app import serve as run_service

    run_service(chosen)


def worker(
    database: Annotated[
        str | None, typer.Option(help="The service's: an SQLite file on this machine, or postgresql://….")
    ] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Solves at a time.")] = None,
    settings: Annotated[
        Path | None, typer.Option(help="A TOML file with settings; variables PENSTOCK_… and options go before it.")
    ] = None,
) -> None:
    """Solve the jobs of a service's database, beside its own worker or instead of it, on any machine."""
    from penstock.service.jobs.worker_process import work
    from penstock.service.settings import Settings

    given = {"database": database, "slots": slots}
    work(Settings.load(settings, **{name: value for name, value in given.items() if value is not None}))


def agent(
    server: Annotated[str | None, typer.Option(help="The service: http://host:port or https://host:port.")] = None,
    ca: Annotated[str | None, typer.Option(help="PEM file of certificates to trust beside the system's.")] = None,
    output_directory: Annotated[
        list[str] | None, typer.Option(help="Runs may write checkpoints and metrics below it; may be repeated.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Unique among the service's agents; the host's name by default.")
    ] = None,
    cpu_devices: Annotated[int | None, typer.Option(min=0, help="Offer CPU devices; 0 offers the GPUs.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="key=module:attribute that may be run; may be repeated.")
    ] = None,
    directory: Annotated[str | None, typer.Option(help="Where the training project lies and ranks write.")] = None,
    interface: Annotated[str | None, typer.Option(help="Address or network interface of stores and ranks.")] = None,
    settings: Annotated[str | None, typer.Option(help="A TOML file with these settings.")] = None,
    allow_any_model: Annotated[
        bool, typer.Option("--allow-any-model", help="Run whatever a request names; on loopback only.")
    ] = False,
) -> None:
    """Offer this machine's devices to a service, and run its plans on them.

    A service with keys wants one of scope agent: PENSTOCK_AGENT_TOKEN, or token in the settings.
    """
    from penstock.executor.node.agent import run_agent
    from penstock.executor.node.settings import AgentSettings

    given: dict[str, Any] = {
        "server": server,
        "ca": ca,
        "output_directories": output_directory or None,
        "name": name,
        "cpu_devices": cpu_devices,
        "models": dict(_model(text) for text in model) if model else None,
        "directory": directory,
        "interface": interface,
        "allow_any_model": allow_any_model or None,
    }
    run_agent(AgentSettings.load(settings, environ=os.environ, given=given))


def _model(text: str) -> tuple[str, str]:
    key, equals, reference = text.partition("=")
    if not (key and equals and reference):
        raise typer.BadParameter(f"{text!r} is not key=module:attribute", param_hint="--model")
    return key, reference

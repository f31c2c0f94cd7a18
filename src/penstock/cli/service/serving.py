"""``penstock serve``, ``penstock worker`` and ``penstock agent``: the commands that run until they are stopped."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from penstock.cli import panels
from penstock.cli.assignments import assignment
from penstock.cli.options import OUTPUT, RUN, SERVICE, Database, Directory, SettingsFile
from penstock.cli.service.remote import VARIABLE


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("agent", rich_help_panel=panels.RUN)(agent)
    app.command("serve", rich_help_panel=panels.SERVICE)(serve)
    app.command("worker", rich_help_panel=panels.SERVICE)(worker)


def serve(
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on (default: 127.0.0.1, which other machines cannot reach).",
            rich_help_panel=SERVICE,
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port to listen on (default: 8642); 0 takes any free one.",
            rich_help_panel=SERVICE,
        ),
    ] = None,
    database: Database = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Solves at a time, such as 4 (default: by processors); 0 leaves them to `penstock worker`.",
            rich_help_panel=SERVICE,
        ),
    ] = None,
    settings: SettingsFile = None,
    show_settings: Annotated[
        bool,
        typer.Option(
            "--show-settings",
            help="Print all settings and where they come from, as TOML, and exit.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
) -> None:
    """Start the service, which answers plan requests over HTTP, keeps the plans and runs them on agents.

    Example: penstock serve --port 8642 --database penstock.sqlite
    """
    from penstock.service.settings import Settings

    options = {"host": host, "port": port, "database": database, "slots": slots}
    overrides = {name: value for name, value in options.items() if value is not None}
    chosen, origins = Settings.load_with_origins(settings, **overrides)
    if show_settings:
        from penstock.service.configuration import shown

        print(shown(chosen, origins), end="")
        return
    from penstock.workers.forkserver import Forkserver

    forkserver = Forkserver.for_solves(warm_up=chosen.warm_up)
    forkserver.start()  # it imports while this process does
    try:
        from penstock.service.http.app import serve as run_service

        run_service(chosen, forkserver)
    finally:
        forkserver.stop()
    os._exit(0)  # all is closed; unloading it takes longer than a client waits


def worker(
    database: Database = None,
    slots: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Solves at the same time, such as 4 (default: by the number of processors).",
            rich_help_panel=SERVICE,
        ),
    ] = None,
    settings: SettingsFile = None,
) -> None:
    """Solve the jobs in a service's database, on any machine that reaches it.

    Example: penstock worker --database postgresql://planner/penstock --slots 4
    """
    from penstock.service.jobs.worker_process import work
    from penstock.service.settings import Settings

    overrides = {"database": database, "slots": slots}
    work(Settings.load(settings, **{name: value for name, value in overrides.items() if value is not None}))


def agent(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar=["PENSTOCK_AGENT_SERVER", VARIABLE],
            help="Service to register with, such as http://planner:8642.",
            rich_help_panel=SERVICE,
        ),
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="PEM file of certificates to trust in addition to the system's.",
            rich_help_panel=SERVICE,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Name of this agent, unique in its service (default: the host's name).", rich_help_panel=SERVICE
        ),
    ] = None,
    settings: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="TOML file with the agent's settings; variables PENSTOCK_AGENT_… and options override it.",
            rich_help_panel=SERVICE,
        ),
    ] = None,
    job: Annotated[
        list[str] | None,
        typer.Option(
            "--job",
            metavar="KEY=MODULE:ATTRIBUTE",
            help="Training job that runs may name by its key: gpt=mytrain:job. Repeatable.",
            rich_help_panel=RUN,
        ),
    ] = None,
    allow_any_job: Annotated[
        bool,
        typer.Option(
            "--allow-any-job", help="Run whatever job a request names; on loopback only.", rich_help_panel=RUN
        ),
    ] = False,
    directory: Directory = None,
    output_directory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIR",
            help="Directory below which runs may write checkpoints and metrics. Repeatable.",
            rich_help_panel=RUN,
        ),
    ] = None,
    cpu_devices: Annotated[
        int | None,
        typer.Option(
            min=0, help="CPU devices to offer, such as 2 (default: 0, which offers the GPUs).", rich_help_panel=RUN
        ),
    ] = None,
    interface: Annotated[
        str | None,
        typer.Option(
            help="Address or network interface at which ranks reach each other, such as eth0 (default: found).",
            rich_help_panel=RUN,
        ),
    ] = None,
) -> None:
    """Offer this machine's devices to a service, and run its plans on them.

    A service with keys needs one of scope agent: PENSTOCK_AGENT_TOKEN, or token
    in the settings.

    Example: penstock agent --server http://planner:8642 --job gpt=mytrain:job
    """
    from penstock.executor.node.agent import run_agent
    from penstock.executor.node.settings import AgentSettings

    options: dict[str, Any] = {
        "server": server,
        "ca": ca,
        "output_directories": output_directory or None,
        "name": name,
        "cpu_devices": cpu_devices,
        "models": dict(assignment(text, "--job", "KEY=MODULE:ATTRIBUTE") for text in job) if job else None,
        "directory": directory,
        "interface": interface,
        "allow_any_model": allow_any_job or None,
    }
    run_agent(AgentSettings.load(settings, environ=os.environ, options=options))

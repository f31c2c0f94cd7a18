"""``penstock place``: which of the free nodes a job should get, how many, and with which plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from penstock.cli.durations import between
from penstock.cli.groups import grouped
from penstock.cli.input_files import STANDARD, prepare_output, print_json, read_document, write_document
from penstock.cli.kernels import compilation_shown, one_thread
from penstock.cli.options import (
    LONGEST,
    MODEL,
    OUTPUT,
    AsJson,
    Degrees,
    Limits,
    Output,
    Planner,
    Question,
    Schedule,
    Seed,
    Settings,
    Training,
    option_values,
    shown,
)
from penstock.cli.panels import PLAN
from penstock.cli.plan.request_options import request_of
from penstock.cli.questions import ask
from penstock.cli.service.remote import Server
from penstock.schemas.options.option import put
from penstock.schemas.options.placing import GOAL, NODES, PLACE_OPTIONS

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.placing import Best
    from penstock.schemas.api.placement import Placement, PlacementAnswer, PlacementProgress, PlacementRequest
    from penstock.schemas.topology import ClusterTopology

INFEASIBLE, NONE_FOUND = 3, 4

WITH_REQUEST = ("free", "busy", "nodes_from", "objective", "time_limit")
"""Options that go with ``--request``; the request itself has fields for all other options."""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Options for the nodes that are free, and for the number that a job may get."""

    PANEL: ClassVar[str] = NODES

    free: Annotated[list[str] | None, shown(PLACE_OPTIONS["free"])] = None
    busy: Annotated[list[str] | None, shown(PLACE_OPTIONS["busy"])] = None
    nodes_from: Annotated[str | None, shown(PLACE_OPTIONS["nodes_from"])] = None
    nodes: Annotated[str | None, shown(PLACE_OPTIONS["nodes"])] = None


@dataclass(frozen=True, kw_only=True)
class Goal:
    """Options for the objective and the budgets."""

    PANEL: ClassVar[str] = GOAL

    objective: Annotated[str | None, shown(PLACE_OPTIONS["objective"])] = None
    max_devices: Annotated[int | None, shown(PLACE_OPTIONS["max_devices"])] = None
    max_price: Annotated[float | None, shown(PLACE_OPTIONS["max_price"])] = None
    deadline: Annotated[int | None, shown(PLACE_OPTIONS["deadline"], parser=between("1ns", LONGEST))] = None


@dataclass(frozen=True, kw_only=True)
class LimitsOfAll(Limits):
    """Limits at which the whole search ends."""

    time_limit: Annotated[int | None, shown(PLACE_OPTIONS["time_limit"], parser=between("1ns", LONGEST))] = None


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("place", rich_help_panel=PLAN)(grouped(place))


def place(
    *,
    question: Question,
    request: Annotated[
        str | None,
        typer.Option(
            help="Placement request for several jobs; only nodes, --objective and --time-limit go with it.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    nodes: Nodes,
    goal: Goal,
    planner: Planner = None,
    schedule: Schedule = None,
    set_option: Settings = None,
    training: Training,
    degrees: Degrees,
    limits: LimitsOfAll,
    seed: Seed = None,
    output: Output = None,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Show why, and what each further node would bring.", rich_help_panel=OUTPUT),
    ] = False,
    hostlist: Annotated[
        bool,
        typer.Option("--hostlist", help="Print only the chosen nodes, a hostlist per job.", rich_help_panel=OUTPUT),
    ] = False,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Choose which of the free nodes a job should get, and plan for them.

    Exits with 3 when it is proven that a job fits on no set of nodes, 4 when no
    set was found for one.

    Example: penstock place --example gpt2-small --cluster 4x4xV100 -b 64 --nodes 1-2 --explain
    """
    prepare_output(output)
    single = {"planner": planner, "schedule": schedule, "set_option": set_option, "seed": seed}
    placement_request = _request(request, option_values(question, nodes, goal, training, degrees, limits, **single))
    if output is not None and len(placement_request.jobs) > 1:
        raise typer.BadParameter(
            f"-o takes one plan, and the request has {len(placement_request.jobs)} jobs; use --json"
        )
    from penstock.cli.show import Screen

    screen = Screen.of(quiet=as_json or hostlist or output == STANDARD)
    try:
        answer = _placed(placement_request, server, screen, output)
    finally:
        screen.done()
    first = answer.choices[0]
    if output is not None and first.plan_file is not None:
        write_document(first.plan_file, output)
    if as_json:
        print_json(answer)
    elif hostlist:
        for choice in answer.choices:
            print(choice.hostlist)
    show_placements(screen, answer, explain=explain)
    without = [choice.status for choice in answer.choices if choice.status != "placed"]
    if without:
        if as_json or hostlist:
            _complain(answer)
        raise typer.Exit(INFEASIBLE if "infeasible" in without else NONE_FOUND)


def _placed(request: PlacementRequest, server: str | None, screen: Screen, output: str | None) -> PlacementAnswer:
    """Place the jobs; after an interrupt, write the best plan so far."""

    def show(progress: PlacementProgress) -> None:
        screen.progress(str(progress))

    if server is not None:
        screen.progress(f"{server} places {len(request.jobs)} job{'s' if len(request.jobs) > 1 else ''}")
        answer: PlacementAnswer = ask("place", request, server, show)
        return answer
    one_thread()
    from penstock.placing import answer as placed
    from penstock.schemas.api.terms import Terms

    kept: list[Best] = []
    try:
        with compilation_shown(screen):
            return placed(request, Terms(notify=show), kept.append)
    except KeyboardInterrupt:
        screen.done()
        if kept:
            _keep(kept[-1], output, screen)
        raise


def _keep(best: Best, output: str | None, screen: Screen) -> None:
    """Write the best plan so far, or say that it is lost without ``-o``."""
    if output is None:
        screen.say(f"the best plan so far, of {best.job} on {best.hostlist}, is lost: -o FILE would have kept it")
        return
    write_document(best.file(), output)
    screen.say(f"the best plan so far, of {best.job} on {best.hostlist}, is written to {output}")


def _request(request: str | None, options: Mapping[str, Any]) -> PlacementRequest:
    from penstock.planning.inputs import with_open_degrees
    from penstock.schemas.api.placement import PlacementRequest

    if request is not None:
        more = [name for name, value in options.items() if name not in WITH_REQUEST and value not in (None, [], ())]
        if more:
            names = ", ".join("--" + name.replace("_", "-") for name in more)
            raise typer.BadParameter(f"--request contains the topology and the jobs; leave out {names}")
        document = read_document(PlacementRequest, request)
        if isinstance(document.topology, str) and (options["nodes_from"] is not None):
            raise typer.BadParameter("--nodes-from needs the topology itself, not its hash")
        return _changed(document, options)
    plain = with_open_degrees(request_of({**options, "time_limit": None}))
    from penstock.schemas.request import Training as TrainingFields

    job = {name: getattr(plain, name) for name in TrainingFields.model_fields}
    job |= {"name": "job", "profile": plain.profile, "nodes": _range(options["nodes"])}
    fields = {"topology": plain.topology, "jobs": [job]}
    for name in ("max_devices", "max_price", "deadline", "objective"):
        if options[name] is not None:
            put(fields, PLACE_OPTIONS[name].pointer, options[name])
    return _changed(PlacementRequest.parse(fields), options)


def _changed(request: PlacementRequest, options: Mapping[str, Any]) -> PlacementRequest:
    """Return the request with nodes, objective and time limit as the options give them."""
    from penstock.schemas.api.placement import PlacementRequest

    where = [name for name in ("free", "busy", "nodes_from") if options[name]]
    if len(where) > 1:
        raise typer.BadParameter(f"give one of {', '.join('--' + name.replace('_', '-') for name in where)}")
    fields: dict[str, Any] = {name: getattr(request, name) for name in PlacementRequest.model_fields}
    if where:
        fields |= {"free": options["free"] or None, "busy": options["busy"] or None}
    if options["nodes_from"] is not None:
        fields["free"] = _free_of(options["nodes_from"], fields["topology"])
    if options["time_limit"] is not None:
        fields["time_limit_ns"] = options["time_limit"]
    if options["objective"] is not None:
        fields["objective"] = options["objective"]
    return PlacementRequest.parse(fields)


def _range(text: str | None) -> dict[str, int]:
    if text is None:
        return {}
    parts = re.fullmatch(r"(\d{1,9})(-(\d{1,9})?)?", text)
    if parts is None:
        raise typer.BadParameter(f"{text!r} is not a number of nodes; give 16, 4-16 or 4-", param_hint="--nodes")
    least = int(parts[1])
    if parts[2] is None:
        return {"min": least, "max": least}
    return {"min": least} if parts[3] is None else {"min": least, "max": int(parts[3])}


def _free_of(source: str, topology: ClusterTopology) -> list[str]:
    """Return the nodes of the topology on which nothing runs, according to a scheduler's output."""
    import sys
    from pathlib import Path

    from penstock.importers.topology import decoded, text_of
    from penstock.placing.free_nodes import free_nodes

    text = decoded(sys.stdin.buffer.read()) if source == STANDARD else text_of(Path(source))
    return free_nodes(text, "standard input" if source == STANDARD else source, topology)


def _complain(answer: PlacementAnswer) -> None:
    import sys

    for choice in answer.choices:
        if choice.status != "placed":
            print(f"penstock: {choice.job}: {'; '.join(choice.why)}", file=sys.stderr)


def show_placements(screen: Screen, answer: PlacementAnswer, *, explain: bool) -> None:
    """Show what each job gets; with ``explain`` also why, and what other numbers of nodes would give."""
    screen.say(f"{answer.free_nodes} nodes with {answer.free_devices} devices of {answer.topology} are free")
    for choice in answer.choices:
        if choice.status == "placed":
            screen.say(f"{choice.job}: {choice.hostlist}")
        else:
            screen.say(f"{choice.job}: nowhere")
        for sentence in choice.why if explain or choice.status != "placed" else choice.why[:1]:
            screen.say(f"  {sentence}")
        if explain and choice.rows:
            _show_rows(screen, choice)
    if len(answer.choices) > 1:
        screen.say(answer.method)


def _show_rows(screen: Screen, choice: Placement) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from penstock.schemas.amounts import duration

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for head in ("nodes", "devices", "time", "samples/s", "per device", "per node more", "at most", "price/h"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in choice.rows:
        table.add_row(
            "*" if row.chosen else "",
            str(row.nodes),
            str(row.devices),
            row.status if row.time_per_global_batch_ns is None else duration(row.time_per_global_batch_ns),
            *(
                "–" if value is None else shown.format(value)
                for value, shown in (
                    (row.samples_per_s, "{:,.2f}"),
                    (row.samples_per_s_per_device, "{:,.3f}"),
                    (row.gain_per_node, "{:+,.2f}"),
                    (row.most_samples_per_s, "{:,.2f}"),
                    (row.price_per_hour, "{:,.2f}"),
                )
            ),
        )
    screen.table(table)

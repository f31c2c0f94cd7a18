"""``penstock place``: which of the free nodes a job should get, how many, and with what plan."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documents import STANDARD, print_json, read_document, refuse_unwritable, write_document
from penstock.cli.kernels import tell_of_the_compiler
from penstock.cli.plan import planning
from penstock.cli.plan.asking import request_of
from penstock.cli.service.remote import Server, connect

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.placement import Placement, PlacementAnswer, PlacementProgress, PlacementRequest
    from penstock.schemas.topology import ClusterTopology

INFEASIBLE, NONE_FOUND = 3, 4

SAYING_WHERE = ("free", "busy", "nodes_from", "objective", "time_limit")
BESIDE_REQUEST = {"request", *SAYING_WHERE, "output", "explain", "hostlist", "as_json", "server"}
"""Options that go with ``--request``; what the others say stands in its jobs."""

Free = Annotated[
    list[str] | None,
    typer.Option(help="Free nodes: a hostlist (gpu[001-128]) or a device (gpu001/3); repeatable. Else all are free."),
]
Busy = Annotated[list[str] | None, typer.Option(help="What is not free, instead of --free.")]
NodesFrom = Annotated[
    str | None,
    typer.Option(
        "--nodes-from",
        help="What is free, as `scontrol show nodes` or `kubectl get nodes -o json` print it; - is standard input.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("place")(place)


def place(
    context: typer.Context,
    profile: planning.Profile = None,
    topology: planning.Topology = None,
    global_batch_size: planning.Batch = None,
    model: planning.Model = None,
    cluster: planning.Cluster = None,
    request: Annotated[
        str | None, typer.Option(help="A placement request, for several jobs; no other options but these below.")
    ] = None,
    free: Free = None,
    busy: Busy = None,
    nodes_from: NodesFrom = None,
    nodes: Annotated[str | None, typer.Option(help="How many nodes: 16, 4-16, or 4- for 4 and more.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="throughput, throughput_per_device or fastest_within_budget.")
    ] = None,
    max_devices: Annotated[int | None, typer.Option(help="Budget: devices.")] = None,
    max_price: Annotated[float | None, typer.Option(help="Budget: per hour, where devices have prices.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Budget: seconds that a global batch may take.")] = None,
    planner: Annotated[str | None, typer.Option(help="Who plans the sets that can win.")] = None,
    schedule: Annotated[str | None, typer.Option(help="The schedule of the plans.")] = None,
    update_rule: planning.Rules = None,
    micro_batch_size: planning.MicroBatch = None,
    recompute: planning.Recompute = None,
    codec: planning.Codec = None,
    network: planning.Network = None,
    optimizer: planning.Optimizer = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds for all of it; without them large sets get regular layouts only.")
    ] = None,
    gap: planning.Gap = None,
    max_plans: planning.MaxPlans = None,
    seed: planning.Seed = None,
    set_option: planning.Settings = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Write the plan of a single job here.")] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Why, and what each further node would bring.")] = False,
    hostlist: Annotated[bool, typer.Option("--hostlist", help="Print only the nodes, a hostlist per job.")] = False,
    as_json: planning.AsJson = False,
    server: Server = None,
) -> None:
    """Choose free nodes for a job, and how many, with the plan for them. 3: there is no set of nodes that it fits."""
    refuse_unwritable(output)
    asked = _request(context.params)
    if output is not None and len(asked.jobs) > 1:
        raise typer.BadParameter(f"-o takes one plan, and the request has {len(asked.jobs)} jobs; use --json")
    from penstock.cli.show import Screen

    screen = Screen.of(quiet=as_json or hostlist or output == STANDARD)
    try:
        found = _placed(asked, server, screen)
    finally:
        screen.done()
    first = found.choices[0]
    if output is not None and first.plan_file is not None:
        write_document(first.plan_file, output)
    if as_json:
        print_json(found)
    elif hostlist:
        for choice in found.choices:
            print(choice.hostlist)
    show_placements(screen, found, explain=explain)
    without = [choice.status for choice in found.choices if choice.status != "placed"]
    if without:
        if as_json or hostlist:
            _complain(found)
        raise typer.Exit(INFEASIBLE if "infeasible" in without else NONE_FOUND)


def _placed(asked: PlacementRequest, server: str | None, screen: Screen) -> PlacementAnswer:
    from penstock.report.words import duration

    def tell(progress: PlacementProgress) -> None:
        done = f"{progress.job}: {progress.settled} of {progress.considered} classes of sets"
        time_ns, nodes = progress.time_per_global_batch_ns, progress.nodes
        best = "" if time_ns is None else f"; {duration(time_ns)} on {nodes} node{'s' if nodes != 1 else ''}"
        screen.progress(done + best)

    if server is not None:
        screen.progress(f"{server} places {len(asked.jobs)} job{'s' if len(asked.jobs) > 1 else ''}")
        with connect(server) as client:
            return client.placements.create(asked, on_progress=tell)
    planning.one_thread()
    tell_of_the_compiler()
    from penstock.placing import answer

    return answer(asked, tell)


def _request(options: Mapping[str, Any]) -> PlacementRequest:
    from penstock.schemas.api.placement import PlacementRequest

    if options["request"] is not None:
        given = [name for name, value in options.items() if name not in BESIDE_REQUEST and value not in (None, [], ())]
        if given:
            names = ", ".join("--" + name.replace("_", "-") for name in given)
            raise typer.BadParameter(f"--request holds topology and jobs; leave {names} out")
        asked = read_document(PlacementRequest, options["request"])
        if isinstance(asked.topology, str) and (options["nodes_from"] is not None):
            raise typer.BadParameter("--nodes-from needs the topology itself, not its hash")
        return _changed(asked, options)
    missing = {"request": None, "pin": None, "pipeline_profile": None, "time_limit": None}
    plain = request_of({**options, **missing})
    from penstock.schemas.request import Training

    job = {name: getattr(plain, name) for name in Training.model_fields}
    job |= {"name": "job", "profile": plain.profile, "nodes": _range(options["nodes"])}
    budget = {
        "devices": options["max_devices"],
        "price_per_hour": options["max_price"],
        "time_per_global_batch_ns": _ns(options["deadline"], "--deadline"),
    }
    if any(value is not None for value in budget.values()):
        job["budget"] = budget
    asked = PlacementRequest.parse(
        {"topology": plain.topology, "jobs": [job], "objective": options["objective"] or "throughput"}
    )
    return _changed(asked, options)


def _changed(asked: PlacementRequest, options: Mapping[str, Any]) -> PlacementRequest:
    """With what the options say of the nodes, and of the time there is."""
    from penstock.schemas.api.placement import PlacementRequest

    where = [name for name in ("free", "busy", "nodes_from") if options[name]]
    if len(where) > 1:
        raise typer.BadParameter(f"give one of {', '.join('--' + name.replace('_', '-') for name in where)}")
    fields: dict[str, Any] = {name: getattr(asked, name) for name in PlacementRequest.model_fields}
    if where:
        fields |= {"free": options["free"] or None, "busy": options["busy"] or None}
    if options["nodes_from"] is not None:
        fields["free"] = _free_of(options["nodes_from"], fields["topology"])
    if options["time_limit"] is not None:
        fields["time_limit_ns"] = _ns(options["time_limit"], "--time-limit")
    if options["objective"] is not None:
        fields["objective"] = options["objective"]
    return PlacementRequest.parse(fields)


def _ns(seconds: float | None, option: str) -> int | None:
    if seconds is not None and not 1e-9 <= seconds < 1e6:
        raise typer.BadParameter(f"{seconds} is no time; give seconds, more than 0", param_hint=option)
    return None if seconds is None else round(seconds * 1e9)


def _range(text: str | None) -> dict[str, int]:
    if text is None:
        return {}
    parts = re.fullmatch(r"(\d{1,9})(-(\d{1,9})?)?", text)
    if parts is None:
        raise typer.BadParameter(f"{text!r} is no number of nodes; give 16, 4-16 or 4-", param_hint="--nodes")
    least = int(parts[1])
    if parts[2] is None:
        return {"min": least, "max": least}
    return {"min": least} if parts[3] is None else {"min": least, "max": int(parts[3])}


def _free_of(source: str, topology: ClusterTopology) -> list[str]:
    """The nodes of the topology on which nothing runs, by what a scheduler prints."""
    import sys
    from pathlib import Path

    from penstock.importers.topology import decoded, text_of
    from penstock.placing.free_nodes import free_nodes

    text = decoded(sys.stdin.buffer.read()) if source == STANDARD else text_of(Path(source))
    return free_nodes(text, "standard input" if source == STANDARD else source, topology)


def _complain(found: PlacementAnswer) -> None:
    import sys

    for choice in found.choices:
        if choice.status != "placed":
            print(f"penstock: {choice.job}: {'; '.join(choice.why)}", file=sys.stderr)


def show_placements(screen: Screen, found: PlacementAnswer, *, explain: bool) -> None:
    """What each job gets; with ``explain`` why, and what other numbers of nodes would give."""
    screen.say(f"{found.free_nodes} nodes with {found.free_devices} devices of {found.topology} are free")
    for choice in found.choices:
        if choice.status == "placed":
            screen.say(f"{choice.job}: {choice.hostlist}")
        else:
            screen.say(f"{choice.job}: nowhere")
        for sentence in choice.why if explain or choice.status != "placed" else choice.why[:1]:
            screen.say(f"  {sentence}")
        if explain and choice.rows:
            _show_rows(screen, choice)
    if len(found.choices) > 1:
        screen.say(found.method)


def _show_rows(screen: Screen, choice: Placement) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from penstock.report.words import duration

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

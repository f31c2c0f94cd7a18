"""``penstock import layout``: what Megatron, torchtitan or DeepSpeed runs today, judged, and the best beside it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documents import STANDARD, print_json, refuse_unwritable, write_document
from penstock.cli.plan.asking import request_of
from penstock.cli.plan.planning import (
    AsJson,
    Batch,
    Cluster,
    Gap,
    MaxPlans,
    Model,
    Network,
    Optimizer,
    Profile,
    Recompute,
    Request,
    Settings,
    TimeLimit,
    Topology,
    Workers,
    one_thread,
)
from penstock.cli.service.remote import Server, connect, refuse_here

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.layouts import LayoutImported, LayoutRequest, Rival


def register(importing: typer.Typer) -> None:
    """Add this module's command."""
    importing.command("layout")(import_layout)


def import_layout(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="Flags, settings or layout; - is standard input.")],
    format: Annotated[str, typer.Option("--from", help="megatron, torchtitan, deepspeed or ranges.")],
    profile: Profile = None,
    topology: Topology = None,
    global_batch_size: Batch = None,
    model: Model = None,
    cluster: Cluster = None,
    request: Request = None,
    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a micro-batch on each replica, where FILE does not say.")
    ] = None,
    pipeline_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Pipeline ranks, where FILE does not say; else one for each stage.")
    ] = None,
    nodes: Annotated[
        str, typer.Option(help="Hostlist of the nodes that the job runs on, as its ranks count them; else all.")
    ] = "",
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="The first so many devices of each node; else all.")
    ] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare/--alone", help="Also find the best plan within the trainer's limits, and without."),
    ] = True,
    recompute: Recompute = None,
    network: Network = None,
    optimizer: Optimizer = None,
    time_limit: TimeLimit = None,
    gap: Gap = None,
    max_plans: MaxPlans = None,
    set_option: Settings = None,
    workers: Workers = None,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Where the layout's plan goes.")] = None,
    best: Annotated[
        str | None, typer.Option(help="Where the best plan within the trainer's limits goes, for export.")
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Judge what another trainer runs: how good it is, what would be best in the same trainer, and what without limits.

    FILE: Megatron's flags or its layout string; torchtitan's TOML; DeepSpeed's parts; or plain ranges of layers.
    """
    for target in (output, best):
        refuse_unwritable(target)
    if as_json and STANDARD in (output, best):
        raise typer.BadParameter("standard output can hold one of them; write the plan to a file", param_hint="-o")
    if best is not None and not compare:
        raise typer.BadParameter("--alone finds no best plan", param_hint="--best")
    asked = _request(context.params, file)
    from penstock.cli.show import Screen

    screen = Screen.of(quiet=as_json or STANDARD in (output, best))
    if server is None:
        one_thread()
        from penstock.layouts.importing import import_layout as imported

        found = imported(asked, workers=workers, on_progress=screen.progress)
        screen.done()
    else:
        refuse_here(workers=workers)
        with connect(server) as client:
            found = client.layouts.import_(asked)
    _write(found, output, best)
    if as_json:
        print_json(found.model_dump(mode="json", exclude={"request"}, exclude_none=True))
    show_layout(screen, found)
    for target in filter(None, (output, best)):
        screen.say(f"written to {target}")


def _request(options: dict[str, Any], file: str) -> LayoutRequest:
    """The question; the layout's own batch is asked for where no option gives one."""
    from penstock.layouts.importing import batch_said
    from penstock.schemas.api.layouts import LayoutRequest
    from penstock.schemas.document import unreadable
    from penstock.schemas.errors import InvalidDocument

    try:
        text = sys.stdin.read() if file == STANDARD else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDocument(f"cannot read {file!r}: {unreadable(error)}") from None
    if not text.strip():
        raise InvalidDocument(
            f"{file!r} is empty", remedy="Megatron's script, torchtitan's settings, DeepSpeed's parts, …"
        )
    own = options["global_batch_size"]
    if own is None and options["request"] is None:
        own = batch_said(options["format"], text)
    absent = dict.fromkeys(("planner", "schedule", "codec", "update_rule", "pin", "pipeline_profile", "seed", "target"))
    given = {**absent, **options, "micro_batch_size": None, "global_batch_size": own}
    return LayoutRequest.parse(
        {
            "schema_version": 1,
            "format": options["format"],
            "layout": text,
            "source": "standard input" if file == STANDARD else Path(file).name,
            "request": request_of(given),
            "micro_batch_size": options["micro_batch_size"],
            "pipeline_parallel_size": options["pipeline_parallel_size"],
            "nodes": options["nodes"],
            "devices_per_node": options["devices_per_node"],
            "compare": options["compare"],
        }
    )


def _write(found: LayoutImported, output: str | None, best: str | None) -> None:
    from penstock.schemas.errors import UnsupportedRequest
    from penstock.schemas.plan import PlanFile

    write_document(PlanFile(plan=found.plan, request=found.request), output) if output is not None else None
    if best is not None:
        plan = found.rivals[0].plan
        if plan is None:
            raise UnsupportedRequest(f"there is no plan {found.rivals[0].choice}: {found.rivals[0].why}")
        write_document(PlanFile(plan=plan, request=found.request), best)


def show_layout(screen: Screen, found: LayoutImported) -> None:
    """What it takes, what is assumed, and each rival with what makes the difference."""
    from penstock.report.words import duration, percent

    for sentence in (*found.sentences, *(found.faults[:3] if found.fits else ())):
        screen.say(sentence)
    for assumption in found.assumptions:
        screen.say(f"assumed: {assumption}")
    for rival in found.rivals:
        screen.say()
        if rival.time_ns is None or rival.saved is None or rival.comparison is None:
            screen.say(f"{rival.choice}: {rival.why}")
            continue
        proven = "" if rival.bound_ns is None else f"; none takes less than {duration(rival.bound_ns)}"
        pace = f"{percent(abs(rival.saved))} {'less' if rival.saved >= 0 else 'more'}"
        screen.say(f"best {rival.choice}: {duration(rival.time_ns)}, {pace}{proven}")
        screen.say(f"  {rival.comparison.ours.stages}")
        for sentence in _on_its_class(rival):
            screen.say(f"  {sentence}")
        screen.say(f"  the layout beside it: {rival.comparison.sentence}")


def _on_its_class(rival: Rival) -> list[str]:
    """What is proven of plans such as the rival's."""
    from penstock.report.bounds import bound_sentence
    from penstock.schemas.coverage import CLASS_SCOPE

    certificates = () if rival.plan is None else rival.plan.certificates
    return [bound_sentence(c, rival.time_ns) for c in certificates if c.scope == CLASS_SCOPE and rival.time_ns]

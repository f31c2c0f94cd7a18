"""``penstock sweep``: one request over many topologies, batch sizes, planners; a table with its Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import completion
from penstock.cli.groups import grouped
from penstock.cli.input_files import print_json, read_document
from penstock.cli.kernels import announce_compilation, one_thread
from penstock.cli.options import (
    MODEL,
    SEARCH,
    AsJson,
    Degrees,
    Limits,
    Model,
    Planners,
    Request,
    Schedules,
    Seed,
    Training,
    option_values,
    shown,
)
from penstock.cli.panels import PLAN
from penstock.cli.plan.request_options import profile_of_options, request_of
from penstock.cli.service.remote import Server, connect, refuse_here
from penstock.schemas.options.planning import PLAN_OPTIONS

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.sweep import SweepRequest, SweepRow
    from penstock.schemas.profile import ModelProfile
    from penstock.schemas.request import PlanRequest
    from penstock.schemas.topology import ClusterTopology


@dataclass(frozen=True, kw_only=True)
class Models(Model):
    """One model, which may be costed at several sequence lengths."""

    sequence_length: Annotated[
        list[int] | None, shown(replace(PLAN_OPTIONS["sequence_length"], is_repeatable=True), min=1)
    ] = None  # type: ignore[assignment]


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("sweep", rich_help_panel=PLAN)(grouped(sweep))


def sweep(
    *,
    model: Models,
    topology: Annotated[
        list[str] | None,
        typer.Option("--topology", "-t", help="Topology file (JSON or YAML). Repeatable.", rich_help_panel=MODEL),
    ] = None,
    cluster: Annotated[
        list[str] | None,
        typer.Option(
            help="Cluster by name instead of --topology: a shipped one or NODESxDEVICESxKIND (2x8xH100). Repeatable.",
            autocompletion=completion.clusters,
            rich_help_panel=MODEL,
        ),
    ] = None,
    global_batch_size: Annotated[
        list[int] | None, shown(replace(PLAN_OPTIONS["global_batch_size"], is_repeatable=True), "-b")
    ] = None,
    request: Request = None,
    planner: Planners = None,
    schedule: Schedules = None,
    training: Training,
    degrees: Degrees,
    limits: Limits,
    seed: Seed = None,
    executor: Annotated[
        str | None,
        typer.Option(
            metavar="WHERE",
            help="Where to solve: local:4, or a Dask scheduler, dask://host:port (default: local, all processors).",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Plan for every combination of the repeated options, and mark the answers on the Pareto front.

    --topology, --cluster, --global-batch-size, --sequence-length, --planner,
    --schedule and --update-rule may be repeated; each update rule is a separate
    case. Where degrees of parallelism are a choice, and neither a planner nor a
    limit is given, planner even searches, which is quick.

    Example: penstock sweep --example gpt2-small --cluster 1x8xV100 --cluster 2x8xV100 -b 64 -b 128
    """
    options = option_values(
        model, training, degrees, limits, topology=topology, cluster=cluster, global_batch_size=global_batch_size
    )
    sweep_request = _sweep_of(options, request, planner, schedule, seed)
    from penstock.cli.show import Screen

    screen = Screen.of(quiet=as_json)
    if server is not None:
        refuse_here(executor=executor)
        rows = _rows_there(server, sweep_request, screen)
    else:
        rows = _rows_here(sweep_request, screen, executor or "local")
    screen.done()
    if as_json:
        print_json({"rows": [row.model_dump(mode="json", exclude_none=True) for row in rows]})
    show_rows(screen, rows)


def _sweep_of(
    options: Mapping[str, Any],
    request_file: str | None,
    planners: Sequence[str] | None,
    schedules: Sequence[str] | None,
    seed: int | None,
) -> SweepRequest:
    """Build the request from the first value of each axis; an axis with several values is swept over."""
    from penstock.examples import catalogue
    from penstock.planning.inputs import with_choices
    from penstock.schemas.api.sweep import SweepRequest
    from penstock.schemas.topology import ClusterTopology

    repeated = ("topology", "cluster", "global_batch_size", "sequence_length")
    first = {name: (options[name] or [None])[0] for name in repeated}
    if options["topology"] and options["cluster"]:
        first["cluster"] = None
    named = {"planner": planners[0] if planners else None, "request": request_file, "seed": seed}
    request = with_choices(request_of({**options, **first, **named}), many=True)
    topologies: list[ClusterTopology] = [read_document(ClusterTopology, each) for each in options["topology"] or ()]
    topologies += [catalogue.cluster(each) for each in options["cluster"] or ()]
    over = {
        "topologies": topologies if len(topologies) > 1 else (),
        "global_batch_sizes": options["global_batch_size"] or (),
        "planners": planners or (),
        "schedules": schedules or (),
        "update_rules": request.update_rules if options["update_rule"] else (),
        "profiles": _profiles(options, request),
    }
    return SweepRequest.parse({"request": request, "over": over})


def _profiles(options: Mapping[str, Any], request: PlanRequest) -> list[ModelProfile] | None:
    """Return the model at each of several sequence lengths, the request's first; None for a single length."""
    from penstock.schemas.profile import ModelProfile

    lengths = options["sequence_length"] or ()
    if len(lengths) < 2:
        return None
    assert isinstance(request.profile, ModelProfile)
    others = [profile_of_options({**options, "sequence_length": length}) for length in lengths[1:]]
    return [request.profile, *filter(None, others)]


def _rows_here(request: SweepRequest, screen: Screen, where: str) -> Sequence[SweepRow]:
    one_thread()
    announce_compilation()
    from penstock.questions.sweep import sweep_rows as swept
    from penstock.workers.executors import executor_of

    ended = 0

    def show(row: SweepRow) -> None:
        nonlocal ended
        ended += 1
        screen.progress(f"{ended} cases: {row.planner} on {row.topology}: {row.status or row.state}")

    with executor_of(where) as executor:
        return swept(request, executor=executor, on_row=show)


def _rows_there(server: str, request: SweepRequest, screen: Screen) -> Sequence[SweepRow]:
    with connect(server) as client:
        answer = client.sweeps.create(
            request, on_change=lambda now: screen.progress(f"{now.ended} of {now.cases} cases")
        )
    return answer.rows


def show_rows(screen: Screen, rows: Sequence[SweepRow]) -> None:
    """Show a row per case, and mark the cases on the Pareto front."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from penstock.schemas.amounts import amount, duration, percent
    from penstock.schemas.api.words import choice_words

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    several = bool({rule for row in rows for rule in row.update_rules} - {"synchronous"})
    priced = any(row.cost_per_sample is not None for row in rows)
    divided = any(row.degrees is not None for row in rows)
    lengths = len({row.sequence_length for row in rows}) > 1
    middle = [*(["tokens"] if lengths else []), "planner", "plan", *(["degrees"] if divided else []), "status"]
    for head in ("", "topology", "batch", *middle):
        table.add_column(head, overflow="fold", no_wrap=head not in ("topology", "planner", "plan", "degrees"))
    for head in ("time", "samples/s", "memory", "devices", *(["cost"] if priced else []), "gap"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        figures = (
            (row.time_per_global_batch_ns, duration),
            (row.samples_per_s, "{:,.1f}".format),
            (row.peak_memory_bytes, amount),
            (row.devices, str),
            *([(row.cost_per_sample, "{:.3g}".format)] if priced else []),
            (row.gap, percent),
        )
        table.add_row(
            "*" if row.pareto else "",
            row.topology,
            str(row.global_batch_size),
            *([str(row.sequence_length or "–")] if lengths else []),
            _requested_method(row, with_rule=several),
            _plan_method(row, with_rule=several),
            *([choice_words(row)] if divided else []),
            row.status or row.state,
            *("–" if value is None else shown(value) for value, shown in figures),  # type: ignore[operator]
        )
    screen.table(table)
    for row in rows:
        if row.time_per_global_batch_ns is None and row.why:
            screen.say(f"{row.planner} on {row.topology}, batch {row.global_batch_size}: {row.why}")
    screen.say("* no other is at least as good in throughput, memory, devices and cost, and 1 % better in one")


def _requested_method(row: SweepRow, *, with_rule: bool) -> str:
    """Return the planner, and the schedule where the case names one: ``auto``, ``dapple with pe``."""
    words = row.planner if row.schedule == "auto" else f"{row.planner} with {row.schedule}"
    return f"{words}, {' or '.join(row.update_rules).replace('_', ' ')}" if with_rule else words


def _plan_method(row: SweepRow, *, with_rule: bool) -> str:
    """Return planner and schedule of the plan; the schedule alone where the request names that planner."""
    method = row.method
    if method is None:
        return "–"
    by_name = method.planner in (method.schedule, row.planner)
    words = method.schedule if by_name else f"{method.planner} with {method.schedule}"
    return f"{words}, {method.update_rule.replace('_', ' ')}" if with_rule else words

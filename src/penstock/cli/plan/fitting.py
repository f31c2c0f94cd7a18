"""``penstock fits``: which layouts of a transformer are legal on a cluster, and which fit into its memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from penstock.cli import completion
from penstock.cli.groups import grouped
from penstock.cli.input_files import print_json, read_document
from penstock.cli.options import (
    DEGREES,
    MODEL,
    TRAINING,
    AsJson,
    CapacityFactor,
    Cluster,
    ContextKind,
    HuggingFace,
    RoutingImbalance,
    SequenceLength,
    Topology,
    option_values,
    shown,
)
from penstock.cli.panels import PLAN
from penstock.cli.questions import ask
from penstock.cli.service.remote import Server
from penstock.schemas.api.words import FITS_DEGREES
from penstock.schemas.options.fits import FITS_OPTIONS

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.fits import FitsAnswer, FitsRequest, FitsRow

NOTHING_FITS = 3
ALL = "all"
_PARTS = {
    "weights": "parameters_bytes",
    "grads": "gradients_bytes",
    "states": "optimizer_bytes",
    "gathered": "gathered_bytes",
    "activations": "activations_bytes",
    "logits": "logits_bytes",
    "dummies": "dummy_gradients_bytes",
}
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """The model's shape and the cluster."""

    PANEL: ClassVar[str] = MODEL

    example: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Shape of a known model, such as llama-3-70b or gpt-3-175b.",
            autocompletion=completion.shapes,
        ),
    ] = None
    hf: HuggingFace = None
    topology: Topology = None
    cluster: Cluster = None
    sequence_length: SequenceLength = None


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Degrees of parallelism: a value, several, or all; every option may be repeated."""

    PANEL: ClassVar[str] = DEGREES

    tensor: Annotated[list[str] | None, shown(FITS_OPTIONS["tensor"])] = None
    context: Annotated[list[str] | None, shown(FITS_OPTIONS["context"])] = None
    context_kind: ContextKind = None
    routing_imbalance: RoutingImbalance = None
    capacity_factor: CapacityFactor = None
    expert: Annotated[list[str] | None, shown(FITS_OPTIONS["expert"])] = None
    expert_tensor: Annotated[int | None, shown(FITS_OPTIONS["expert_tensor"])] = None
    pipeline: Annotated[list[str] | None, shown(FITS_OPTIONS["pipeline"])] = None
    virtual_stages: Annotated[list[str] | None, shown(FITS_OPTIONS["virtual_stages"])] = None
    sharding: Annotated[list[str] | None, shown(FITS_OPTIONS["sharding"])] = None


@dataclass(frozen=True, kw_only=True)
class Work:
    """Options for the training: batches, recomputation, framework."""

    PANEL: ClassVar[str] = TRAINING

    global_batch_size: Annotated[int | None, shown(FITS_OPTIONS["global_batch_size"], "-b")] = None
    micro_batch_size: Annotated[list[str] | None, shown(FITS_OPTIONS["micro_batch_size"])] = None
    recompute: Annotated[list[str] | None, shown(FITS_OPTIONS["recompute"])] = None
    sequence_parallel: Annotated[bool | None, shown(FITS_OPTIONS["sequence_parallel"])] = None
    framework: Annotated[str | None, shown(FITS_OPTIONS["framework"])] = None


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("fits", rich_help_panel=PLAN)(grouped(fits))


def fits(
    *,
    transformer: Transformer,
    degrees: Degrees,
    work: Work,
    rows: Annotated[int | None, shown(FITS_OPTIONS["rows"])] = None,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Show which degrees of parallelism are legal for a transformer on a cluster, and which fit into its memory.

    Closed forms, no search. Exits with 3 when nothing fits, 65 when a degree
    that was asked for is illegal.

    Example: penstock fits --example llama-3-70b --cluster 8x8xH100 --tensor 8
    """
    request = _request(option_values(transformer, degrees, work, rows=rows))
    answer: FitsAnswer = ask("fits", request, server)
    from penstock.cli.show import Screen

    if as_json:
        print_json(answer)
    show_fits(Screen.of(quiet=as_json), request, answer)
    if not answer.fitting:
        raise typer.Exit(NOTHING_FITS)


def _request(options: Mapping[str, Any]) -> FitsRequest:
    """Build the request from options.

    Raises typer.BadParameter for missing options and texts that are no numbers, InvalidDocument for invalid values.
    """
    for one, other in (("example", "hf"), ("cluster", "topology")):
        if options[one] is None and options[other] is None:
            raise typer.BadParameter(f"missing --{one} or --{other}")
        if options[one] is not None and options[other] is not None:
            raise typer.BadParameter(f"give either --{one} or --{other}, not both")
    from penstock.examples import catalogue
    from penstock.planning.inputs import read_config
    from penstock.schemas.api.fits import FitsRequest
    from penstock.schemas.topology import ClusterTopology

    fields: dict[str, Any] = {}
    if options["topology"] is None:
        fields["topology"] = catalogue.cluster(options["cluster"])
    else:
        fields["topology"] = read_document(ClusterTopology, options["topology"])
    if options["hf"] is None:
        fields["shape"] = catalogue.shape(options["example"])
    else:
        fields["hugging_face"] = read_config(Path(options["hf"]))
    fields |= {name: _value(name, value) for name in FITS_OPTIONS if (value := options[name]) not in (None, [])}
    return FitsRequest.parse(fields)


def _value(name: str, value: Any) -> Any:
    """Return the field that an option gives; an option given several times counts as one list."""
    from penstock.shapes.profiled_degrees import context_kind_of

    if name == "context_kind":
        return context_kind_of(value)
    if not FITS_OPTIONS[name].is_repeatable:
        return value
    text = ",".join(value)
    if text == ALL or (name == "recompute" and text in ("none", "full")):
        return text
    parts = [part.strip() for part in text.split(",")]
    if FITS_OPTIONS[name].kind == "choice":
        return parts
    try:
        return [int(part) for part in parts]
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a number, a list of numbers such as 2,4,8, or all", param_hint=FITS_OPTIONS[name].flag
        ) from None


def show_fits(screen: Screen, request: FitsRequest, answer: FitsAnswer) -> None:
    """Show a row per layout with the memory of its fullest GPU by part, then what is illegal and what was assumed."""
    from penstock.schemas.amounts import amount

    screen.say(
        f"{answer.model}: {answer.parameters / 1e9:,.2f} billion parameters on {answer.gpus} GPUs with "
        f"{amount(answer.available_bytes)} each, {request.framework}, recomputing {_recomputed(request)}"
        f"{_sharded(request, answer)}; "
        "GiB of the fullest GPU by part"
    )
    screen.table(_table(answer.rows))
    listed = f", the first {len(answer.rows)} are listed" if answer.legal > len(answer.rows) else ""
    screen.say(f"{answer.fitting} of {answer.legal} legal layouts fit{listed}; {answer.tried} tried")
    for one in answer.refused:
        screen.say(f"illegal ({one.layouts}): {one.sentence}")
    screen.say(f"assumed: {'; '.join(answer.assumptions)}")
    if not answer.fitting:
        screen.say(f"nothing fits: {_advice(request)}")


def _recomputed(request: FitsRequest) -> str:
    return {"none": "nothing", "full": "whole layers"}.get(str(request.recompute), " and ".join(request.recompute))


def _sharded(request: FitsRequest, answer: FitsAnswer) -> str:
    """Return the sharding of all rows, where several were requested and the table needs no column for them."""
    several = request.sharding == ALL or len(request.sharding) > 1
    common = {row.sharding for row in answer.rows}
    return f", sharding {common.pop()}" if several and len(common) == 1 else ""


def _advice(request: FitsRequest) -> str:
    """Return the options that may help and were not used."""
    ways = [
        *(["--recompute full"] if request.recompute != "full" else []),
        *(["--sharding all"] if request.sharding != ALL else []),
        *(["--context all"] if request.context != ALL else []),
        *(["--pipeline all"] if request.pipeline != ALL else []),
        *(["--tensor all"] if request.tensor != ALL else []),
    ]
    return f"try {', '.join(ways)}, or more GPUs" if ways else "more GPUs, or shorter sequences"


def _table(rows: tuple[FitsRow, ...]) -> Any:
    """Return the table, without columns for degrees that are always 1 and parts of memory that are always 0."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    degrees = {
        head: name for head, name in FITS_DEGREES.items() if head == "TP" or any(getattr(row, name) > 1 for row in rows)
    }
    parts = {head: name for head, name in _PARTS.items() if any(getattr(row.memory, name) for row in rows)}
    shardings = len({row.sharding for row in rows}) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for head in ("", *(["sharding"] if shardings else [])):
        table.add_column(head, no_wrap=True)
    staged = ["stage"] if "PP" in degrees else []
    for head in (*degrees, *staged, *parts, "GiB", "left"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        sizes = [*(getattr(row.memory, name) for name in parts.values()), row.memory.total_bytes, row.headroom_bytes]
        table.add_row(
            "fits" if row.fits else "over",
            *([row.sharding] if shardings else []),
            *(str(getattr(row, name)) for name in degrees.values()),
            *([str(row.fullest_stage)] if staged else []),
            *(_gib(size) for size in sizes),
        )
    return table


def _gib(size: int) -> str:
    """Format a size in GiB, with one decimal below 100 GiB."""
    number = size / _GIB
    return f"{number:,.1f}" if abs(number) < 100 else f"{number:,.0f}"

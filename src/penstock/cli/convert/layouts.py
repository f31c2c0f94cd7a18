"""``penstock import layout``: what Megatron, torchtitan or DeepSpeed runs today, compared with the best plan."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import typer

from penstock.cli.assignments import assignment
from penstock.cli.groups import grouped
from penstock.cli.input_files import STANDARD, prepare_output, print_json, write_document
from penstock.cli.options import (
    OUTPUT,
    AsJson,
    Costs,
    Limits,
    Question,
    Request,
    Settings,
    Workers,
    option_values,
)
from penstock.cli.plan.request_options import layout_job_of
from penstock.cli.questions import ask
from penstock.cli.service.remote import Server
from penstock.schemas.errors import InvalidDocument, InvalidPlan

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.api.layouts import LayoutImported, LayoutRequest, Rival
    from penstock.schemas.plan import Plan
    from penstock.schemas.request import PlanRequest


LAYOUT = "Layout"
DOES_NOT_FIT, NOT_KNOWN = 3, 4
NOT_JUDGED = InvalidDocument.exit_code
"""The exit code of a layout that is read but cannot be simulated; a layout that cannot be read exits with it, too."""


@dataclass(frozen=True, kw_only=True)
class Missing:
    """Options for values that the layout itself may leave open."""

    PANEL: ClassVar[str] = LAYOUT

    micro_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a micro-batch on each replica, where FILE does not say.")
    ] = None
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(min=1, help="Pipeline ranks, where FILE does not say (default: one for each stage)."),
    ] = None
    nodes: Annotated[
        str | None,
        typer.Option(
            metavar="NODES",
            help="Nodes of the job in the order of its ranks, such as gpu[001-004] (default: all).",
        ),
    ] = None
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Number of devices that the job uses on each node (default: all).")
    ] = None
    layout_values: Annotated[
        list[str] | None,
        typer.Option(
            "--given",
            metavar="NAME=VALUE",
            help="Value that FILE leaves open, by variable or flag: PP=8, vocab-size=128256. Repeatable.",
        ),
    ] = None
    config: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which configuration of FILE is meant, where it has several."),
    ] = None


def register(importing: typer.Typer) -> None:
    """Add this module's command."""
    importing.command("layout")(grouped(import_layout))


def import_layout(
    *,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="Script, configuration, layout string, log or ranges of layers; - is standard input.",
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="megatron|torchtitan|deepspeed|ranges",
            help="Trainer that FILE is for; ranges: plain ranges of layers.",
            rich_help_panel=LAYOUT,
        ),
    ],
    missing: Missing,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--alone",
            help="Also find the best plans within the trainer's limits and without, or judge the layout alone.",
            rich_help_panel=LAYOUT,
        ),
    ] = True,
    question: Question,
    request: Request = None,
    costs: Costs,
    set_option: Settings = None,
    limits: Limits,
    workers: Workers = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="File that the layout is written to as a plan.", rich_help_panel=OUTPUT),
    ] = None,
    best: Annotated[
        str | None,
        typer.Option(
            help="File that the best plan within the trainer's limits is written to, for export.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Judge the layout that another trainer runs today, and show how much faster the best plan is.

    --example, --hf or --profile gives the model; without these it is the
    transformer that Megatron's flags in FILE describe.
    Exits with 3 for a layout that does not fit into memory, and with 65 for one
    that Penstock cannot judge.

    Example:
    penstock import layout train.sh --from megatron --cluster 4x8xH100
    """
    for target in (output, best):
        prepare_output(target)
    if as_json and STANDARD in (output, best):
        raise typer.BadParameter(
            "standard output cannot hold both JSON and a plan; write the plan to a file", param_hint="-o"
        )
    if best is not None and not compare:
        raise typer.BadParameter("--alone finds no best plan", param_hint="--best")
    options = option_values(question, costs, limits, missing, request=request, set_option=set_option)
    layout_request = _request(options, file, format, compare=compare)
    from penstock.cli.show import Screen

    screen = Screen.of(quiet=as_json or STANDARD in (output, best))
    try:
        answer: LayoutImported = ask("import-layout", layout_request, server, screen.progress, workers=workers)
        screen.done()
    except InvalidPlan as error:
        screen.done()
        print(f"penstock: {error}", file=sys.stderr)
        raise typer.Exit(NOT_JUDGED) from None
    _write(answer, output, best)
    if as_json:
        print_json(
            answer.model_dump(
                mode="json", exclude={"request": True, "rivals": {"__all__": {"request"}}}, exclude_none=True
            )
        )
    show_layout(screen, answer)
    show_changes(screen, answer, layout_request)
    from penstock.cli.plan.request_options import other_kernels_of

    if (line := other_kernels_of(answer.request) or _own_kernels(options, answer.request)) is not None:
        screen.say(line)
    for target in filter(None, (output, best)):
        screen.say(f"written to {target}")
    if not answer.fits:
        raise typer.Exit(NOT_KNOWN if answer.fits is None else DOES_NOT_FIT)


def _request(options: Mapping[str, Any], file: str, format: str, *, compare: bool) -> LayoutRequest:
    """Return the request; where no option gives the model and the batch, the layout does."""
    from penstock.schemas.api.layouts import LayoutFormat, LayoutRequest
    from penstock.schemas.document import read_text

    if format not in (known_formats := get_args(LayoutFormat)):
        raise typer.BadParameter(f"{format!r} is none of {', '.join(known_formats)}", param_hint="--from")
    text = sys.stdin.read() if file == STANDARD else read_text(file)
    same = ("micro_batch_size", "pipeline_parallel_size", "nodes", "devices_per_node", "config")
    fields = {name: options[name] for name in same if options[name] is not None}
    return LayoutRequest.parse(
        {
            "schema_version": 1,
            "format": format,
            "layout": text,
            "source": "standard input" if file == STANDARD else Path(file).name,
            "request": layout_job_of({**options, "micro_batch_size": None}),
            "values": dict(
                assignment(text, "--given", "NAME=VALUE, such as PP=8", may_be_empty=True)
                for text in options["layout_values"] or ()
            ),
            "compare": compare,
            **fields,
        }
    )


def _own_kernels(options: Mapping[str, Any], request: PlanRequest) -> str | None:
    """Return a line that names the kernels behind a transformer's costs where no option names them; otherwise None."""
    from penstock.schemas.profile import ModelProfile

    named = options["example"] or options["hf"]
    profile = request.profile
    if named is None or options["framework"] is not None or not isinstance(profile, ModelProfile):
        return None
    if profile.framework != "megatron":
        return None
    return f"the costs of {named} are those of megatron's kernels; --framework torch has those of eager PyTorch"


def _write(answer: LayoutImported, output: str | None, best: str | None) -> None:
    from penstock.schemas.errors import UnsupportedRequest
    from penstock.schemas.plan import PlanFile

    write_document(PlanFile(plan=answer.plan, request=answer.request), output) if output is not None else None
    if best is not None:
        plan = answer.rivals[0].plan
        if plan is None:
            raise UnsupportedRequest(f"there is no plan {answer.rivals[0].choice}: {answer.rivals[0].why}")
        write_document(PlanFile(plan=plan, request=answer.rivals[0].request or answer.request), best)


def show_layout(screen: Screen, answer: LayoutImported) -> None:
    """Show what the layout takes, what is assumed, and each rival with what makes the difference."""
    from penstock.schemas.amounts import duration, percent

    for sentence in (*answer.sentences, *(answer.faults[:3] if answer.fits else ())):
        screen.say(sentence)
    for assumption in answer.assumptions:
        screen.say(f"assumed: {assumption}")
    for rival in answer.rivals:
        screen.say()
        if rival.time_ns is None or rival.saved is None or rival.plan is None:
            screen.say(f"{rival.choice}: {rival.why}")
            continue
        proven = "" if rival.bound_ns is None else f"; none takes less than {duration(rival.bound_ns)}"
        pace = f"{percent(abs(rival.saved))} {'less' if rival.saved >= 0 else 'more'}"
        screen.say(f"best {rival.choice}: {duration(rival.time_ns)}, {pace}{proven}")
        if rival.comparison is not None:
            screen.say(f"  {rival.comparison.ours.stages}")
        else:
            screen.say(f"  {_in_short(rival.plan)}")
        for sentence in _on_its_class(rival):
            screen.say(f"  {sentence}")
        if rival.comparison is not None:
            screen.say(f"  compared with the layout: {rival.comparison.sentence}")


def show_changes(screen: Screen, answer: LayoutImported, request: LayoutRequest) -> None:
    """Show what to change in the user's file for the best plan that the trainer expresses, where it takes less time."""
    from penstock.exporting.layouts import layout_text
    from penstock.layouts.against import SETTINGS, differences
    from penstock.layouts.files.configurations import is_python
    from penstock.schemas.errors import PenstockError
    from penstock.schemas.plan import PlanFile

    best = next(iter(answer.rivals), None)
    form = "megatron-bridge" if request.format == "megatron" and is_python(request.layout) else request.format
    if best is None or best.plan is None or (best.saved or 0) <= 0 or form not in SETTINGS:
        return
    try:
        text = layout_text(PlanFile(plan=best.plan, request=best.request or answer.request), form)
        lines = differences(text, form, request.layout, request.source)
    except PenstockError as error:
        lines = [str(error).partition("\n")[0]]
    screen.say()
    screen.say(f"in {request.source} for the best {best.choice}:")
    for line in lines:
        screen.say(f"  {line}")


def _in_short(plan: Plan) -> str:
    """Summarize degrees, stages and micro-batches of a plan."""
    from penstock.convert.requested_degrees import degrees_of

    stages = plan.pipelines[0].stages
    shared = f", {plan.sharding} sharded" if plan.sharding not in (None, "none") else ""
    return (
        f"{degrees_of(plan.degrees)}{shared}; {len(stages)} stages, M = {plan.num_micro_batches}, {plan.schedule.name}"
    )


def _on_its_class(rival: Rival) -> list[str]:
    """Return the sentences of the bounds that are proven for all plans in the rival's class."""
    from penstock.planning.bound_sentences import bound_sentence
    from penstock.schemas.coverage import CLASS_SCOPE

    certificates = () if rival.plan is None else rival.plan.certificates
    return [bound_sentence(c, rival.time_ns) for c in certificates if c.scope == CLASS_SCOPE and rival.time_ns]

"""``penstock import profile`` and ``penstock profile``: where costs come from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import typer

from penstock.cli import completion
from penstock.cli.degree_options import costed_degrees, degrees_of, numbers_of
from penstock.cli.durations import SECOND_NS, seconds
from penstock.cli.groups import grouped
from penstock.cli.input_files import STANDARD, post_document, prepare_output, read_plan, write_document
from penstock.cli.options import (
    MEASUREMENT,
    MODEL,
    RUN,
    CapacityFactor,
    Context,
    ContextKind,
    Directory,
    Document,
    Expert,
    ExpertTensor,
    Framework,
    HuggingFace,
    MeasureFor,
    RoutingImbalance,
    SequenceLength,
)
from penstock.cli.panels import MEASURE
from penstock.cli.service.remote import Post

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.facts.device_table import Level
    from penstock.schemas.profile import ModelProfile

MAX_DEFAULT_SIZE = 8
TRACED_SIZES = (1, 2, 4, 8)
"""Samples of a micro-batch, of a model that is traced from a config.json."""
OptionalJob = Annotated[
    str | None,
    typer.Option(
        "--job",
        metavar="MODULE:ATTRIBUTE",
        help="Training job to import, such as mytrain:job or examples.gpt:job.",
        rich_help_panel=RUN,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A transformer whose costs are computed from its shape."""

    PANEL: ClassVar[str] = MODEL

    example: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Shape of a known transformer instead of --job, such as llama-3-70b.",
            autocompletion=completion.shapes,
        ),
    ] = None
    hf: HuggingFace = None
    sequence_length: SequenceLength = None
    framework: Framework = None
    context: Context = None
    expert: Expert = None
    expert_tensor: ExpertTensor = None
    context_kind: ContextKind = None
    routing_imbalance: RoutingImbalance = None
    capacity_factor: CapacityFactor = None
    traced: Annotated[
        bool,
        typer.Option(
            "--traced",
            help="Trace the modules that transformers builds for --hf; needs the extra hf.",
        ),
    ] = False

    @property
    def has_options(self) -> bool:
        """Whether any option is set besides ``context`` and ``expert``, which go with jobs, too."""
        values = (value for name, value in vars(self).items() if name not in ("context", "expert"))
        return any(value is not None and value is not False for value in values)


def register(app: typer.Typer, importing: typer.Typer) -> None:
    """Add this module's commands."""
    importing.command("profile")(import_profile)
    app.command("profile", rich_help_panel=MEASURE)(grouped(profile))


def import_profile(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Profile text of PipeDream or DAPPLE; - is standard input.")
    ],
    output: Document = STANDARD,
    name: Annotated[
        str | None, typer.Option(help="Name of the model (default: the file's name).", rich_help_panel=MODEL)
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            "--micro-batch-size",
            help="Samples that the times in the text are for (default: as the file's name has it, such as _pbs64).",
            rich_help_panel=MODEL,
        ),
    ] = None,
    device_kind: Annotated[
        str, typer.Option(help="Kind of device that the times were measured on.", rich_help_panel=MODEL)
    ] = "V100",
) -> None:
    """Convert a profile text of PipeDream or DAPPLE into a profile.

    Example: penstock import profile graph.txt --micro-batch-size 64 -o profile.json
    """
    from penstock.importers.pipedream import read_profile
    from penstock.schemas.document import read_text
    from penstock.schemas.errors import InvalidDocument

    text = sys.stdin.read() if file == STANDARD else read_text(file)
    if text.lstrip().startswith("{"):
        raise InvalidDocument(
            f"{file!r} is JSON, not a profile text of PipeDream or DAPPLE",
            remedy="a profile document needs no import: give it to --profile",
        )
    stem = "profile" if file == STANDARD else Path(file).stem
    size = micro_batch_size if micro_batch_size is not None else _size_in_name(stem)
    result = read_profile(text, name=name or stem, device_kind=device_kind, micro_batch_size=size)
    write_document(result, output)
    if output != STANDARD:
        _summary(_screen(output), result, output)


def profile(
    *,
    job: OptionalJob = None,
    transformer: Transformer,
    directory: Directory = None,
    analytic: Annotated[
        list[str] | None,
        typer.Option(
            "--analytic",
            "--kind",
            metavar="KIND",
            help="Compute costs for this kind of device, such as H100, instead of measuring. Repeatable.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            metavar="runs|kernels",
            help="Level of computed times: whole published runs, or single kernels (default: by framework).",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    micro_batch_size: Annotated[
        list[int] | None,
        typer.Option(
            "--micro-batch-size",
            help="Samples of a micro-batch to measure (default: 1, 2, 4 and 8). Repeatable.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="cpu|cuda",
            help="Device that the model is measured on (default: cuda where there is a GPU).",
            rich_help_panel=RUN,
        ),
    ] = None,
    device_kind: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="Name of this device's kind in the profile, such as A100 (default: what the driver calls it).",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            min=1,
            help="Devices of this host that compute at the same time, as in the run.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = 1,
    measure_for: MeasureFor = 10 * SECOND_NS,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|bf16|fp16",
            help="Type of all tensors for --analytic and --traced (default: fp32; bf16 for --traced).",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    tensor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[,N...]",
            help="Numbers of GPUs that share each layer, such as 1,2,4,8, for computed costs. Repeatable.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            metavar="fp32|tf32|bf16|fp16",
            help="Precision of the run, by autocast over fp32 parameters; measured or computed.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = "fp32",
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN",
            help="Plan file to run instead, for the profile of its ranks that planner avgpipe tunes with.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
    batches: Annotated[
        int, typer.Option(min=1, help="Global batches that --pipeline runs.", rich_help_panel=MEASUREMENT)
    ] = 20,
    output: Document = STANDARD,
    post: Post = None,
) -> None:
    """Measure what each layer of a PyTorch model costs, or compute it for a device that is not at hand.

    With --example or --hf the costs of a transformer are computed from its
    shape, for one GPU and for several that share each layer.

    Example: penstock profile --job mytrain:job -o profile.json
    """
    degrees = list(numbers_of(tensor, "tensor")) if tensor else []
    known_level = _level(level, measured=job is not None and not analytic)
    traced = job is None and transformer.traced
    contexts, experts = (
        _to_trace(name, getattr(transformer, name), analytic, traced=traced) if job is not None or traced else ()
        for name in ("context", "expert")
    )
    if degrees and not (transformer.traced or (job is not None and analytic)):
        raise typer.BadParameter("--tensor goes with --job and --analytic, or with --traced", param_hint="--tensor")
    if traced:
        all_degrees = (degrees, contexts, experts)
        how = dtype or ("bf16" if precision == "fp32" else "fp32"), precision
        _traced(transformer, analytic, micro_batch_size, all_degrees, how, known_level, output, post)
        return
    if job is None and precision != "fp32":
        raise typer.BadParameter(
            f"--example and --hf compute costs in bf16 with a master copy, not under autocast in {precision}; --job "
            "and --traced take a precision",
            param_hint="--precision",
        )
    if job is None and dtype not in (None, "bf16"):
        raise typer.BadParameter(
            f"--example and --hf compute costs in bf16, not in {dtype}; --traced takes fp32, bf16 and fp16",
            param_hint="--dtype",
        )
    if job is None or transformer.has_options:
        _of_transformer(job, transformer, analytic, micro_batch_size, known_level, output, post)
        return
    if pipeline is not None:
        if analytic or post is not None:
            raise typer.BadParameter("--pipeline runs a plan here; leave out --analytic and --post")
        _pipeline(pipeline, job, batches, directory, output)
        return
    screen = _screen(output)
    screen.announce(f"loading PyTorch and the job {job!r}")
    from penstock.executor.profiling.analytic import analytic_profile
    from penstock.executor.profiling.profiler import measure_profile
    from penstock.executor.run.job import load_job
    from penstock.executor.runtime.cuda import gpu_count

    where = Path.cwd() if directory is None else Path(directory)
    loaded = load_job(job, where)
    sizes = micro_batch_size or [size for size in (1, 2, 4, MAX_DEFAULT_SIZE) if size <= loaded.batch_size]
    if analytic:
        result = analytic_profile(
            loaded,
            analytic,
            sizes,
            dtype or "fp32",  # type: ignore[arg-type]
            precision=precision,  # type: ignore[arg-type]
            tensor_degrees=degrees,
            context_degrees=contexts,
            expert_degrees=experts,
            level=known_level,
            counts_workspace=True,
            progress=screen.progress,
        )
    else:
        result = measure_profile(
            job,
            device or ("cuda" if gpu_count() else "cpu"),
            sizes,
            concurrency,
            directory=where,
            device_kind=device_kind,
            seconds=seconds(measure_for),
            precision=precision,
            progress=screen.progress,
        )
    screen.done()
    _written(screen, result, output, post)


def _of_transformer(
    job: str | None,
    transformer: Transformer,
    kinds: list[str] | None,
    sizes: list[int] | None,
    level: Level | None,
    output: str,
    post: str | None,
) -> None:
    """Compute the profile of a transformer from its shape, and write it.

    Raises typer.BadParameter where no model or more than one is given.
    """
    ways = [name for name, value in (("job", job), ("example", transformer.example), ("hf", transformer.hf)) if value]
    if not ways:
        raise typer.BadParameter("missing --job, --example or --hf")
    if len(ways) > 1:
        raise typer.BadParameter(f"give either --{ways[0]} or --{ways[1]}, not both")
    if job is not None:
        raise typer.BadParameter("--framework and options like it go with --example or --hf, not with --job")
    screen = _screen(output)
    from penstock.planning.inputs import find_shape
    from penstock.shapes.profiles import computed_profile
    from penstock.shapes.routing import Routing

    routing = Routing(transformer.routing_imbalance, transformer.capacity_factor)
    shape = find_shape(transformer.example or transformer.hf or "", transformer.sequence_length, routing)
    result = computed_profile(
        shape,
        transformer.framework,  # type: ignore[arg-type]
        kinds or (),
        sizes or (),
        degrees=costed_degrees(transformer.context, transformer.expert, transformer.expert_tensor),
        context_kind=transformer.context_kind,
        level=level,
    )
    _written(screen, result, output, post)


def _traced(
    transformer: Transformer,
    kinds: list[str] | None,
    sizes: list[int] | None,
    degrees: tuple[Sequence[int], Sequence[int], Sequence[int]],
    how: tuple[str, str],
    level: Level | None,
    output: str,
    post: str | None,
) -> None:
    """Compute a profile from the traced modules of a Hugging Face model, and write it.

    ``degrees``: tensor, context and expert degrees. ``how``: the type of all tensors, and the precision of autocast.
    Raises typer.BadParameter where --traced has no model, or a model without modules.
    """
    meant = ("hf", "sequence_length", "traced", "context", "expert")
    stated = (name for name, value in vars(transformer).items() if value is not None and value is not False)
    other = next((name for name in stated if name not in meant), None)
    if transformer.hf is None or other is not None:
        without = "" if other is None else f", without --{other.replace('_', '-')}"
        raise typer.BadParameter(f"--traced goes with --hf{without}")
    screen = _screen(output)
    screen.announce("loading PyTorch and the model's modules")
    from penstock.executor.hugging_face.job import HuggingFaceJob
    from penstock.executor.profiling.analytic import analytic_profile
    from penstock.facts.device_table import DEVICES, device_facts
    from penstock.planning.inputs import find_shape, read_config
    from penstock.schemas.errors import UnsupportedRequest
    from penstock.shapes.costs.library import explained

    values = read_config(Path(transformer.hf))
    job = HuggingFaceJob(values, sequence_length=transformer.sequence_length, origin=repr(transformer.hf))
    result = analytic_profile(
        job,
        kinds or tuple(DEVICES),
        sizes or TRACED_SIZES,
        how[0],  # type: ignore[arg-type]
        precision=how[1],  # type: ignore[arg-type]
        tensor_degrees=degrees[0],
        context_degrees=degrees[1],
        expert_degrees=degrees[2],
        level=level,
        counts_workspace=True,
        progress=screen.progress,
    )
    with suppress(UnsupportedRequest):  # a family whose shape is not known has no tokens per second
        shape = find_shape(values, job.length)
        named = () if how[0] == "fp32" else explained(values, shape, device_facts(result.device_kinds[0], level))
        result = result.model_copy(update={"shape": shape, "assumptions": (*result.assumptions, *named)})
    screen.done()
    _written(screen, result, output, post)


def _written(screen: Screen, result: ModelProfile, output: str, post: str | None) -> None:
    write_document(result, output)
    if output != STANDARD:
        _summary(screen, result, output)
    if post is not None:
        post_document(screen, result, post)


def _level(text: str | None, *, measured: bool) -> Level | None:
    from penstock.facts.device_table import LEVELS

    if text not in (None, *LEVELS):
        raise typer.BadParameter(f"{text!r} is none of {', '.join(LEVELS)}", param_hint="--level")
    if measured and text not in (None, LEVELS[0]):
        raise typer.BadParameter("it goes with --analytic, --example or --hf: a job is measured", param_hint="--level")
    return next((each for each in LEVELS if each == text), None)


def _to_trace(
    name: Literal["context", "expert"], texts: list[str] | None, analytic: list[str] | None, *, traced: bool
) -> tuple[int, ...]:
    """Return the context or expert degrees at which a job's modules, or with ``traced`` the library's, are traced."""
    if not texts:
        return ()
    degrees = degrees_of(texts, name)
    if degrees == "auto" or not (analytic or traced):
        option = "--traced give" if traced else "--job give --analytic and"
        raise typer.BadParameter(f"with {option} numbers such as 1,2,4", param_hint=f"--{name}")
    return degrees


def _pipeline(plan: str, model: str, batches: int, directory: str | None, output: str) -> None:
    from penstock.calibration.pipeline_profiling import profile_pipeline
    from penstock.schemas.amounts import duration

    screen = _screen(output)
    screen.announce(f"loading PyTorch and the job {model!r}")
    file = read_plan(plan)
    where = Path.cwd() if directory is None else Path(directory)
    result = profile_pipeline(file, model, batches=batches, directory=where, progress=screen.progress)
    screen.done()
    write_document(result, output)
    for number, rank in enumerate(result.ranks):
        used = sum(rank.utilisation) / len(rank.utilisation)
        screen.say(
            f"rank {number}: {duration(rank.compute_ns)} of computation per batch, {used:.0%} of a processor used"
        )


def _size_in_name(name: str) -> int:
    """Read the micro-batch size in a file's name, such as DAPPLE's ``BERT48_pbs2``. Raises BadParameter without one."""
    import re

    match = re.search(r"(?:pbs|mbs|bs)[_=-]?(\d+)", name, re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(
            f"the name {name!r} does not say how many samples the times are for", param_hint="--micro-batch-size"
        )
    return int(match[1])


def _summary(screen: Screen, result: ModelProfile, output: str) -> None:
    from penstock.schemas.amounts import amount, duration

    first = result.measurements[0]
    total = sum(layer.forward_ns + layer.backward_ns for layer in first.layers)
    parameters = sum(layer.parameter_bytes for layer in result.layers)
    cuts = sum(layer.cuttable for layer in result.layers[:-1])
    samples = f"{first.micro_batch_size} sample{'s' if first.micro_batch_size > 1 else ''}"
    screen.say(
        f"{result.name}: {len(result.layers)} layers, {cuts} cuts, {amount(parameters)} of parameters, "
        f"{duration(total)} for {samples} on {first.device_kind} ({result.source.method}, "
        f"±{result.source.expected_error:.0%}); written to {output}"
    )


def _screen(output: str) -> Screen:
    """Return a screen on standard output, or on standard error where the document goes to standard output.

    Raises typer.BadParameter where the document would fill a terminal, and what ``prepare_output`` raises.
    """
    from penstock.cli.show import Screen

    if output == STANDARD and sys.stdout.isatty():
        raise typer.BadParameter("name the file of the profile, such as -o profile.json; or add | cat to see it here")
    prepare_output(output)
    return Screen.of(file=sys.stderr if output == STANDARD else None)

"""``penstock import profile`` and ``penstock profile``: where costs come from."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.documents import STANDARD, post_document, read_plan, refuse_unwritable, write_document

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.schemas.profile import ModelProfile

MAX_DEFAULT_SIZE = 8

Output = Annotated[str, typer.Option("--output", "-o", help="Where the document goes; - is standard output.")]


def register(app: typer.Typer, importing: typer.Typer) -> None:
    """Add this module's commands."""
    importing.command("profile")(import_profile)
    app.command("profile")(profile)


def import_profile(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A profile text, or - for standard input.")],
    output: Output = STANDARD,
    name: Annotated[str | None, typer.Option(help="The model's name; the file's name when left out.")] = None,
    micro_batch_size: Annotated[
        int | None, typer.Option("--micro-batch-size", help="Samples that the text's times stand for.")
    ] = None,
    device_kind: Annotated[str, typer.Option(help="The device on which it was measured.")] = "V100",
) -> None:
    """Read the profile text of PipeDream or DAPPLE into a profile."""
    from penstock.importers.pipedream import read_profile
    from penstock.schemas.document import unreadable
    from penstock.schemas.errors import InvalidDocument

    try:
        text = sys.stdin.read() if file == STANDARD else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDocument(f"cannot read {file!r}: {unreadable(error)}") from None
    if text.lstrip().startswith("{"):
        raise InvalidDocument(
            f"{file!r} is JSON, not a profile text of PipeDream or DAPPLE",
            remedy="a profile that is a document needs no import: --profile takes it as it is",
        )
    stem = "profile" if file == STANDARD else Path(file).stem
    size = micro_batch_size if micro_batch_size is not None else _size_in_name(stem)
    found = read_profile(text, name=name or stem, device_kind=device_kind, micro_batch_size=size)
    write_document(found, output)
    if output != STANDARD:
        _summary(_screen(output), found, output)


def profile(
    model: Annotated[str, typer.Option(help="The job, as module:attribute (examples.gpt:job).")],
    output: Output = STANDARD,
    analytic: Annotated[
        list[str] | None, typer.Option(help="Compute for this kind of device instead of measuring; may be repeated.")
    ] = None,
    micro_batch_size: Annotated[
        list[int] | None, typer.Option("--micro-batch-size", help="Samples; may be repeated. Powers of two by default.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; the GPU where there is one.")] = None,
    device_kind: Annotated[str | None, typer.Option(help="What the profile calls this device.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Devices of this host that are busy at once.")] = 1,
    directory: Annotated[str | None, typer.Option(help="Where the training project lies.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Measuring time per size.")] = 4.0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16; for --analytic.")] = "fp32",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16 (autocast), as the run will train.")] = "fp32",
    post: Annotated[str | None, typer.Option(help="Also send the profile to this service, http://host:port.")] = None,
    pipeline: Annotated[
        str | None, typer.Option(metavar="PLAN", help="Run this plan, and write AvgPipe's profile of its ranks.")
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Global batches of --pipeline.")] = 20,
) -> None:
    """Measure a PyTorch model on this machine, or compute its costs for a device that is not at hand."""
    if pipeline is not None:
        if analytic or post is not None:
            raise typer.BadParameter("--pipeline runs a plan here; leave out --analytic and --post")
        _pipeline(pipeline, model, batches, directory, output)
        return
    import torch

    from penstock.executor.profiling.analytic import analytic_profile
    from penstock.executor.profiling.profiler import measure_profile
    from penstock.executor.run.job import load_job

    refuse_unwritable(output)
    screen = _screen(output)
    where = Path.cwd() if directory is None else Path(directory)
    job = load_job(model, where)
    sizes = micro_batch_size or [size for size in (1, 2, 4, MAX_DEFAULT_SIZE) if size <= job.batch_size]
    if analytic:
        found = analytic_profile(job, analytic, sizes, dtype, progress=screen.progress)  # type: ignore[arg-type]
    else:
        found = measure_profile(
            model,
            device or ("cuda" if torch.cuda.is_available() else "cpu"),
            sizes,
            concurrency,
            directory=where,
            device_kind=device_kind,
            seconds=seconds,
            precision=precision,
            progress=screen.progress,
        )
    screen.done()
    write_document(found, output)
    if output != STANDARD:
        _summary(screen, found, output)
    if post is not None:
        post_document(screen, found, post)


def _pipeline(plan: str, model: str, batches: int, directory: str | None, output: str) -> None:
    from penstock.calibration.pipeline_profiling import profile_pipeline
    from penstock.report.words import duration

    refuse_unwritable(output)
    file, screen = read_plan(plan), _screen(output)
    where = Path.cwd() if directory is None else Path(directory)
    found = profile_pipeline(file, model, batches=batches, directory=where, progress=screen.progress)
    screen.done()
    write_document(found, output)
    for number, rank in enumerate(found.ranks):
        used = sum(rank.utilisation) / len(rank.utilisation)
        screen.say(
            f"rank {number}: {duration(rank.compute_ns)} of computation per batch, {used:.0%} of a processor used"
        )


def _size_in_name(name: str) -> int:
    """DAPPLE writes the micro-batch size into the file's name: ``BERT48_pbs2``. Raises BadParameter without one."""
    import re

    found = re.search(r"(?:pbs|mbs|bs)[_=-]?(\d+)", name, re.IGNORECASE)
    if found is None:
        raise typer.BadParameter(
            f"the name {name!r} does not tell for how many samples the times stand", param_hint="--micro-batch-size"
        )
    return int(found[1])


def _summary(screen: Screen, found: ModelProfile, output: str) -> None:
    from penstock.report.words import amount, duration

    first = found.measurements[0]
    total = sum(layer.forward_ns + layer.backward_ns for layer in first.layers)
    parameters = sum(layer.parameter_bytes for layer in found.layers)
    cuts = sum(layer.cuttable for layer in found.layers[:-1])
    samples = f"{first.micro_batch_size} sample{'s' if first.micro_batch_size > 1 else ''}"
    screen.say(
        f"{found.name}: {len(found.layers)} layers, {cuts} cuts, {amount(parameters)} of parameters, "
        f"{duration(total)} for {samples} on {first.device_kind} ({found.source.method}, "
        f"±{found.source.expected_error:.0%}); written to {output}"
    )


def _screen(output: str) -> Screen:
    """Standard output, or standard error where the document goes to the former."""
    from penstock.cli.show import Screen

    return Screen.of(file=sys.stderr if output == STANDARD else None)

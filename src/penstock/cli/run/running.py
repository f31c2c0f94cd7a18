"""``penstock run``: train with a plan on this machine, and compare what was measured with what was predicted."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import panels
from penstock.cli.groups import grouped
from penstock.cli.input_files import prepare_output, print_json, read_plan, write_document
from penstock.cli.measure.measured import collective_lines, figures, measured_lines, memory_lines
from penstock.cli.options import RUN, AsJson, Directory, option_values, shown
from penstock.cli.run.model_fit import refuse_no_reference
from penstock.cli.run.training_options import (
    Checkpoints,
    Measured,
    Seed,
    Steps,
    Training,
    Transport,
    Transports,
    from_the_root,
    run_options,
)
from penstock.cli.service.remote import Server, refuse_here
from penstock.schemas.options.running import RUN_OPTIONS

if TYPE_CHECKING:
    from penstock.cli.show import Screen
    from penstock.executor.checkpoints.checkpoint import Checkpoint
    from penstock.executor.run.local import RunReport
    from penstock.executor.run.rank_programs import Work
    from penstock.schemas.api.run_options import RunOptions
    from penstock.schemas.plan import PlanFile
    from penstock.schemas.trace import Trace
    from penstock.solvers.lowering.transports import TransportChoice


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("run", rich_help_panel=panels.RUN)(grouped(run))


def run(
    *,
    plan: Annotated[
        str,
        typer.Argument(
            metavar="PLAN", help="Plan file, or - for standard input; with --server also the hash or the job of a plan."
        ),
    ],
    job: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:ATTRIBUTE",
            help="Training job to import, such as mytrain:job; with --server the key that agents know it by.",
            rich_help_panel=RUN,
        ),
    ] = None,
    hf: Annotated[
        str | None,
        typer.Option(
            "--hf",
            metavar="FILE",
            help="Instead of a job: the config.json of a Hugging Face model, which is trained on random tokens.",
            rich_help_panel=RUN,
        ),
    ] = None,
    steps: Steps = 5,
    directory: Directory = None,
    device: Annotated[str, shown(RUN_OPTIONS["device"])] = "cpu",
    transport: Transports = Transport.AUTO,
    restarts: Annotated[int, shown(RUN_OPTIONS["restarts"], min=0)] = 0,
    training: Training,
    seed: Seed = 0,
    checkpoints: Checkpoints,
    measured: Measured,
    chrome_trace: Annotated[str | None, shown(RUN_OPTIONS["chrome_trace"])] = None,
    measure_memory: Annotated[bool, shown(RUN_OPTIONS["measure_memory"])] = False,
    as_json: AsJson = False,
    server: Server = None,
) -> None:
    """Train with a plan on this machine, one process per rank, or on the agents of a service.

    Example: penstock run plan.json --job mytrain:job --steps 20 --check
    """
    trace, check, metrics = measured.trace, measured.check, measured.metrics
    for target in (trace, chrome_trace, *([metrics] if server is None else [])):
        prepare_output(target)
    from penstock.cli.show import Screen

    refuse_other_jobs(job, hf, server)
    flags = option_values(training, checkpoints, measured)
    options = run_options(flags, from_the_root if server is None else lambda path: path)
    screen = Screen.of(quiet=as_json)
    screen.announce("reading the plan" if server is not None else "reading the plan and loading PyTorch")
    traced = trace is not None or chrome_trace is not None
    if server is not None:
        from penstock.cli.run.running_there import run_there
        from penstock.executor.run.local import other_training

        refuse_here(
            device=device != "cpu",
            transport=transport is not Transport.AUTO,
            measure_memory=measure_memory,
            directory=directory,
        )
        more = {"steps": steps, "seed": seed, "check": check, "trace_steps": measured.trace_steps if traced else 0}
        assert job is not None
        file, ended, document = run_there(server, screen, plan, job, options, restarts=restarts, traced=traced, **more)
        _write_traces(file, document, trace, chrome_trace)
        if as_json:
            print_json(ended)
        for line in (*measured_lines(file.plan, ended, options), *collective_lines(ended)):
            screen.say(line)
        if (failure := other_training(None, None, None, ended.collectives_differ)) is not None:
            raise failure
        return
    if job is not None:
        refuse_no_reference(job)
    refuse_combinations(options, check=check, restarts=restarts, memory=measure_memory)
    file = read_plan(plan)
    for note in filter(None, (other_devices(file, device), other_numbers(file, options.precision))):
        print(note, file=sys.stderr)
    report = _train(
        screen,
        file,
        job if job is not None else _hugging_face_job(str(hf), file),
        options,
        restarts=restarts,
        steps=steps,
        seed=seed,
        check=check,
        devices=_devices(device),
        transport=transport.value,
        trace_steps=measured.trace_steps if measure_memory or traced else 0,
        count_memory=measure_memory,
        directory=Path.cwd() if directory is None else Path(directory),
    )
    screen.done()
    lanes = _batches_per_step(file)
    report = replace(report, step_times_ns=tuple(time_ns // lanes for time_ns in report.step_times_ns))
    _write_traces(file, _document(file, report) if traced else None, trace, chrome_trace)
    if as_json:
        print_json(figures(file.plan, report))
    for line in (*measured_lines(file.plan, report, options), *collective_lines(report)):
        screen.say(line)
    for line in memory_lines(file.plan, report) if measure_memory else ():
        screen.say(line)
    if (failure := report.check_failure) is not None:
        raise failure


def refuse_other_jobs(job: str | None, hf: str | None, server: str | None) -> None:
    """Raise typer.BadParameter where a run has no job, or two."""
    if job is None and hf is None:
        raise typer.BadParameter(
            "missing: MODULE:ATTRIBUTE of a training job, or --hf with a config.json", param_hint="--job"
        )
    if job is not None and hf is not None:
        raise typer.BadParameter("not with --hf", param_hint="--job")
    if hf is not None and server is not None:
        raise typer.BadParameter("not with --server: agents know jobs by keys", param_hint="--hf")


def _hugging_face_job(config: str, file: PlanFile) -> str:
    """Return the reference of a config.json's job, with the sequence length of the plan's profile."""
    shape = getattr(file.request.profile, "shape", None)
    length = "" if shape is None else f"@{shape.sequence_length}"
    return f"hf:{Path(config).resolve()}{length}"


def refuse_combinations(options: RunOptions, *, check: bool, restarts: int, memory: bool = False) -> None:
    """Raise UnsupportedRequest for options that contradict each other, before anything is started."""
    from penstock.schemas.errors import MissingExtra, UnsupportedRequest

    if restarts and options.checkpoint_directory is None:
        raise UnsupportedRequest("--restarts continues from checkpoints", remedy="add --checkpoint DIR")
    if check and (options.resume or restarts):
        raise UnsupportedRequest(
            "--check needs a first step from the initial parameters, which a resumed run does not have",
            remedy="leave out --check, or --resume and --restarts",
        )
    if check and memory:
        raise UnsupportedRequest(
            "--measure-memory would also count the memory of --check", remedy="use the two options in two runs"
        )
    if options.tensorboard_directory is not None and find_spec("tensorboard") is None:
        raise MissingExtra(
            "TensorBoard's event files need the package tensorboard", remedy="pip install 'penstock[tensorboard]'"
        )


def _train(
    screen: Screen,
    file: PlanFile,
    model: str,
    options: RunOptions,
    *,
    restarts: int,
    steps: int,
    devices: Sequence[str],
    transport: str,
    **more: Any,
) -> RunReport:
    from penstock.executor.run.unattended import run_unattended
    from penstock.planning.programs.segment_programs import work_after
    from penstock.schemas.profile import ModelProfile

    profile = file.request.profile
    assert isinstance(profile, ModelProfile)

    choice = _transport_choice(transport, devices)

    def work(checkpoint: Checkpoint | None) -> Work:
        result = work_after(file, checkpoint, steps, options, transport=choice)
        devices = ", ".join(program.device for program in result.programs[0])
        screen.say(f"starting {result.num_ranks} ranks on this machine, which load PyTorch and the model: {devices}")
        return result

    return run_unattended(
        work,
        model,
        options=options,
        restarts=restarts,
        steps=steps,
        devices=devices,
        transport=transport,
        plan_hash=file.plan.content_hash(),
        layers=[layer.name for layer in profile.layers],
        boundaries=profile.boundary_sizes(),
        on_progress=Progress(screen, file, steps),
        **more,
    )


def other_devices(file: PlanFile, device: str) -> str | None:
    """Return a warning where a plan for GPUs runs on the CPU; otherwise None."""
    from penstock.facts.device_table import CPU, is_other_hardware
    from penstock.schemas.topology import ClusterTopology

    if not device.startswith("cpu"):
        return None
    assert isinstance(file.request.topology, ClusterTopology)
    used = {device for pipeline in file.plan.pipelines for stage in pipeline.stages for device in stage.devices}
    nodes = file.request.topology.expanded().nodes
    kinds = sorted({d.kind for node in nodes for d in node.devices if d.id in used})
    if not any(is_other_hardware(kind, CPU) for kind in kinds):
        return None
    return (
        f"penstock: warning: the plan is for {len(used)} devices of kind {', '.join(kinds)}; here all ranks compute on "
        "the CPU: times differ from the prediction. --device cuda takes this machine's GPUs, `penstock export` makes "
        "jobs for clusters"
    )


def other_numbers(file: PlanFile, precision: str) -> str | None:
    """Return a warning where a plan for parameters in 16 bits runs under autocast; otherwise None."""
    from penstock.schemas.profile import ModelProfile

    assert isinstance(file.request.profile, ModelProfile)
    dtype = file.request.profile.parameter_dtype
    if dtype == "fp32" or precision not in ("bf16", "fp16"):
        return None
    return (
        f"penstock: warning: the plan's profile has parameters in {dtype}, and --precision {precision} is autocast, "
        "which leaves parameters in the type that the job makes them in. Where that is fp32, the plan does not count "
        "the masters that replicas hold whole where they share out optimizer states, nor older versions in fp32: "
        f"`penstock profile --precision {precision}` does (docs/your-model.md, profiles in 16 bits)"
    )


def _devices(wanted: str) -> list[str]:
    """Return torch's names of the devices that ranks get in turn."""
    if wanted != "cuda":
        return [wanted]
    from penstock.executor.devices import torch_names, visible_gpus

    names = torch_names(visible_gpus())
    if not names:  # without nvidia-smi torch counts the GPUs; a rank reports why it cannot open cuda:0
        from penstock.executor.runtime.cuda import gpu_count

        names = [f"cuda:{number}" for number in range(gpu_count())]
    return names or ["cuda:0"]


def _transport_choice(transport: str, devices: Sequence[str]) -> TransportChoice:
    """Return the transport that the plan is lowered for.

    ``--transport`` and the devices of the ranks decide; these devices may differ from the plan's.
    """
    match transport:
        case "auto":
            return "auto-on-gpus" if devices[0].startswith("cuda") else "auto"
        case "nccl":
            return "nccl"
        case _:
            return "gloo"


def _batches_per_step(file: PlanFile) -> int:
    """Return the global batches of a step: one per pipeline under elastic averaging, otherwise one."""
    return len(file.plan.pipelines) if file.plan.update_rule == "elastic_averaging" else 1


def _document(file: PlanFile, report: RunReport) -> Trace:
    """Return a trace of what the ranks measured."""
    from penstock.schemas.trace import Trace

    plan = file.plan
    return Trace.parse(
        {
            "plan_hash": plan.content_hash(),
            "predicted_time_per_global_batch_ns": plan.prediction.time_per_global_batch_ns if plan.prediction else 0,
            "measured_times_per_global_batch_ns": report.step_times_ns,
            "losses": [loss for loss in report.losses if math.isfinite(loss)],
            "ranks": report.rank_traces,
            "plan_file": file,
        }
    )


def _write_traces(file: PlanFile, document: Trace | None, trace: str | None, chrome_trace: str | None) -> None:
    """Write the trace, and for Perfetto the trace next to the prediction."""
    if document is None:
        return
    write_document(document, trace)
    if chrome_trace is not None:
        from penstock.report.plan_files import write_comparison

        write_comparison(file, document, Path(chrome_trace))


class Progress:
    """The display of a run: a line that each step replaces, and lines that stay for rare events."""

    def __init__(self, screen: Screen, file: PlanFile, steps: int) -> None:
        self._screen = screen
        self._steps = steps
        self._samples = file.request.global_batch_size * _batches_per_step(file)

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        match event["kind"]:
            case "step":
                speed = self._samples * 1e9 / max(1, event["time_ns"])
                self._screen.progress(
                    f"step {event['step'] + 1} of {self._steps}, loss {event['loss']:.6g}, {speed:.4g} samples/s"
                )
            case "evaluation":
                self._stay(f"evaluation after {event['step']} steps: loss {event['loss']:.6f}")
            case "resumed":
                self._stay(f"resuming at step {event['step']} from {event['directory']}")
                if event["step"] >= self._steps:
                    self._stay(f"nothing is left to train: --steps {self._steps} counts from the very first start")
            case "rung":
                self._stay(f"after {event['step']} steps: δ = {event['index']} forwards in advance")
            case "warning":
                self._stay(f"warning: {event['text']}")
            case "restart":
                self._stay(f"restart {event['attempt']}: {event['reason'].splitlines()[0]}")

    def _stay(self, text: str) -> None:
        self._screen.done()
        self._screen.say(text)

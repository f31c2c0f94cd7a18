"""``penstock rank``: one rank of a plan, started by srun, torchrun or a person; see docs/slurm.md."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.documents import read_plan, refuse_unwritable
from penstock.cli.run.running import refuse_combinations
from penstock.cli.run.training_options import (
    AdvanceForward,
    Check,
    CheckpointEvery,
    ClipNorm,
    Directory,
    EvaluateEvery,
    KeepCheckpoints,
    Precision,
    Precisions,
    Resumes,
    Staleness,
    TraceSteps,
    Transport,
    Transports,
    from_the_root,
    run_options,
)

if TYPE_CHECKING:
    from penstock.executor.launched.process import Outcome
    from penstock.schemas.bundle import JobBundle

_PROGRESS_S = 1.0
"""Lines of progress are at least so far apart: they go to a log."""


class Kind(StrEnum):
    """Values of ``--device``."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("rank")(rank)


def rank(
    context: typer.Context,
    bundle: Annotated[
        str, typer.Argument(metavar="BUNDLE", help="What `penstock export PLAN --to bundle` has written.")
    ],
    model: Annotated[str, typer.Option(help="The job, as module:attribute.")],
    steps: Annotated[int, typer.Option(min=1, help="Train up to this step.")],
    directory: Directory = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of parameters and data; else the bundle's.")] = None,
    report: Annotated[str | None, typer.Option(help="Rank 0 writes losses, times and places to this file.")] = None,
    any_nodes: Annotated[
        bool, typer.Option("--any-nodes", help="Nodes that the plan does not name stand in for those it does.")
    ] = False,
    node: Annotated[str | None, typer.Option(help="What the plan calls this node; else the launcher's name.")] = None,
    device: Annotated[Kind, typer.Option(help="auto: by the kind of the plan's devices.")] = Kind.AUTO,
    transport: Transports = Transport.AUTO,
    precision: Precisions = Precision.FP32,
    clip_norm: ClipNorm = None,
    checkpoint: Annotated[str | None, typer.Option(metavar="DIR", help="Write checkpoints here; all see it.")] = None,
    checkpoint_every: CheckpointEvery = 0,
    keep_checkpoints: KeepCheckpoints = 2,
    resume: Resumes = None,
    evaluate_every: EvaluateEvery = 0,
    metrics: Annotated[str | None, typer.Option(help="Rank 0 appends a JSON line per step to this file.")] = None,
    tensorboard: Annotated[str | None, typer.Option(metavar="DIR", help="Rank 0 writes event files here.")] = None,
    staleness: Staleness = 0,
    advance_forward: AdvanceForward = False,
    check: Check = False,
    trace: Annotated[str | None, typer.Option(help="Rank 0 writes what all ranks measured.")] = None,
    trace_steps: TraceSteps = 1,
    plan: Annotated[str | None, typer.Option(help="The plan file, to go into the trace: calibrate wants it.")] = None,
    wait_s: Annotated[float, typer.Option(min=1, help="For the slowest process to start.")] = 300.0,
    timeout_s: Annotated[float, typer.Option(min=1, help="A peer silent for longer is taken for dead.")] = 60.0,
) -> None:
    """Be one rank of a plan, among those that srun or torchrun has started: one process per device.

    A process finds its stage by its node's name and its number there; the launcher's order of ranks does not matter.
    """
    from penstock.schemas.errors import UnsupportedRequest

    options = run_options(context.params, from_the_root)
    refuse_combinations(options, check=check, restarts=0)
    if plan is not None and trace is None:
        raise UnsupportedRequest("--plan goes into the trace, and none is written", remedy="add --trace FILE")
    job, digest = _read(bundle)
    project = Path.cwd() if directory is None else Path(directory)
    if not project.is_dir():
        raise UnsupportedRequest(f"--directory {directory!r} is no directory on this node")
    files = Files(from_the_root(report), from_the_root(trace), from_the_root(plan))
    from penstock.executor.launched.environment import read_launch
    from penstock.importers.cluster.hostlist import expand

    launch = read_launch(os.environ, expand, node)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from penstock.executor.launched.process import Orders, Process

    orders = Orders(
        model=model,
        directory=str(project.resolve()),
        steps=steps,
        seed=job.seed if seed is None else seed,
        options=options,
        device=device.value,
        transport=transport.value,
        check=check,
        trace_steps=trace_steps if trace is not None else 0,
        any_nodes=any_nodes,
        wait_s=wait_s,
        timeout_s=timeout_s,
    )
    os.chdir(project)
    process = Process(job, digest, launch, orders, tell=Log(job, steps), on_first=files.refuse_unwritable)
    outcome = process.run()
    files.write(job, outcome)
    _end(outcome.code)


class Files:
    """What rank 0 writes in the end: the report, and the trace with the plan file."""

    def __init__(self, report: str | None, trace: str | None, plan: str | None) -> None:
        self._report = report
        self._trace = trace
        self._plan = plan

    def refuse_unwritable(self) -> None:
        """Raise what would go wrong when they are written, before the training."""
        from penstock.schemas.errors import UnsupportedRequest

        for target in (self._report, self._trace):
            try:
                refuse_unwritable(target)
            except OSError as error:
                raise UnsupportedRequest(
                    f"cannot write {target!r}: {error.strerror}",
                    remedy="name a folder that is there on the node of rank 0",
                ) from None
        if self._plan is not None:
            read_plan(self._plan)

    def write(self, bundle: JobBundle, outcome: Outcome) -> None:
        """Write what was asked for; nothing where this is not rank 0."""
        if outcome.report is None:
            return
        if self._report is not None:
            outcome.report.write(self._report)
        if self._trace is not None:
            self._write_trace(bundle, outcome, self._trace)

    def _write_trace(self, bundle: JobBundle, outcome: Outcome, target: str) -> None:
        from penstock.schemas.trace import Trace

        assert outcome.report is not None
        document = Trace.parse(
            {
                "plan_hash": bundle.plan_hash,
                "predicted_time_per_global_batch_ns": bundle.predicted_time_per_global_batch_ns or 0,
                "measured_times_per_global_batch_ns": outcome.report.step_times_ns,
                "losses": [loss for loss in outcome.report.losses if loss is not None],
                "ranks": outcome.rank_traces,
                "plan_file": None if self._plan is None else read_plan(self._plan),
            }
        )
        document.write(target)


class Log:
    """Rank 0's lines on standard output: the first step, one a second, the last, and all that is rare."""

    def __init__(self, bundle: JobBundle, steps: int) -> None:
        self._samples = bundle.global_batch_size * bundle.batches_per_step
        self._steps = steps
        self._last_s = -_PROGRESS_S

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Tell one event."""
        match event["kind"]:
            case "step":
                now_s, step = time.monotonic(), event["step"] + 1
                if now_s - self._last_s >= _PROGRESS_S or step == self._steps:
                    self._last_s = now_s
                    speed = self._samples * 1e9 / max(1, event["time_ns"])
                    _say(f"step {step} of {self._steps}, loss {event['loss']:.6g}, {speed:.4g} samples/s")
            case "evaluation":
                _say(f"evaluation after {event['step']} steps: loss {event['loss']:.6f}")
            case "resumed":
                _say(f"resuming at step {event['step']} from {event['directory']}")
            case "checkpoint":
                _say(f"checkpoint after {event['step']} steps: {event['directory']}")
            case "rung":
                _say(f"after {event['step']} steps: δ = {event['index']} forwards in advance")
            case "warning":
                _say(f"warning: {event['text']}")


def _read(path: str) -> tuple[JobBundle, str]:
    """The bundle, and the SHA-256 of its file."""
    from penstock.schemas.bundle import JobBundle
    from penstock.schemas.errors import InvalidDocument

    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InvalidDocument(
            f"cannot read the bundle {path!r} on this node: {error.strerror}",
            remedy="penstock export PLAN --to bundle -o job.json, on a file system that all nodes share",
        ) from None
    try:
        return JobBundle.parse_json(text, origin=repr(path)), hashlib.sha256(text).hexdigest()
    except InvalidDocument as error:
        remedy = error.remedy or "give what `penstock export PLAN --to bundle` has written, all of it"
        raise InvalidDocument(error.detail, faults=error.faults, remedy=remedy) from None


def _say(text: str) -> None:
    print(text, flush=True)


def _end(code: int) -> None:
    """Leave at once: threads of torch and of the meeting may still wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

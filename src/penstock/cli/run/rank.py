"""``penstock rank``: one rank of a plan, started by srun, torchrun or a person; see docs/launching.md."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import panels
from penstock.cli.durations import METAVAR, SECOND_NS, between, seconds
from penstock.cli.groups import grouped
from penstock.cli.input_files import prepare_output, read_plan
from penstock.cli.options import LAUNCH, LONGEST, MEASUREMENT, OUTPUT, RUN, Directory, Job, option_values, shown
from penstock.cli.run.running import refuse_combinations
from penstock.cli.run.training_options import (
    Checkpoints,
    Measured,
    Training,
    Transport,
    Transports,
    from_the_root,
    run_options,
)
from penstock.schemas.options.running import RUN_OPTIONS

if TYPE_CHECKING:
    from penstock.executor.launched.process import Outcome
    from penstock.schemas.ranks.bundle import JobBundle

_PROGRESS_S = 1.0
"""Seconds between two lines of progress at least: they go to a log."""


class Device(StrEnum):
    """Values of ``--device``."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def register(app: typer.Typer) -> None:
    """Add this module's command."""
    app.command("rank", rich_help_panel=panels.RUN)(grouped(rank))


def rank(
    *,
    bundle: Annotated[
        str, typer.Argument(metavar="BUNDLE", help="Job bundle that `penstock export PLAN --to bundle` wrote.")
    ],
    job: Job,
    steps: Annotated[int, shown(replace(RUN_OPTIONS["steps"], default=""), min=1)],
    directory: Directory = None,
    report: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="JSON file in which rank 0 reports losses, times and where each rank ran.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(help="Name of this node in the plan (default: the launcher's name).", rich_help_panel=LAUNCH),
    ] = None,
    any_nodes: Annotated[
        bool,
        typer.Option(
            "--any-nodes", help="Let nodes that the plan does not name replace those it does.", rich_help_panel=LAUNCH
        ),
    ] = False,
    device: Annotated[
        Device,
        typer.Option(
            help="Device that this rank computes on; auto takes the kind of the plan's devices.", rich_help_panel=RUN
        ),
    ] = Device.AUTO,
    transport: Transports = Transport.AUTO,
    start_timeout: Annotated[
        int,
        typer.Option(
            parser=between("1s", LONGEST),
            metavar=METAVAR,
            show_default="5min",
            help="How long to wait for the slowest process to start.",
            rich_help_panel=LAUNCH,
        ),
    ] = 300 * SECOND_NS,
    peer_timeout: Annotated[
        int | None,
        typer.Option(
            parser=between("1s", LONGEST),
            metavar=METAVAR,
            help="Time after which a silent peer counts as dead (default: 10min, then 10 × the first step).",
            rich_help_panel=LAUNCH,
        ),
    ] = None,
    training: Training,
    seed: Annotated[int | None, shown(replace(RUN_OPTIONS["seed"], default="the bundle's"), min=0)] = None,
    checkpoints: Checkpoints,
    measured: Measured,
    plan: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN",
            help="Plan file to put into the trace, for `penstock calibrate`; needs --trace.",
            rich_help_panel=MEASUREMENT,
        ),
    ] = None,
) -> None:
    """Run one rank of a plan, as srun or torchrun starts it: one process per device.

    A process finds its stage by the name of its node and by its number there;
    the launcher's order of ranks does not matter.

    Example: srun penstock rank job.json --job mytrain:job --steps 1000
    """
    trace, check = measured.trace, measured.check
    from penstock.schemas.errors import UnsupportedRequest

    options = run_options(option_values(training, checkpoints, measured), from_the_root)
    refuse_combinations(options, check=check, restarts=0)
    if plan is not None and trace is None:
        raise UnsupportedRequest("--plan needs --trace: the plan is written into the trace", remedy="add --trace FILE")
    work, digest = _read(bundle)
    project = Path.cwd() if directory is None else Path(directory)
    if not project.is_dir():
        raise UnsupportedRequest(f"--directory {directory!r} is not a directory on this node")
    files = Files(from_the_root(report), from_the_root(trace), from_the_root(plan))
    from penstock.executor.launched.environment import read_launch
    from penstock.importers.cluster.hostlist import expand

    launch = read_launch(os.environ, expand, node)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from penstock.executor.launched.process import Orders, Process

    orders = Orders(
        model=job,
        directory=str(project.resolve()),
        steps=steps,
        seed=work.seed if seed is None else seed,
        options=options,
        device=device.value,
        transport=transport.value,
        check=check,
        trace_steps=measured.trace_steps if trace is not None else 0,
        any_nodes=any_nodes,
        wait_s=seconds(start_timeout),
        timeout_s=None if peer_timeout is None else seconds(peer_timeout),
    )
    os.chdir(project)
    process = Process(work, digest, launch, orders, show=Log(work, steps), on_first=files.refuse_unwritable)
    outcome = process.run()
    files.write(work, outcome)
    _end(outcome.code)


class Files:
    """The files that rank 0 writes in the end: the report, and the trace with the plan file."""

    def __init__(self, report: str | None, trace: str | None, plan: str | None) -> None:
        self._report = report
        self._trace = trace
        self._plan = plan

    def refuse_unwritable(self) -> None:
        """Raise before the training what writing the files would raise after it."""
        from penstock.schemas.errors import UnsupportedRequest

        for target in (self._report, self._trace):
            try:
                prepare_output(target)
            except OSError as error:
                raise UnsupportedRequest(
                    f"cannot write {target!r}: {error.strerror}",
                    remedy="name a folder that can be written on the node of rank 0",
                ) from None
        if self._plan is not None:
            read_plan(self._plan)

    def write(self, bundle: JobBundle, outcome: Outcome) -> None:
        """Write the files that options name; ranks other than 0 write nothing."""
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
                "losses": [loss for loss in outcome.report.losses if isinstance(loss, float)],
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
        """Print one event."""
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
    """Read the bundle, and return it with the SHA-256 of its file."""
    from penstock.schemas.errors import InvalidDocument
    from penstock.schemas.ranks.bundle import JobBundle

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
    """Leave at once: threads of torch and of the rendezvous may still wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

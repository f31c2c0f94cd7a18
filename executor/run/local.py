"""A run of ranks on this machine: starts them, follows them, and ends them all. Loads no torch.

Each rank has a separate process group. The first sign of trouble (a ``failed`` event, a signal, an early exit) ends the
run: for a moment other ranks may still report errors, then the rank that failed first is named and all groups are
killed. The socket at which ranks meet is opened here and passed to rank 0, so its port is free and known.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.executor.node.tcp_store import join_address, listen
from penstock.executor.program.mark import read_mark, write_mark
from penstock.executor.run.rank_process import RankProcess
from penstock.executor.run.rank_programs import Work
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import (
    InvalidDocument,
    MissingExtra,
    ModelMismatch,
    NonfiniteLoss,
    NotFound,
    PenstockError,
    RunFailed,
    UnsupportedRequest,
)
from penstock.schemas.program import Program
from penstock.schemas.ranks.assignment import BoundarySizes, RankAssignment
from penstock.schemas.trace import first_difference, summed

PEER_GRACE_S = 0.7
"""Seconds to wait for the reason after a rank lost a peer: the peer's last messages, or its exit."""

_LOOPBACK = "127.0.0.1"
_OWN_ERRORS: dict[str, type[PenstockError]] = {
    kind.__name__: kind
    for base in (InvalidDocument, MissingExtra, ModelMismatch, NonfiniteLoss, NotFound, UnsupportedRequest)
    for kind in (base, *base.__subclasses__())
}


@dataclass(frozen=True, slots=True)
class RunReport:
    """The measurements of a run. ``step_times_ns`` excludes the first ``warmup_steps`` steps.

    ``losses``: the losses of all steps from ``first_step`` on. ``evaluations``: (steps done, loss after them).

    ``gradient_check``: largest difference from a single process as a fraction of the largest gradient, which should be
    within ``gradient_tolerance``. ``loss_check``: the relative difference of the loss. ``rank_traces``:
    ``schemas.trace.RankTrace`` as JSON. ``peak_memory_bytes``: per rank, the growth of its process, or the bytes of its
    tensors. ``reserved_memory_bytes``: the same with memory that a GPU's allocator kept, which other processes lack.

    ``collectives``: the number of each kind on all ranks in the compared steps; None where none are predicted.
    ``collectives_differ``: the first collective that differs from the prediction; None where all agree. ``hardware``:
    per rank, ``schemas.trace.Hardware`` as JSON.
    """

    losses: tuple[float, ...]
    step_times_ns: tuple[int, ...]
    warmup_steps: int
    gradient_check: float | None
    gradient_tolerance: float | None
    loss_check: float | None
    peak_memory_bytes: tuple[int, ...]
    rank_traces: tuple[dict[str, Any], ...] = field(repr=False)
    reserved_memory_bytes: tuple[int, ...] = ()
    first_step: int = 0
    evaluations: tuple[tuple[int, float], ...] = ()
    collectives: Mapping[str, int] | None = None
    collectives_differ: str | None = None
    hardware: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def check_failure(self) -> RunFailed | None:
        """The error of a checked run that trained or communicated differently than predicted, or None."""
        return other_training(self.gradient_check, self.loss_check, self.gradient_tolerance, self.collectives_differ)


def other_training(
    gradients: float | None, loss: float | None, tolerance: float | None, collective: str | None
) -> RunFailed | None:
    """Return the failure of a run whose gradients, loss or collectives differ from the expected ones, or None.

    Arguments are None where nothing was compared.
    """
    sentences = []
    if gradients is not None and loss is not None and tolerance is not None and max(gradients, loss) > tolerance:
        sentences.append(
            f"the run does not train like a single process: gradients {gradients:.3g} apart, loss {loss:.3g}, where "
            f"{tolerance:.3g} would be rounding"
        )
    if collective is not None:
        sentences.append(f"a collective is not the one that was predicted: {collective}")
    remedy = "report it: the costs of the plan leave it out, or count another one"
    alone = collective is not None and len(sentences) == 1
    return RunFailed("; ".join(sentences), remedy=remedy if alone else None) if sentences else None


@dataclass(frozen=True, slots=True)
class _Run:
    """A run with its processes, which are being followed."""

    work: Work
    steps: int
    options: RunOptions
    processes: list[RankProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidDocument(f"a run has at least one step, not {self.steps}")


def run_locally(
    work: Work | Sequence[Program],
    job: str,
    *,
    directory: Path,
    steps: int,
    seed: int,
    options: RunOptions | None = None,
    plan_hash: str | None = None,
    check: bool = False,
    trace_steps: int = 0,
    layers: Sequence[str] | None = None,
    boundaries: BoundarySizes | None = None,
    timeout_s: float | None = None,
    devices: Sequence[str] = ("cpu",),
    transport: str = "auto",
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    on_started: Callable[[Sequence[int]], None] | None = None,
    count_memory: bool = False,
    environments: Sequence[Mapping[str, str]] = ({},),
) -> RunReport:
    """Run one process per rank on this machine, up to step ``steps``.

    ``devices``: torch's names of the devices, which ranks get in turn. ``environments``: variables that ranks get in
    turn, besides this process's. ``transport``: see ``executor.transport``. ``layers``: the names of the plan's layers,
    ``boundaries``: the tensors at its cuts; both are compared with the model. ``directory``: the place of ``job``.
    ``on_progress`` gets each event of each rank, ``on_started`` process ids. ``count_memory``: count peaks of tensors.

    Raises RunFailed with the first rank that failed, its signal or exception and its last instruction. Errors that name
    a remedy (ModelMismatch, InvalidDocument, UnsupportedRequest) are raised unchanged.
    """
    run = _Run(Work.of(work), steps, options or RunOptions())
    first = RankAssignment(
        rank=0,
        world_size=run.work.num_ranks,
        programs=(),
        segments=run.work.segments,
        first_step=run.work.first_step,
        steps=steps,
        job=job,
        directory=str(directory.resolve()),
        options=run.options.model_dump(mode="json"),
        plan_hash=plan_hash,
        layers=None if layers is None else tuple(layers),
        boundaries=boundaries,
        seed=seed,
        check=check,
        trace_steps=trace_steps,
        store="",
        prefix=f"run-{os.getpid()}-{time.monotonic_ns()}",
        device=devices[0],
        transport=transport,
        timeout_s=timeout_s,
        kinds_differ=True,
        count_memory=count_memory,
    )
    with _started(run, first, devices, environments):
        if on_started is not None:
            on_started([process.popen.pid for process in run.processes])
        return _follow(run, on_progress)


@contextmanager
def _started(
    run: _Run, first: RankAssignment, devices: Sequence[str], environments: Sequence[Mapping[str, str]]
) -> Iterator[None]:
    """Start all ranks, and end them when the context ends."""
    with tempfile.TemporaryDirectory(prefix="penstock-run-") as scratch:
        try:
            _start_all(run, first, devices, environments, Path(scratch))
            yield
        finally:
            _end(run.processes)


def _start_all(
    run: _Run, first: RankAssignment, devices: Sequence[str], environments: Sequence[Mapping[str, str]], scratch: Path
) -> None:
    """Start all ranks with the assignment of the first rank, adapted to their places."""
    with _socket() as server:
        for rank in range(first.world_size):
            assignment = replace(
                first,
                rank=rank,
                programs=run.work.programs_of(rank),
                device=devices[rank % len(devices)],
                store=join_address(_LOOPBACK, server.getsockname()[1]),
                listening=server.fileno() if rank == 0 else None,
                mark=str(scratch / f"mark-{rank}"),
            )
            run.processes.append(_start(assignment, environments[rank % len(environments)]))


@contextmanager
def _socket() -> Iterator[socket.socket]:
    server = listen(_LOOPBACK)
    try:
        yield server
    finally:
        server.close()


def _start(assignment: RankAssignment, variables: Mapping[str, str]) -> RankProcess:
    assert assignment.mark is not None
    mark = Path(assignment.mark)
    write_mark(mark)
    environment = dict(os.environ) | dict(variables)
    environment.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    environment.setdefault("OMP_NUM_THREADS", "1")
    popen = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.executor.run.rank_main"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=() if assignment.listening is None else (assignment.listening,),
        env=environment,
        cwd=assignment.directory,
        process_group=0,
    )
    process = RankProcess(assignment.rank, popen, mark)
    assert popen.stdin is not None
    with suppress(BrokenPipeError):
        popen.stdin.write(json.dumps(assignment.to_json()).encode() + b"\n")
        popen.stdin.flush()
    return process


def loopback_interface() -> str:
    """Return the network interface that gloo uses among processes of this machine."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else names[0]


def _follow(run: _Run, on_progress: Callable[[dict[str, Any]], None] | None) -> RunReport:
    processes = run.processes
    collected: dict[str, list[dict[str, Any]]] = {"trace": [], "evaluation": []}
    give_up_at: float | None = None
    with selectors.DefaultSelector() as selector:
        for process in processes:
            for stream in process.streams:
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, process)
            selector.register(process.exit_descriptor, selectors.EVENT_READ, process)
        while not all(process.has_ended for process in processes):
            limit_s = None if give_up_at is None else give_up_at - time.monotonic()
            if limit_s is not None and limit_s <= 0:
                break
            for key, _ in selector.select(limit_s):
                for event in _read_events(key.data, key.fileobj, selector):
                    collected.get(event["kind"], []).append(event)
                    if on_progress is not None:
                        on_progress(event | {"rank": key.data.rank})
            failed = [process for process in processes if process.has_failed]
            if any(process.is_root_cause for process in failed):
                break
            if failed and give_up_at is None:
                give_up_at = time.monotonic() + PEER_GRACE_S
    if any(process.has_failed for process in processes):
        raise _failure(run)
    return _report(processes, **collected)


def _read_events(process: RankProcess, source: Any, selector: selectors.BaseSelector) -> list[dict[str, Any]]:
    """Read the events of one of a process's streams; after its exit, read both streams to their ends."""
    if source in process.streams:
        at_end, events = process.read(source)
        if at_end:
            selector.unregister(source)
        return events
    process.popen.wait()
    process.has_ended = True
    selector.unregister(source)
    return [event for stream in process.streams for event in process.read(stream)[1]]


def _failure(run: _Run) -> PenstockError:
    """Return an error that names the rank which failed first by itself, by its clock.

    When all failed ranks only lost a peer, the ranks that still run are suspects, and are named too.
    """

    def order(process: RankProcess) -> tuple[bool, bool, int]:
        event = process.failed
        return not process.is_root_cause, event is not None, event["time_ns"] if event is not None else 0

    process = min((one for one in run.processes if one.has_failed), key=order)
    event = process.failed
    if event is not None and event["error"] in _OWN_ERRORS:
        return _OWN_ERRORS[event["error"]](f"rank {process.rank}: {event['detail']}", remedy=event["remedy"])
    where = _last_instruction(run, process)
    if event is not None:
        lines = [] if process.is_root_cause else _still_there(run)
        lines_below = "".join(f"\n    {line}" for line in [*lines, *event["traceback"]])
        return RunFailed(f"rank {process.rank} failed {where}: {event['reason']}{lines_below}")
    code = process.popen.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    output = "".join(f"\n    {line}" for line in list(process.last_lines)[-10:])
    return RunFailed(f"rank {process.rank} {how} {where}{output}")


def _still_there(run: _Run) -> list[str]:
    return [f"rank {one.rank} is still {_last_instruction(run, one)}" for one in run.processes if not one.has_failed]


def _last_instruction(run: _Run, process: RankProcess) -> str:
    """Describe the step and the instruction that the rank was at, from its event or from its mark."""
    index, step = read_mark(process.mark)
    if process.failed is not None:
        index, step = process.failed["index"], process.failed["step"]
        if process.failed["instruction"] is not None:
            return f"in step {step} at instruction {index} ({process.failed['instruction']})"
    if step is None or step < 0:
        return "before its first step"
    if index is None:
        return f"in step {step}"
    instruction = run.work.instruction(process.rank, index, run.work.program_at(step, run.steps, run.options))
    return f"in step {step} at instruction {index} ({instruction})"


def _report(
    processes: Sequence[RankProcess], trace: Sequence[dict[str, Any]], evaluation: Sequence[dict[str, Any]]
) -> RunReport:
    finished = {process.rank: process.done for process in processes if process.done is not None}
    first = finished[0]
    traces = [event["rank_trace"] for event in trace]
    return RunReport(
        losses=tuple(first["losses"]),
        step_times_ns=tuple(first["step_times_ns"]),
        warmup_steps=first["warmup_steps"],
        gradient_check=first["gradient_check"],
        gradient_tolerance=first["gradient_tolerance"],
        loss_check=first["loss_check"],
        peak_memory_bytes=tuple(finished[rank]["peak_memory_bytes"] for rank in sorted(finished)),
        reserved_memory_bytes=tuple(finished[rank]["reserved_memory_bytes"] for rank in sorted(finished)),
        rank_traces=tuple(sorted(traces, key=lambda one: (one["step"], one["rank"]))),
        first_step=first["first_step"],
        evaluations=tuple((event["step"], event["loss"]) for event in evaluation),
        collectives=summed(finished[rank]["collectives"] for rank in sorted(finished)),
        collectives_differ=first_difference(finished[rank]["collectives_differ"] for rank in sorted(finished)),
        hardware=tuple(finished[rank]["hardware"] for rank in sorted(finished)),
    )


def _end(processes: Sequence[RankProcess]) -> None:
    """Kill all processes, then wait for each."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
    for process in processes:
        process.close()

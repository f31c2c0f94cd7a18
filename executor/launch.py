"""Starts the ranks of a run on this machine, follows them, and leaves nothing behind. Loads no torch.

Each rank is a process group of its own. The first sign of trouble (a ``failed`` event, a signal, an early exit) ends
the run: for a moment other ranks may still say what they met, then the rank that failed by itself is named and all
groups are killed. The socket at which ranks meet is opened here and handed to rank 0, so its port is free and known.
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
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from penstock.executor.agent_state import lost_a_peer
from penstock.executor.store import join_address, listen
from penstock.schemas.errors import (
    InvalidDocument,
    ModelMismatch,
    NotFound,
    PenstockError,
    RunFailed,
    UnsupportedRequest,
)
from penstock.schemas.program import Program

PEER_GRACE_S = 0.7
"""After a rank lost a peer, how long to wait for the reason: the peer's own last words, or its exit."""

_KEPT_LINES = 40
_CHUNK_BYTES = 1 << 16
_LOOPBACK = "127.0.0.1"
_OWN_ERRORS: dict[str, type[PenstockError]] = {
    kind.__name__: kind for kind in (InvalidDocument, ModelMismatch, NotFound, UnsupportedRequest)
}


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run measured. ``step_times_ns`` leaves out the first ``warmup_steps`` steps; losses are of all steps.

    ``gradient_check``: largest difference from a single process in parts of the largest gradient, within
    ``gradient_tolerance`` if all is well; ``loss_check``: the loss, relatively. ``rank_traces``:
    ``schemas.trace.RankTrace`` as JSON. ``peak_memory_bytes``: per rank, how much its process grew.
    """

    losses: tuple[float, ...]
    step_times_ns: tuple[int, ...]
    warmup_steps: int
    gradient_check: float | None
    gradient_tolerance: float | None
    loss_check: float | None
    peak_memory_bytes: tuple[int, ...]
    rank_traces: tuple[dict[str, Any], ...] = field(repr=False)

    @property
    def check_passed(self) -> bool | None:
        """Whether the run trains what one process trains; None when it was not compared."""
        if self.gradient_check is None or self.gradient_tolerance is None or self.loss_check is None:
            return None
        return max(self.gradient_check, self.loss_check) <= self.gradient_tolerance


class _Process:
    """A rank's process, and what it said."""

    def __init__(self, rank: int, popen: subprocess.Popen[bytes], mark: Path) -> None:
        assert popen.stdout is not None
        assert popen.stderr is not None
        self.rank = rank
        self.popen = popen
        self.mark = mark
        self.streams: tuple[IO[bytes], IO[bytes]] = (popen.stdout, popen.stderr)
        self.exit_descriptor = os.pidfd_open(popen.pid)
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.has_ended = False
        self.failed: dict[str, Any] | None = None
        self.done: dict[str, Any] | None = None
        self._rests = dict.fromkeys(self.streams, b"")

    @property
    def has_failed(self) -> bool:
        """Whether it said so, or ended without having done its work."""
        return self.failed is not None or (self.has_ended and self.done is None)

    @property
    def is_root_cause(self) -> bool:
        """Whether it failed by itself: a signal or an error of its own, not the loss of a peer."""
        if self.failed is not None:
            return not lost_a_peer(str(self.failed["reason"]))
        return self.has_failed

    def read(self, stream: IO[bytes]) -> tuple[bool, list[dict[str, Any]]]:
        """Whether a stream is at its end, and the events among the lines that are there now."""
        text, at_end = self._rests[stream], False
        with suppress(BlockingIOError):
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                text += chunk
            at_end = True
        *lines, self._rests[stream] = text.split(b"\n")
        events = []
        for line in lines:
            event = _event(line) if stream is self.streams[0] else None
            if event is None:
                self.last_lines.append(line.decode(errors="replace"))
                continue
            events.append(event)
            if event["kind"] == "failed":
                self.failed = event
            elif event["kind"] == "done":
                self.done = event
        return at_end, events

    def close(self) -> None:
        """Kill the process's group, wait for it, and close what connects to it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        os.close(self.exit_descriptor)
        for stream in (self.popen.stdin, *self.streams):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def run_locally(
    programs: Sequence[Program],
    job: str,
    *,
    directory: Path,
    steps: int,
    seed: int,
    check: bool = False,
    trace_steps: int = 0,
    layers: Sequence[str] | None = None,
    boundaries: Sequence[Sequence[Sequence[Any]]] | None = None,
    timeout_s: float | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
) -> RunReport:
    """Run one process per program on this machine's CPUs.

    ``layers``: the names of the plan's layers; ``boundaries``: what crosses its cuts, both compared with the model.
    ``directory``: where ``job`` (``module:attribute``) is found. ``on_progress`` gets every event of every rank.
    Raises RunFailed naming the first rank that failed, its signal or exception and its last instruction; errors that
    name their own remedy (ModelMismatch, InvalidDocument, UnsupportedRequest) are raised as they are.
    """
    if steps < 1:
        raise InvalidDocument(f"a run has at least one step, not {steps}")
    common = {
        "world_size": len(programs),
        "prefix": "run",
        "job": job,
        "directory": str(directory.resolve()),
        "steps": steps,
        "seed": seed,
        "check": check,
        "trace_steps": trace_steps,
        "layers": None if layers is None else list(layers),
    }
    if boundaries is not None:
        common["boundaries"] = boundaries
    if timeout_s is not None:
        common["timeout_s"] = timeout_s
    with tempfile.TemporaryDirectory(prefix="penstock-run-") as scratch, _socket() as server:
        common["store"] = join_address(_LOOPBACK, server.getsockname()[1])
        processes: list[_Process] = []
        try:
            for program in programs:
                processes.append(_start(program, common, Path(scratch), server))
            server.close()
            return _follow(processes, programs, on_progress)
        finally:
            _end(processes)


@contextmanager
def _socket() -> Iterator[socket.socket]:
    server = listen(_LOOPBACK)
    try:
        yield server
    finally:
        server.close()


def _start(program: Program, common: Mapping[str, Any], scratch: Path, server: socket.socket) -> _Process:
    mark = scratch / f"mark-{program.rank}"
    mark.write_bytes(array("q", (0, -1)).tobytes())
    assignment = {**common, "rank": program.rank, "program": program.to_json(), "mark": str(mark)}
    descriptors: tuple[int, ...] = ()
    if program.rank == 0:
        descriptors = (server.fileno(),)
        assignment["listening"] = server.fileno()
    environment = dict(os.environ)
    environment.setdefault("GLOO_SOCKET_IFNAME", loopback_interface())
    environment.setdefault("OMP_NUM_THREADS", "1")
    popen = subprocess.Popen(
        [sys.executable, "-P", "-m", "penstock.executor.rank"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=descriptors,
        env=environment,
        cwd=common["directory"],
        process_group=0,
    )
    process = _Process(program.rank, popen, mark)
    assert popen.stdin is not None
    with suppress(BrokenPipeError):
        popen.stdin.write(json.dumps(assignment).encode() + b"\n")
        popen.stdin.flush()
    return process


def loopback_interface() -> str:
    """The network interface that gloo is to use among processes of this machine."""
    names = [name for _, name in socket.if_nameindex()]
    return "lo" if "lo" in names else names[0]


def _follow(
    processes: Sequence[_Process], programs: Sequence[Program], on_progress: Callable[[dict[str, Any]], None] | None
) -> RunReport:
    traces: list[dict[str, Any]] = []
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
                for event in _hear(key.data, key.fileobj, selector):
                    if event["kind"] == "trace":
                        traces.append(event["rank_trace"])
                    if on_progress is not None:
                        on_progress(event | {"rank": key.data.rank})
            failed = [process for process in processes if process.has_failed]
            if any(process.is_root_cause for process in failed):
                break
            if failed and give_up_at is None:
                give_up_at = time.monotonic() + PEER_GRACE_S
    if any(process.has_failed for process in processes):
        raise _failure(processes, programs)
    return _report(processes, traces)


def _hear(process: _Process, source: Any, selector: selectors.BaseSelector) -> list[dict[str, Any]]:
    """What a process says on one of its streams; when it has exited, on both up to their ends."""
    if source in process.streams:
        at_end, events = process.read(source)
        if at_end:
            selector.unregister(source)
        return events
    process.popen.wait()
    process.has_ended = True
    selector.unregister(source)
    return [event for stream in process.streams for event in process.read(stream)[1]]


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def _failure(processes: Sequence[_Process], programs: Sequence[Program]) -> PenstockError:
    """The error that names the rank which failed by itself; of several, the first by its own clock.

    When all that failed lost a peer, the ones that are still there are suspects: they are named too.
    """

    def order(process: _Process) -> tuple[bool, bool, int]:
        own = process.failed
        return not process.is_root_cause, own is not None, own["time_ns"] if own is not None else 0

    process = min((one for one in processes if one.has_failed), key=order)
    event = process.failed
    if event is not None and event["error"] in _OWN_ERRORS:
        return _OWN_ERRORS[event["error"]](f"rank {process.rank}: {event['detail']}", remedy=event["remedy"])
    where = _last_instruction(process, programs[process.rank])
    if event is not None:
        lines = [] if process.is_root_cause else _still_there(processes, programs)
        told = "".join(f"\n    {line}" for line in [*lines, *event["traceback"]])
        return RunFailed(f"rank {process.rank} failed {where}: {event['reason']}{told}")
    code = process.popen.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    said = "".join(f"\n    {line}" for line in list(process.last_lines)[-10:])
    return RunFailed(f"rank {process.rank} {how} {where}{said}")


def _still_there(processes: Sequence[_Process], programs: Sequence[Program]) -> list[str]:
    return [
        f"rank {one.rank} is still {_last_instruction(one, programs[one.rank])}"
        for one in processes
        if not one.has_failed
    ]


def _last_instruction(process: _Process, program: Program) -> str:
    """Which instruction of which step the rank was at, from its event or from its mark."""
    index, step = array("q", process.mark.read_bytes())
    if process.failed is not None:
        index, step = process.failed["index"], process.failed["step"]
    if step is None or step < 0:
        return "before its first step"
    if index is None:
        return f"in step {step}"
    instruction = next(islice(program.instructions(), index, None), None)
    return f"in step {step} at instruction {index} ({instruction})"


def _report(processes: Sequence[_Process], traces: Sequence[dict[str, Any]]) -> RunReport:
    finished = {process.rank: process.done for process in processes if process.done is not None}
    first = finished[0]
    return RunReport(
        losses=tuple(first["losses"]),
        step_times_ns=tuple(first["step_times_ns"]),
        warmup_steps=first["warmup_steps"],
        gradient_check=first["gradient_check"],
        gradient_tolerance=first["gradient_tolerance"],
        loss_check=first["loss_check"],
        peak_memory_bytes=tuple(finished[rank]["peak_memory_bytes"] for rank in sorted(finished)),
        rank_traces=tuple(sorted(traces, key=lambda one: (one["step"], one["rank"]))),
    )


def _end(processes: Sequence[_Process]) -> None:
    """Leave nothing behind: first all die, then each is waited for."""
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.popen.pid, signal.SIGKILL)
    for process in processes:
        process.close()

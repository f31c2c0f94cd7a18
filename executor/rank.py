"""One rank of a run: ``python -m penstock.executor.rank``.

Reads one JSON line from stdin, its assignment::

    {rank, world_size, store: "host:port", prefix, program, job, directory, steps, seed, check, trace_steps, layers}

and, optional: ``device`` (torch's name, "cpu"), ``transport`` ("auto", or one of ``executor.transport``),
``boundaries`` (of the plan's profile: per cut ``[name, bytes_per_sample, gradient_bytes_per_sample]`` of each tensor),
``timeout_s`` (a peer silent for longer is taken for dead), ``listening`` (descriptor of the store's socket: this rank
hosts the store), ``mark`` (file of two native 64-bit integers where the index of the running instruction and the step
are kept), ``host`` (ranks of one host share a clock). ``layers`` null: not compared.

Writes JSON lines to stdout: ``ready``, per step ``{step, loss, time_ns}`` (rank 0: measured between barriers),
``trace`` with a ``rank_trace``, and at last ``done`` or ``failed {reason, instruction, index, step, traceback,
time_ns}``. What the job prints goes to stderr. A rank that fails ends at once, so that its peers notice; so does one
whose stdin is closed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from penstock.executor.actions import StepResult
from penstock.executor.chain import Chain, TensorShape
from penstock.executor.check import Check, CheckReport
from penstock.executor.check_model import refuse_other_layers
from penstock.executor.children import die_with
from penstock.executor.clocks import CommonClock, Reading, read_clock
from penstock.executor.gpu import open_device
from penstock.executor.interpreter import InstructionFailed, Interpreter, Mark
from penstock.executor.job import Job, load_job
from penstock.executor.peak import peak_of
from penstock.executor.trace import rank_trace
from penstock.executor.transport import (
    AUTO,
    agree_on_transport,
    connect,
    make_transport,
    process_groups,
    smallest,
    wait_for_all,
)
from penstock.schemas.errors import ModelMismatch, PenstockError
from penstock.schemas.program import Program

TIMEOUT_S = 60.0
WARMUP_STEPS = 1
"""Steps at the beginning that ``step_times_ns`` leaves out, where there are more."""

_TRACEBACK_LINES = 12
_SILENT = "Application timeout"


class Rank:
    """An assignment on its way from set-up to the last step; ``say`` writes an event."""

    def __init__(self, assignment: Mapping[str, Any], say: Any) -> None:
        self.assignment = assignment
        self.say = say
        self.mark: Mark = _open_mark(assignment.get("mark"))
        self.step = -1
        self.losses: list[float] = []
        self.times_ns: list[int] = []
        self.traced: list[tuple[int, list[int]]] = []
        self._clock: Reading | None = None

    def run(self) -> None:
        """Set up, train, compare, report. Raises whatever goes wrong."""
        given = self.assignment
        device = open_device(given.get("device", "cpu"))
        torch.set_num_threads(1)
        program = Program.from_json(given["program"])
        self.program = program
        job = load_job(given["job"], given.get("directory"))
        chain = checked_chain(job, program, given.get("layers"))
        shapes = chain.infer_shapes(range(program.row_classes[0][0]))
        refuse_other_boundaries(chain, shapes, given.get("boundaries"))
        self._peak = peak_of(device)
        timeout_s = float(given.get("timeout_s", TIMEOUT_S))
        store = connect(
            given["store"],
            prefix=given["prefix"],
            rank=program.rank,
            world_size=program.world_size,
            timeout_s=timeout_s,
            listening=given.get("listening"),
        )
        kind = agree_on_transport(given.get("transport", AUTO), device)
        groups = process_groups(program.groups, timeout_s, device if kind == "nccl" else None)
        transport = make_transport(kind, program, device, timeout_s)
        interpreter = Interpreter(
            program,
            chain,
            shapes,
            seed=given["seed"],
            transport=transport,
            groups=groups,
            device=device,
            mark=self.mark,
        )
        wait_for_all(store, "built", program.world_size)
        interpreter.agree()
        gc.collect()
        gc.freeze()
        self.say({"kind": "ready", "rank": program.rank})
        if min(given["steps"], given["trace_steps"]) > 0:
            self._clock = self._read_clock()
        check = Check(interpreter, store) if given["check"] else None
        self._train(interpreter, check)
        self._send_traces(interpreter)
        self._report(check.compare(0, self.losses[0]) if check is not None and self.losses else None)
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        transport.close()

    def _train(self, interpreter: Interpreter, check: Check | None) -> None:
        steps = self.assignment["steps"]
        first_traced = steps - min(steps, self.assignment["trace_steps"])
        for self.step in range(steps):
            self.mark[1] = self.step
            events: list[int] | None = [] if self.step >= first_traced else None
            interpreter.actions.before_step = check.keep if check is not None and self.step == 0 else None
            dist.barrier()
            start = time.perf_counter_ns()
            result = interpreter.step(self.step, events)
            dist.barrier()
            self._finish_step(result, time.perf_counter_ns() - start)
            if events is not None:
                self.traced.append((self.step, [start, *events]))

    def _finish_step(self, result: StepResult, time_ns: int) -> None:
        self.losses.append(result.loss)
        self.times_ns.append(time_ns)
        if self.program.rank == 0:
            self.say({"kind": "step", "step": self.step, "loss": result.loss, "time_ns": time_ns})

    def _read_clock(self) -> Reading:
        return read_clock(self.assignment.get("host") or _host())

    def _send_traces(self, interpreter: Interpreter) -> None:
        if self._clock is None:
            return
        clock = CommonClock(self._clock, self._read_clock())
        for step, own in self.traced:
            start, *events = clock.common_ns(own)
            document = rank_trace(
                rank=self.program.rank,
                device=self.program.device,
                step=step,
                instructions=interpreter.instructions,
                events=events,
                shift_ns=-smallest(start),
                peak_memory_bytes=self.peak_memory_bytes(),
                clock_error_ns=clock.error_ns,
            )
            self.say({"kind": "trace", "rank_trace": document})

    def _report(self, report: CheckReport | None) -> None:
        warmup = WARMUP_STEPS if len(self.times_ns) > WARMUP_STEPS else 0
        self.say(
            {
                "kind": "done",
                "rank": self.program.rank,
                "losses": self.losses,
                "step_times_ns": self.times_ns[warmup:],
                "warmup_steps": warmup,
                "gradient_check": None if report is None else report.difference,
                "gradient_tolerance": None if report is None else report.tolerance,
                "loss_check": None if report is None else report.loss_difference,
                "peak_memory_bytes": self.peak_memory_bytes(),
            }
        )

    def peak_memory_bytes(self) -> int:
        """The most that this rank has held since its model was looked at: of the GPU, or as a process."""
        return self._peak.bytes

    def failure(self, error: Exception) -> dict[str, Any]:
        """The event that tells of ``error``."""
        failed = error if isinstance(error, InstructionFailed) else None
        cause: BaseException = error.__cause__ if failed is not None and error.__cause__ is not None else error
        known = cause if isinstance(cause, PenstockError) else None
        return {
            "kind": "failed",
            "rank": self.assignment.get("rank"),
            "reason": str(known) if known is not None else self._said(cause),
            "error": type(cause).__name__,
            "detail": known.detail if known is not None else None,
            "remedy": known.remedy if known is not None else None,
            "instruction": str(failed.instruction) if failed is not None else None,
            "index": failed.index if failed is not None else None,
            "step": self.step if self.step >= 0 else None,
            "traceback": "".join(traceback.format_exception(cause)).splitlines()[-_TRACEBACK_LINES:],
            "time_ns": time.time_ns(),
        }

    def _said(self, error: BaseException) -> str:
        """The error's words; what gloo says of a silent peer, so that people understand it."""
        text = f"{type(error).__name__}: {error}"
        if _SILENT in text or "Timed out" in text:
            return f"timed out: a peer sent nothing for {self.assignment.get('timeout_s', TIMEOUT_S):g} s ({text})"
        return text


def checked_chain(job: Job, program: Program, layers: Sequence[str] | None) -> Chain:
    """The job's chain. Raises ModelMismatch naming the first layer that differs from the plan's ``layers``."""
    chain = Chain(job)
    if layers is not None:
        refuse_other_layers(job.name, chain.names, layers)
    if program.global_batch_size > job.batch_size:
        raise ModelMismatch(
            f"the plan's global batch has {program.global_batch_size} samples, "
            f"that of job {job.name!r} has {job.batch_size}",
            remedy=f"plan with --global-batch-size {job.batch_size}, or change the job's batch_size",
        )
    return chain


def refuse_other_boundaries(
    chain: Chain, shapes: Sequence[dict[str, TensorShape]], planned: Sequence[Sequence[Sequence[Any]]] | None
) -> None:
    """Raise ModelMismatch naming the first cut at which other tensors cross than in the plan's profile."""
    for i, (has, wanted) in enumerate(zip(shapes, planned or (), strict=False)):
        own = [
            [chain.tensor_name(i, k), shape.bytes_per_sample, shape.bytes_per_sample if shape.needs_grad else 0]
            for k, shape in enumerate(has.values())
        ]
        for mine, other in zip(own, map(list, wanted), strict=False):
            if mine != other:
                raise ModelMismatch(
                    f"after layer {chain.names[i]!r}: tensor {mine[0]!r} has {mine[1]} bytes per sample "
                    f"(gradient {mine[2]}), in the plan {other[0]!r} has {other[1]} (gradient {other[2]})",
                    remedy="profile this model and plan with that profile",
                )
        if len(own) != len(wanted):
            raise ModelMismatch(
                f"after layer {chain.names[i]!r} {len(own)} tensors cross, in the plan {len(wanted)}",
                remedy="profile this model and plan with that profile",
            )


def _open_mark(path: str | None) -> Mark:
    if path is None:
        return [0, -1]
    with Path(path).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 16)).cast("q")


def _host() -> str:
    """The same text in all processes that share this machine's clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _end_with_stdin(stdin: TextIO) -> None:
    """End with whoever started this rank, and take the processes that the job started along."""
    stdin.read()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(stdin: TextIO, events: TextIO) -> int:
    """Run the assignment on the first line of ``stdin``; ends the process at once when it fails."""
    lock = threading.Lock()

    def say(event: Mapping[str, Any]) -> None:
        with lock:
            events.write(json.dumps(event) + "\n")
            events.flush()

    line = stdin.readline()
    if not line:
        return 1
    threading.Thread(target=_end_with_stdin, args=(stdin,), daemon=True).start()
    rank = Rank(json.loads(line), say)
    try:
        rank.run()
    except Exception as error:
        say(rank.failure(error))
        os._exit(1)
    return 0


if __name__ == "__main__":
    die_with(os.getppid())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    code = main(sys.stdin, out)
    out.close()
    sys.stderr.flush()
    os._exit(code)

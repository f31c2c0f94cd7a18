"""One rank of a run: ``python -m penstock.executor.run.rank_main``.

Reads one JSON line from stdin, its assignment (`schemas.ranks.assignment.RankAssignment`).

Writes JSON lines to stdout:

* ``ready``;
* from rank 0: ``step {step, loss, time_ns}``, ``resumed {step, directory}``, ``checkpoint {step, directory}``,
  ``evaluation {step, loss}``, ``rung {step, index}`` and ``warning {step, text}``;
* ``trace`` with a ``rank_trace``;
* at the end ``done``, or ``left {step}`` where SIGTERM has reached a rank of a run with checkpoints (all ranks save
  after the same step and end), or
  ``failed {reason, instruction, index, layer, line, step, traceback, time_ns}``.

Output of the job goes to stderr. A rank that fails ends at once, so that its peers notice; so does a rank whose stdin
is closed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import torch
import torch.distributed as dist

from penstock.executor.checkpoints.checkpoint import About
from penstock.executor.checkpoints.outputs import Outputs
from penstock.executor.checkpoints.shutdown import GracefulShutdown, ShutdownRequested
from penstock.executor.children import die_with
from penstock.executor.host_memory import keep_freed_memory
from penstock.executor.profiling.peak import peak_of
from penstock.executor.program.agreement import refuse_disagreement, refuse_other_place
from penstock.executor.program.interpreter import InstructionFailed, Interpreter
from penstock.executor.program.mark import Mark, open_mark
from penstock.executor.program.neighbours import awaited
from penstock.executor.program.watchdog import Stuck, Watchdog
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.run.check import Check, CheckReport
from penstock.executor.run.clocks import CommonClock, Reading, read_clock
from penstock.executor.run.device_fit import refuse_other_devices
from penstock.executor.run.job import Job, load_job
from penstock.executor.run.job_fit import (
    checked_chain,
    refuse_missing_parts,
    refuse_other_boundaries,
    untrained_samples,
)
from penstock.executor.run.metrics import Metrics
from penstock.executor.run.trace import rank_trace
from penstock.executor.run.training import Course, Trainer
from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.hardware import Hardware, gather_places
from penstock.executor.runtime.opening import open_device
from penstock.executor.stage.precision import Training
from penstock.executor.torch_versions import untried
from penstock.executor.transport import (
    SETUP_LIMIT,
    agree_on_transport,
    connect,
    make_transport,
    process_groups,
    smallest,
    wait_for_all,
)
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument, PenstockError
from penstock.schemas.program import Instruction, Program
from penstock.schemas.ranks.assignment import RankAssignment

if TYPE_CHECKING:
    from penstock.executor.checkpoints.checkpoint_store import Checkpoints
    from penstock.executor.divided.division import Division
    from penstock.executor.divided.inventory import Inventory

TIMEOUT_S = 60.0
"""Least time limit of an instruction in seconds, from the second step on (`watchdog`)."""

_TRACEBACK_LINES = 12
_SILENT = "Application timeout"
_LATE = (
    "a GPU reports errors when something waits for it: an earlier instruction may have caused this one; "
    "CUDA_LAUNCH_BLOCKING=1 in the environment finds which"
)


class _Model(NamedTuple):
    """A job's layers, the tensors that cross its cuts, and its precision."""

    chain: Chain
    shapes: Sequence[dict[str, TensorShape]]
    training: Training


class RankStuck(InstructionFailed):
    """An instruction that did not end. ``stack``: the stack of its thread, as lines of text."""

    def __init__(self, index: int, instruction: Instruction, text: str, stack: Sequence[str]) -> None:
        super().__init__(index, instruction)
        self.text = text
        self.stack = stack

    def __str__(self) -> str:
        return self.text


class Rank:
    """The execution of an assignment from set-up to the last step; ``say`` writes an event.

    ``give_up`` ends the process for an error that its main thread cannot raise because it is stuck.
    """

    def __init__(self, assignment: RankAssignment, say: Any, give_up: Callable[[Exception], None]) -> None:
        self.assignment = assignment
        self.say = say
        self._give_up = give_up
        self.mark: Mark = open_mark(assignment.mark)
        self._outputs = Outputs.parse(assignment.outputs)
        self.options = RunOptions.parse(assignment.options)
        self._trainer: Trainer | None = None
        self._clock: Reading | None = None

    def run(self) -> None:
        """Set up, train, compare, report. Raises any error on the way."""
        assignment = self.assignment
        runtime = open_device(assignment.device)
        runtime.use_precision(self.options.precision)
        if assignment.check:
            runtime.reproducible()
        torch.set_num_threads(1)
        keep_freed_memory()
        self.programs = [Program.from_json(one) for one in assignment.programs]
        self.program = self.programs[0]
        if (why := untried()) is not None:
            self._report_first({"kind": "warning", "step": 0, "text": why})
        job = load_job(assignment.job, assignment.directory)
        model = self._model(job, runtime.device)
        self._peak = peak_of(runtime, counts_tensors=assignment.count_memory)
        store = self._connect()
        others = refuse_other_devices(runtime, self.program, kinds_differ=assignment.kinds_differ)
        for text in (others, untrained_samples(job, self.program)):
            if text is not None:
                self._report_first({"kind": "warning", "step": 0, "text": text})
        self._hardware = Hardware(runtime, self.program, gather_places(self.program.world_size))
        self._refuse_disagreement(job)
        kind = agree_on_transport(assignment.transport, runtime, self.programs)
        groups = process_groups(self.program.groups, SETUP_LIMIT, runtime if kind == "nccl" else CPU)
        division, model = self._division(groups, model, runtime.device)
        transport = make_transport(kind, self.program, runtime, SETUP_LIMIT)
        checkpoints = self._open_checkpoints(job)
        interpreter = Interpreter(
            self.programs,
            model.chain,
            model.shapes,
            seed=assignment.seed,
            transport=transport,
            groups=groups,
            runtime=runtime,
            mark=self.mark,
            training=model.training,
            division=division,
        )
        wait_for_all(store, "built", self.program.world_size)
        interpreter.agree()
        if kind == "nccl":
            interpreter.rehearse()
        course = self._course(checkpoints, interpreter)
        gc.collect()
        gc.freeze()
        self.say({"kind": "ready", "rank": self.program.rank})
        if min(assignment.steps, assignment.trace_steps) > 0:
            self._clock = self._read_clock()
        check = Check(interpreter, store, self._inventory(interpreter, groups, division)) if assignment.check else None
        self._hardware.begin()
        trainer = self._train(interpreter, course, checkpoints, check)
        self._measured = self._hardware.end()
        self._send_traces(trainer)
        self._report(trainer, check.compare(trainer.losses) if check is not None and trainer.losses else None, check)
        with contextlib.suppress(RuntimeError):
            dist.barrier()
        transport.close()

    def _inventory(
        self, interpreter: Interpreter, groups: Sequence[Any], division: Division | None
    ) -> Inventory | None:
        """Create the inventory of collectives; None where layers run in other precisions or orders than in traces."""
        training = interpreter.training
        if len(self.programs) > 1 or self.program.update_rule != "synchronous" or training.lowered:
            return None
        from penstock.executor.divided.inventory import Inventory  # DTensor takes a second to load

        return Inventory(self.program, interpreter.chain, division, groups, self.mark)

    def _train(
        self, interpreter: Interpreter, course: Course, checkpoints: Checkpoints | None, check: Check | None
    ) -> Trainer:
        """Run the course to its end; the caller reports the trainer's results."""
        metrics = self._open_metrics(course, interpreter)
        shutdown = None if checkpoints is None else GracefulShutdown()
        watchdog = self._watchdog()
        self._trainer = trainer = Trainer(
            interpreter,
            course,
            say=self.say,
            mark=self.mark,
            checkpoints=checkpoints,
            metrics=metrics,
            check=check,
            shutdown=shutdown,
            watchdog=watchdog,
        )
        with contextlib.nullcontext() if shutdown is None else shutdown.listening():
            trainer.train()
        watchdog.close()
        if metrics is not None:
            metrics.close()
        return trainer

    # Set-up

    def _model(self, job: Job, device: torch.device) -> _Model:
        """Build the job's model. ModelMismatch or UnsupportedRequest where it is not the model of the plan."""
        assignment, options = self.assignment, self.options
        refuse_missing_parts(job, options)
        chain = checked_chain(job, self.program, assignment.layers)
        training = Training(options.precision, options.clip_norm)
        shapes = chain.infer_shapes(range(self.program.row_classes[0][0]), training, device)
        refuse_other_boundaries(chain, shapes, assignment.boundaries, lowered=training.lowered)
        return _Model(chain, shapes, training)

    def _division(self, groups: Sequence[Any], model: _Model, device: torch.device) -> tuple[Division | None, _Model]:
        """Return the division of layers, and this rank's view of the model. Raises as ``divided_shapes``."""
        mesh = self.program.mesh
        if mesh is None:
            return None, model
        from penstock.executor.divided.crossing_tensors import divided_shapes, sizes_of
        from penstock.executor.divided.division import Division  # DTensor takes a second to load

        division = Division(mesh, groups, device)
        size = next(iter(sizes_of(self.program)), 1)
        return division, model._replace(shapes=divided_shapes(model.chain, model.shapes, division, size))

    def _watchdog(self) -> Watchdog:
        return Watchdog(self.mark, self._stuck, limit_s=self.assignment.timeout_s, least_s=TIMEOUT_S)

    def _stuck(self, stuck: Stuck) -> None:
        """End the process: its main thread does not return from an instruction."""
        assert self._trainer is not None
        interpreter = self._trainer.interpreter
        instruction = interpreter.instruction(stuck.number)
        peers = " or ".join(f"rank {rank}" for rank in awaited(interpreter.program, instruction)) or "a peer"
        text = (
            f"timed out: {peers} sent nothing for {stuck.for_s:.0f} s"
            if stuck.waits
            else f"has computed for {stuck.for_s:.0f} s, and waits for no peer"
        )
        self._give_up(RankStuck(stuck.number, instruction, text, stuck.stack))

    def _connect(self) -> Any:
        assignment = self.assignment
        refuse_other_place(self.program, assignment)
        return connect(
            assignment.store,
            prefix=assignment.prefix,
            rank=self.program.rank,
            world_size=self.program.world_size,
            timeout=SETUP_LIMIT,
            listening=assignment.listening,
        )

    def _refuse_disagreement(self, job: Job) -> None:
        refuse_disagreement(self.programs, self.assignment, self.options, job)

    def _open_checkpoints(self, job: Job) -> Checkpoints | None:
        """Open the place of checkpoints, which is checked before anything is built."""
        assignment, options, program = self.assignment, self.options, self.program
        if options.checkpoint_directory is None:
            return None
        from penstock.executor.checkpoints.checkpoint_store import Checkpoints  # a second, mostly torch's

        about = About(
            step=0,
            batches=0,
            job=job.name,
            seed=assignment.seed,
            update_rule=program.update_rule,
            pipelines=program.pipelines,
            global_batch_size=program.global_batch_size,
            plan_hash=assignment.plan_hash,
            torch_version=torch.__version__,
        )
        return Checkpoints(
            options.checkpoint_directory, options.keep_checkpoints, about, assignment.prefix, self._outputs
        )

    def _course(self, checkpoints: Checkpoints | None, interpreter: Interpreter) -> Course:
        """Return the rest of the training, after the newest checkpoint if requested. NotFound without a checkpoint."""
        assignment, options = self.assignment, self.options
        first_step = 0
        if checkpoints is not None:
            checkpoints.refuse_unwritable(interpreter)
            if options.resume:
                auto = options.resume == "auto"
                first_step = checkpoints.resume(interpreter, self._report_first, may_start_anew=auto)
        expected = assignment.first_step
        if expected is not None and expected != first_step:
            raise InvalidDocument(
                f"the programs start at step {expected}, but the newest checkpoint is of step {first_step}"
            )
        return Course(
            steps=assignment.steps,
            first_step=first_step,
            trace_steps=assignment.trace_steps,
            segments=self.segments(first_step),
            options=options,
        )

    def segments(self, first_step: int) -> tuple[int, ...] | None:
        """Return the numbers of the programs from ``first_step`` on; None where steps are run one by one."""
        segments = self.assignment.segments
        if segments is None:
            return None
        begun = 0 if self.assignment.first_step is not None else len(self.options.segments(0, first_step))
        return segments[begun:]

    def _open_metrics(self, course: Course, interpreter: Interpreter) -> Metrics | None:
        options = self.options
        paths = (options.metrics_path, options.tensorboard_directory)
        if self.program.rank != 0 or not any(paths):
            return None
        return Metrics(*paths, course.first_step, interpreter, self._outputs)

    def _report_first(self, event: Mapping[str, Any]) -> None:
        if self.program.rank == 0:
            self.say(event)

    # Reports

    def _read_clock(self) -> Reading:
        return read_clock(self.assignment.host or _host())

    def _send_traces(self, trainer: Trainer) -> None:
        if self._clock is None:
            return
        clock = CommonClock(self._clock, self._read_clock())
        for step, program, times_ns in trainer.traced:
            start, *events = clock.common_ns(times_ns)
            document = rank_trace(
                rank=self.program.rank,
                device=self.program.device,
                step=step,
                instructions=tuple(program.instructions()),
                events=events,
                shift_ns=-smallest(start),
                peak_memory_bytes=self.peak_memory_bytes(),
                batches=program.batches,
                clock_error_ns=clock.error_ns,
                hardware=self._measured,
            )
            self.say({"kind": "trace", "rank_trace": document})

    def _report(self, trainer: Trainer, report: CheckReport | None, check: Check | None) -> None:
        inventory = None if check is None else check.inventory
        self.say(
            {
                "kind": "done",
                "rank": self.program.rank,
                "first_step": trainer.course.first_step,
                "losses": trainer.losses,
                "step_times_ns": trainer.times_ns[trainer.warmup_steps :],
                "warmup_steps": trainer.warmup_steps,
                "gradient_check": None if report is None else report.difference,
                "gradient_tolerance": None if report is None else report.tolerance,
                "loss_check": None if report is None else report.loss_difference,
                "collectives": None if inventory is None else dict(inventory.ran),
                "collectives_differ": None if inventory is None else inventory.difference,
                "peak_memory_bytes": self.peak_memory_bytes(),
                "reserved_memory_bytes": self._peak.reserved_bytes,
                "hardware": self._measured,
            }
        )

    def peak_memory_bytes(self) -> int:
        """Return the most bytes that this rank held since its model was read: of the GPU, or of the process."""
        return self._peak.bytes

    def failure(self, error: Exception) -> dict[str, Any]:
        """Return the event that reports ``error``."""
        failed = error if isinstance(error, InstructionFailed) else None
        cause: BaseException = error.__cause__ if failed is not None and error.__cause__ is not None else error
        penstock_error = cause if isinstance(cause, PenstockError) else None
        return {
            "kind": "failed",
            "rank": self.assignment.rank,
            "reason": (str(penstock_error) if penstock_error is not None else self._message(cause)) + _place(failed),
            "error": type(cause).__name__,
            "detail": penstock_error.detail if penstock_error is not None else None,
            "remedy": penstock_error.remedy if penstock_error is not None else None,
            "instruction": str(failed.instruction) if failed is not None else None,
            "index": failed.index if failed is not None else None,
            "layer": failed.layer if failed is not None else None,
            "line": failed.line if failed is not None else None,
            "step": None if self._trainer is None else self._trainer.step,
            "traceback": list(error.stack)
            if isinstance(error, RankStuck)
            else "".join(traceback.format_exception(cause)).splitlines()[-_TRACEBACK_LINES:],
            "time_ns": time.time_ns(),
        }

    def _message(self, error: BaseException) -> str:
        """Return the error's message, with an explanation where people need one."""
        if isinstance(error, RankStuck):
            return str(error)
        text = f"{type(error).__name__}: {error}"
        if _SILENT in text or "Timed out" in text:
            return f"timed out: a peer sent nothing for {SETUP_LIMIT.total_seconds():g} s ({text})"
        if "CUDA error" in text or "cuBLAS" in text or "cuDNN" in text:
            return f"{text} ({_LATE})"
        return text


def _place(failed: InstructionFailed | None) -> str:
    """Return the layer of the job that failed, and the line of the user's code, where they are known."""
    if failed is None:
        return ""
    layer = None if failed.layer is None else f"in layer {failed.layer!r}"
    parts = [part for part in (layer, failed.line) if part is not None]
    return f" ({', '.join(parts)})" if parts else ""


def _host() -> str:
    """Return a text that is equal in all processes that share this machine's clock."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _end_with_stdin(stdin: TextIO) -> None:
    """End with the process that started this rank, and end the processes that the job started."""
    stdin.read()
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def main(stdin: TextIO, events: TextIO) -> int:
    """Run the assignment on the first line of ``stdin``. The process ends at once when it fails."""
    lock = threading.Lock()

    def say(event: Mapping[str, Any]) -> None:
        with lock:
            events.write(json.dumps(event) + "\n")
            events.flush()

    line = stdin.readline()
    if not line:
        return 1
    threading.Thread(target=_end_with_stdin, args=(stdin,), daemon=True).start()

    def give_up(error: Exception) -> None:
        say(rank.failure(error))
        os._exit(1)

    rank = Rank(RankAssignment.from_json(json.loads(line)), say, give_up)
    try:
        rank.run()
    except ShutdownRequested as shutdown:
        say({"kind": "left", "rank": rank.assignment.rank, "step": shutdown.step})
    except Exception as error:
        give_up(error)
    return 0


if __name__ == "__main__":
    die_with(os.getppid())
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    code = main(sys.stdin, out)
    out.close()
    sys.stderr.flush()
    os._exit(code)

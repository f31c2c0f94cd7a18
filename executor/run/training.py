"""A run from its first step to its last: single steps or flushed segments, evaluations, checkpoints, reports.

A *halt* is a step after which something besides training is done: an evaluation, a checkpoint, the end. Programs of one
global batch run step by step. Programs of periodic plans, which train several batches and end flushed, run from one
halt to the next (``RunOptions.segments``). All ranks have the same halts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.executor.checkpoints.checkpoint import CheckpointFailed
from penstock.executor.checkpoints.shutdown import GracefulShutdown, ShutdownRequested
from penstock.executor.program.actions import StepResult
from penstock.executor.program.interpreter import Interpreter
from penstock.executor.program.ladder import Ladder
from penstock.executor.program.mark import Mark
from penstock.executor.program.watchdog import Watchdog
from penstock.executor.run.check import Check
from penstock.executor.run.metrics import Metrics
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument, NonfiniteLoss
from penstock.schemas.program import Program

if TYPE_CHECKING:
    from penstock.executor.checkpoints.checkpoint_store import Checkpoints

Say = Callable[[Mapping[str, Any]], None]

WARMUP_STEPS = 1
"""Steps at the beginning that ``step_times_ns`` leaves out, where there are more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The steps to train, [``first_step``, ``steps``), of which the last ``trace_steps`` are traced.

    ``segments``: the program of each segment from ``first_step`` on, by number; None: steps are run one by one.
    """

    steps: int
    first_step: int = 0
    trace_steps: int = 0
    segments: tuple[int, ...] | None = None
    options: RunOptions = field(default_factory=RunOptions)

    def lengths(self) -> list[int]:
        """Return the steps of each segment. Raises InvalidDocument for another number of ``segments``."""
        lengths = self.options.segments(self.first_step, self.steps)
        if self.segments is not None and len(self.segments) != len(lengths):
            raise InvalidDocument(
                f"the assignment has {len(self.segments)} segments; from step {self.first_step} to {self.steps} there "
                f"are {len(lengths)} between checkpoints and evaluations"
            )
        return lengths


class Trainer:
    """A trainer of a course, which keeps the results to report: losses, times and traces of this rank.

    ``step``: the step that is being trained. ``done``: the number of steps that are done. ``checkpoints``: None where
    none are written. ``check``: a recorder of the gradients of the first steps. ``watchdog``: a thread that watches the
    steps. ``shutdown``: a request to end, read after each step where there are checkpoints.
    """

    def __init__(
        self,
        interpreter: Interpreter,
        course: Course,
        *,
        say: Say,
        mark: Mark,
        checkpoints: Checkpoints | None = None,
        metrics: Metrics | None = None,
        check: Check | None = None,
        shutdown: GracefulShutdown | None = None,
        watchdog: Watchdog | None = None,
    ) -> None:
        self.interpreter = interpreter
        self.course = course
        self.step = self.done = course.first_step
        self.losses: list[float] = []
        self.times_ns: list[int] = []
        self.traced: list[tuple[int, Program, list[int]]] = []
        self._say = say
        self._mark = mark
        self._checkpoints = checkpoints
        self._metrics = metrics
        self._check = check
        self._shutdown = shutdown
        self._watchdog = watchdog
        self._is_finite = True
        self._trouble: str | None = None
        self._is_first_rank = interpreter.program.rank == 0
        self._ladder = self._make_ladder()

    def train(self) -> None:
        """Train the course to its end.

        Raises InstructionFailed, CheckpointFailed for the last checkpoint, NonfiniteLoss, and ShutdownRequested.
        """
        segments = self.course.segments
        for k, length in enumerate(self.course.lengths()):
            dist.barrier()  # not watched: the slowest rank may still be setting up
            if segments is None:
                for _ in range(length):
                    self._single_step()
                    self._refuse_nonfinite()
                    self._leave_if_requested()
            else:
                self._flushed(segments[k], length)
                self._refuse_nonfinite()
                self._leave_if_requested()
            self._halt()
            self._refuse_nonfinite()

    @property
    def warmup_steps(self) -> int:
        """The number of leading ``times_ns`` of a rank that is still warming up."""
        return WARMUP_STEPS if len(self.times_ns) > WARMUP_STEPS else 0

    # Steps

    def _single_step(self) -> None:
        """Run one step between barriers, so that its time is the slowest rank's time."""
        interpreter, step = self.interpreter, self.step
        self._mark[1] = step
        events = self._events(step + 1)
        interpreter.actions.before_step = None if self._check is None else self._check.keep
        with self._watched():
            dist.barrier()
            start = time.perf_counter_ns()
            with nullcontext() if self._check is None else self._check.watching(step):
                result = interpreter.step(step, events)
                dist.barrier()
            time_ns = time.perf_counter_ns() - start
        self._finish(step, result, time_ns)
        if events is not None:
            self.traced.append((step, interpreter.program, [start, *events]))
        if self._ladder is not None:
            self._climb(self._ladder, time_ns)

    def _flushed(self, program: int, length: int) -> None:
        """Run several steps by one program; each is reported when its loss is known."""
        interpreter, first = self.interpreter, self.step
        interpreter.use(program)
        if interpreter.program.batches != length:
            raise InvalidDocument(
                f"program {program} trains {interpreter.program.batches} global batches; "
                f"the segment at step {first} has {length}"
            )
        self._mark[1] = first
        events = self._events(first + length)
        interpreter.actions.before_step = None if self._check is None else self._check.keep
        start = time.perf_counter_ns()
        with self._watched():
            interpreter.run(first, self._finish, events)
            dist.barrier()
        if events is not None:
            self.traced.append((first, interpreter.program, [start, *events]))

    def _events(self, end: int) -> list[int] | None:
        """Return a list for the trace of steps up to ``end``; None where they are not traced."""
        course = self.course
        traced = min(course.steps - course.first_step, course.trace_steps)
        return [] if end > course.steps - traced else None

    def _watched(self) -> AbstractContextManager[None]:
        """Create a context in which the watchdog notices steps, and agreements after them, that do not end."""
        return nullcontext() if self._watchdog is None else self._watchdog.watching()

    def _finish(self, step: int, result: StepResult, time_ns: int) -> None:
        if self._watchdog is not None and not self.times_ns:
            self._watchdog.first_step_took(time_ns / 1e9)
        self.losses.append(result.loss)
        self.times_ns.append(time_ns)
        self.done = self.step = step + 1
        self._mark[1] = min(self.step, self.course.steps - 1)
        if not math.isfinite(result.loss):
            self._is_finite = False
            self._note_trouble(f"the loss of step {step} is {result.loss}")
        if self._is_first_rank:
            self._say({"kind": "step", "step": step, "loss": result.loss, "time_ns": time_ns})
            if self._metrics is not None:
                self._metrics.step(step, result.loss, time_ns)

    # Values that are not finite

    def _note_trouble(self, text: str) -> None:
        """Report the first value that is not finite."""
        if self._trouble is None:
            self._trouble = text
            if self._is_first_rank:
                self._say({"kind": "warning", "step": self.done, "text": text})

    def _refuse_nonfinite(self) -> None:
        """Raise NonfiniteLoss, on all ranks after the same step, unless the options allow it."""
        if self._trouble is None or self.course.options.allow_nonfinite_loss:
            return
        kept = "no checkpoint" if self._checkpoints is None else self._checkpoints.kept()
        raise NonfiniteLoss(
            f"{self._trouble}: training ends after {self.done} steps; there is {kept}",
            remedy="lower the learning rate, clip the gradient's norm, or compute in more bits; "
            "allow_nonfinite_loss (--allow-nonfinite-loss) lets training go on",
        )

    # The ladder

    def _make_ladder(self) -> Ladder | None:
        return Ladder(self.interpreter.num_programs) if self.course.options.advance_forward else None

    def _climb(self, ladder: Ladder, time_ns: int) -> None:
        """Pass the same time, rank 0's, to all ranks' ladders (AvgPipe, Algorithm 1)."""
        if ladder.settled:
            return
        before = ladder.rung
        shared = torch.tensor([time_ns], dtype=torch.int64)
        with self._watched():
            dist.broadcast(shared, src=0)
        rung = ladder.after_step(int(shared.item()))
        if rung != before:
            self.interpreter.use(rung)
            if self._is_first_rank:
                self._say({"kind": "rung", "step": self.done, "index": rung})

    # Halts

    def _halt(self) -> None:
        options, at_end = self.course.options, self.done == self.course.steps
        if options.evaluate_every and (at_end or self.done % options.evaluate_every == 0):
            self._evaluate()
        due = options.checkpoint_every and self.done % options.checkpoint_every == 0
        if self._checkpoints is not None and (at_end or due):
            self._save(self._checkpoints, at_end)

    def _leave_if_requested(self) -> None:
        """Save and end, where a rank was asked to end and steps are left."""
        if self._shutdown is None or self._checkpoints is None or self.done == self.course.steps:
            return
        with self._watched():
            agreed = self._shutdown.agreed()
        if agreed:
            self._save(self._checkpoints, at_end=True)
            raise ShutdownRequested(self.done)

    def _evaluate(self) -> None:
        interpreter = self.interpreter
        job: Any = interpreter.chain.job
        result = interpreter.evaluate(range(job.num_evaluation_batches))
        if self._is_first_rank:
            self._say({"kind": "evaluation", "step": self.done, "loss": result.loss})
            if self._metrics is not None:
                self._metrics.evaluation(self.done, result.loss)

    def _save(self, checkpoints: Checkpoints, at_end: bool) -> None:
        """Write a checkpoint. A failure ends the run only at the last checkpoint."""
        try:
            written = checkpoints.save(self.interpreter, self.done, is_finite=self._is_finite)
        except CheckpointFailed as error:
            if at_end:
                raise
            if self._is_first_rank:
                self._say({"kind": "warning", "step": self.done, "text": f"{error}; training goes on"})
        else:
            if self._is_first_rank:
                self._say({"kind": "checkpoint", "step": self.done, "directory": str(written.directory)})
            if self._is_finite and not written.about.is_finite:
                self._note_trouble(f"a parameter is not finite after {self.done} steps")
            self._is_finite = True

"""The interpreter of one rank's program: every instruction is a bound method with its arguments, prepared once.

The step itself decides nothing: messages, rows and random states are fixed when the program is bound. Gradients belong
to the mean loss over the global batch: each backward starts from 1 / (terms expected in the global batch). If a batch
has another number of terms, gradients are corrected before the optimizer's step. Under weight stashing each micro-batch
has a separate mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from penstock.executor.program.actions import Actions, OnBatch
from penstock.executor.program.binding import Binder, Bound, Code, first_row
from penstock.executor.program.global_batch import Source, StepResult
from penstock.executor.program.mark import Mark
from penstock.executor.program.rehearsal import rehearse
from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.interface import Runtime, Timer
from penstock.executor.stage.gradient_norm import GradientNorm
from penstock.executor.stage.held_stage import HeldStage, Holder, refuse_other_stages
from penstock.executor.stage.precision import FULL, Training, kept_casts
from penstock.executor.stage.segment import blame
from penstock.executor.stage.stage_module import StageModule
from penstock.executor.stage.ties import refuse_untied
from penstock.executor.transport import Transport, sum_of_pairs
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import Instruction, Program

if TYPE_CHECKING:
    from penstock.executor.divided.division import Division

__all__ = ["InstructionFailed", "Interpreter", "StepResult", "first_row"]


class InstructionFailed(Exception):
    """An exception of an instruction; its cause is in ``__cause__``.

    ``layer``: the layer of the job that ran. ``line``: the line of the user's code, as ``file:line``. None if unknown.
    """

    def __init__(self, index: int, instruction: Instruction, layer: str | None = None, line: str | None = None) -> None:
        super().__init__(f"instruction {index} ({instruction}) failed")
        self.index = index
        self.instruction = instruction
        self.layer = layer
        self.line = line


class Interpreter:
    """Programs bound to a job's layers, ready to run.

    ``programs``: one, or several that share their stages (``use`` chooses): a ladder, or segments of several lengths.
    ``groups``: the process groups of the program, by number. ``mark``: the place of the index of the running
    instruction, for a process that watches this one. ``division``: the way in which this rank shares layers, with
    ``shapes`` from ``divided.crossing_tensors``. ``agree`` must be called before the first step. Raises ModelMismatch
    where the model has gradients that the plan does not send.
    """

    def __init__(
        self,
        programs: Program | Sequence[Program],
        chain: Chain,
        shapes: Sequence[dict[str, TensorShape]],
        *,
        seed: int,
        transport: Transport,
        groups: Sequence[Any] = (),
        runtime: Runtime = CPU,
        mark: Mark | None = None,
        training: Training = FULL,
        division: Division | None = None,
    ) -> None:
        self.programs = (programs,) if isinstance(programs, Program) else tuple(programs)
        refuse_other_stages(self.programs)
        stage_ranges = [(one.first, one.last) for one in self.programs[0].stages]
        refuse_untied(chain.ties, stage_ranges, [(tie.name, tie.layers) for tie in self.programs[0].shared])
        self.chain = chain
        self.shapes = shapes
        self.seed = seed
        self.runtime = runtime
        self.mark: Mark = mark if mark is not None else [0]
        self.training = training
        self.actions = Actions(transport, runtime.device)
        self.stages: dict[int, HeldStage] = Holder(
            self.programs, chain, shapes, groups, seed=seed, runtime=runtime, training=training, division=division
        ).stages()
        self.actions.norm = self._norm()
        self.source = self._source(division)
        self._bound = [self._binder(program).bind() for program in self.programs]
        self._evaluations: dict[int, Code] = {}
        self._counted = self._count_first_terms()
        for stage in self.stages.values():
            if stage.shards is not None:
                stage.shards.settle()
        self.use(0)

    # Programs

    @property
    def num_programs(self) -> int:
        """The number of programs from which ``use`` chooses."""
        return len(self.programs)

    @property
    def program(self) -> Program:
        """The program in use."""
        return self.bound.program

    @property
    def instructions(self) -> tuple[Instruction, ...]:
        """The instructions of the program in use, the loop unrolled."""
        return tuple(self.program.instructions())

    @property
    def expected_count(self) -> float:
        """The number of terms of the global batch's loss that each backward assumes."""
        return self.actions.expected_count

    def use(self, index: int) -> None:
        """Run program ``index`` from now on. All ranks must call this between the same two runs."""
        self.index = index
        self.bound: Bound = self._bound[index]

    def agree(self) -> None:
        """Agree on ``expected_count``, as if all samples had as many terms as the first ones; collective, once.

        Raises InvalidDocument when there are no terms.
        """
        count, rows = sum_of_pairs(*self._counted)
        if count <= 0:
            raise InvalidDocument("the loss of the first micro-batch has no terms, so no mean can be taken")
        self.actions.expected_count = count * self.program.global_batch_size / rows
        for stage in self.stages.values():
            stage.module.count = self.actions.expected_count
        if self.actions.norm is not None:
            self.actions.norm.begin(self.actions.expected_count)
        self.source.agree()

    def rehearse(self) -> None:
        """Let the device load the stages' kernels before the first step over NCCL; after ``agree``."""
        cells = [
            (number, bound.program.size_of(cell.number), cell)
            for bound in self._bound
            for (number, _), cell in bound.cells.items()
        ]
        with self._whole():
            rehearse(cells, self.stages, self.shapes, self.chain, self.runtime)

    def step(self, number: int, events: list[int] | None = None) -> StepResult:
        """Run a program of one global batch (elastic averaging: one per pipeline).

        ``events`` gets start and end (``perf_counter_ns``) of each instruction, in order. A computation starts when its
        messages have arrived. Raises InstructionFailed.
        """
        self._run(number, events)
        return self.bound.batches[0].finish()

    def run(self, first_step: int, on_batch: OnBatch | None = None, events: list[int] | None = None) -> None:
        """Run a program from global batch ``first_step`` to its end, where everything is flushed.

        ``on_batch`` is called with each step, its result, and the time since the previous one (ns), when the step's
        last update is complete here. ``events`` as in ``step``. Raises InstructionFailed.
        """
        self.actions.on_batch = on_batch
        try:
            self._run(first_step, events)
            for batch in sorted(self.bound.batches, key=lambda batch: batch.step):
                self.actions.report(batch, at_end=True)
        finally:
            self.actions.on_batch = None

    def _run(self, first_step: int, events: list[int] | None) -> None:
        bound = self.bound
        self._first_step, self._opened = first_step, 0
        self.source.counting.clear()
        self.source.unreported.clear()
        self.actions.begin()
        for stage in self.stages.values():
            if stage.versions is not None:
                stage.versions.use(0)
            stage.clear_gradients()
        at, timer = 0, None if events is None else self.runtime.timer()
        with kept_casts() if self.training.lowered else nullcontext():
            for code, highest in self._segments(bound):
                self._open(highest)
                self._begin(code)
                self._execute(code, at, timer)
                at += len(code.calls)
        self.actions.transport.drain()
        if events is not None and timer is not None:
            events.extend(timer.read_ns())

    def _begin(self, code: Code) -> None:
        """Begin a segment; the transport has to know whether it runs for the first time."""
        self.actions.transport.begin(is_first=not code.has_run)
        code.has_run = True

    def _segments(self, bound: Bound) -> Iterator[tuple[Code, int]]:
        """Yield the program's segments in order, with the last global batch that each may begin."""
        first, body, last = bound.window.highest
        yield bound.prologue, first
        for i in range(bound.program.repeat if bound.phases else 0):
            yield bound.phases[i % len(bound.phases)], body + i * bound.program.body_batches
        yield bound.epilogue, last

    def _open(self, highest: int) -> None:
        batches = self.bound.batches
        while self._opened <= highest:
            batches[self._opened % len(batches)].open(self._first_step + self._opened)
            self._opened += 1

    def _execute(self, code: Code, at: int, timer: Timer | None) -> None:
        mark = self.mark
        index = at
        try:
            if timer is None:
                for index, (function, arguments) in enumerate(code.calls, at):
                    mark[0] = index
                    function(*arguments)
            else:
                now = timer.mark
                for index, ((function, arguments), arrivals) in enumerate(zip(code.calls, code.waits, strict=True), at):
                    mark[0] = index
                    if arrivals is not None:
                        arrivals()
                    now()
                    function(*arguments)
                    now()
        except Exception as error:
            culprit = blame(error, self.chain.names)
            raise InstructionFailed(index, self.instruction(index), culprit.layer, culprit.line) from error

    def instruction(self, index: int) -> Instruction:
        """Return the instruction with this index in a run of the program in use, as the mark counts them."""
        program = self.program
        if not program.body_batches:
            return self.instructions[index]
        head = len(program.prologue)
        i, place = divmod(index - head, len(program.body))
        if index < head:
            return program.prologue[index]
        if i < program.repeat:
            return tuple(program.repetition(i))[place]
        return program.epilogue[index - head - program.repeat * len(program.body)]

    # Evaluation

    def evaluate(self, numbers: Iterable[int]) -> StepResult:
        """Evaluate the job's mean loss over all terms of these evaluation batches, without gradients; collective.

        It uses the newest weights. Under elastic averaging it uses the reference model, and the pipelines share out the
        batches. Raises InstructionFailed.
        """
        if self.index not in self._evaluations:
            self._evaluations[self.index] = self._binder(self.program, self.bound).bind_evaluation()
        code, batch = self._evaluations[self.index], self.bound.batches[0]
        self._begin(code)
        restored = self._enter_evaluation()
        total, count = 0.0, 0
        with torch.no_grad(), self._whole():
            for number in list(numbers)[self.source.lane :: self.source.lanes]:
                batch.open_evaluation(number)
                for function, arguments in code.calls:
                    function(*arguments)
                loss, terms = batch.take_losses()
                total, count = total + loss, count + terms
        self.actions.transport.drain()
        self._leave_evaluation(restored)
        total, terms_of_all = sum_of_pairs(total, count)
        if terms_of_all <= 0:
            raise InvalidDocument("the evaluation's loss has no terms; its mean is undefined")
        mean = total / terms_of_all
        return StepResult(mean, round(terms_of_all), (mean,))

    def _whole(self) -> ExitStack:
        """Create a context in which the stages have whole parameters, except parameters that operations gather."""
        stack = ExitStack()
        for stage in self.stages.values():
            if stage.shards is not None:
                stack.enter_context(stage.shards.whole())
        return stack

    def _enter_evaluation(self) -> list[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Set the weights that are evaluated; return the weights to restore afterwards."""
        replaced = []
        for work in [work for stage in self.stages.values() for work in stage.share_buffers()]:
            work.wait()
        for stage in self.stages.values():
            for layer in stage.module.modules.values():
                layer.eval()
            if stage.versions is not None:
                stage.versions.point_at(stage.versions.live[0])
            if stage.averaging is not None:
                for parameter, reference in stage.averaging.reference():
                    replaced.append((parameter, parameter.detach().clone()))
                    parameter.data.copy_(reference)  # in place: where ranks share layers, the layers have the storage
        return replaced

    def _leave_evaluation(self, replaced: Iterable[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        for parameter, original in replaced:
            parameter.data.copy_(original)
        for stage in self.stages.values():
            for layer in stage.module.modules.values():
                layer.train()

    # Set-up

    def _binder(self, program: Program, bound: Bound | None = None) -> Binder:
        return Binder(program, self.stages, self.actions, self.chain, self.shapes, self.source, bound)

    def _norm(self) -> GradientNorm | None:
        """Create the norm of all gradients, if programs compute it. InvalidDocument if they lack a needed norm."""
        has_norm = all(any(one.kind == "NORM" for one in (*p.prologue, *p.body, *p.epilogue)) for p in self.programs)
        if not has_norm:
            if self.training.needs_norm:
                raise InvalidDocument(
                    f"clip_norm {self.training.clip_norm} and precision {self.training.precision!r} need the norm of "
                    f"all gradients, but the programs of rank {self.programs[0].rank} have no NORM",
                    remedy="lower the programs with norm=True",
                )
            return None
        counted = [parameter for stage in self.stages.values() for parameter in stage.counted]
        return GradientNorm(self.training, counted, [stage.module for stage in self.stages.values()], self.runtime)

    def _source(self, division: Division | None) -> Source:
        """Create the source of batches; under elastic averaging each pipeline has separate global batches."""
        program = self.programs[0]
        lanes = program.pipelines if program.update_rule == "elastic_averaging" else 1
        lane = program.stages[0].pipeline if lanes > 1 and program.stages else 0
        context = None if division is None else division.context
        return Source(self.chain, self.runtime, self.seed, lane, lanes, context)

    def _count_first_terms(self) -> tuple[int, int]:
        """Count the loss's terms and the rows of the first micro-batch of step 0; 0 and 0 without the last stage."""
        cells = self._bound[0].cells
        for stage in self.stages.values():
            busy = [cell.rows for (number, _), cell in cells.items() if number == stage.entry.stage and len(cell.rows)]
            if stage.module.is_last and stage.entry.replica == 0 and busy:
                terms = self._terms(stage.module, busy[0])
                module = stage.module
                return (terms if module.counts_loss else 0, len(busy[0]) if module.counts_rows else 0)
        return 0, 0

    def _terms(self, stage: StageModule, rows: range) -> int:
        """Count the terms of the loss over some rows of step 0, with zeros for tensors from other stages."""
        before = self.shapes[stage.first - 1].values() if stage.first else ()
        zeros = [
            torch.zeros((len(rows), *one.sample_shape), dtype=one.dtype, device=self.runtime.device) for one in before
        ]
        return stage.count_terms(zeros, *self.source.read(0, rows))

"""Runs one rank's program: every instruction is a bound method with its arguments, prepared once.

No decision is left to the step itself: what is sent where, which rows, which random state, is fixed when the program
is bound. Gradients are those of the mean loss over the global batch: each backward starts from 1 / (terms expected in
the global batch); should a batch have another number of terms, gradients are corrected before the optimizer's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from penstock.executor.actions import Actions, HeldStage, Message, StepResult
from penstock.executor.chain import Chain, TensorShape
from penstock.executor.codec import carrier
from penstock.executor.reduction import Reduction
from penstock.executor.stage_module import MicroBatch, StageModule, step_seed
from penstock.executor.transport import Transport, sum_of_pairs
from penstock.schemas.errors import InvalidDocument, ModelMismatch, UnsupportedRequest
from penstock.schemas.program import Channel, Held, Instruction, Program

Call = tuple[Callable[..., None], tuple[Any, ...]]
Mark: TypeAlias = "list[int] | memoryview[int]"
_NOT_EXECUTED = ("I", "W", "PASS")


class InstructionFailed(Exception):
    """An instruction raised; the cause is the exception's ``__cause__``."""

    def __init__(self, index: int, instruction: Instruction) -> None:
        super().__init__(f"instruction {index} ({instruction}) failed")
        self.index = index
        self.instruction = instruction


class Interpreter:
    """A program bound to a job's layers, ready to run steps.

    ``groups``: the process groups of the program, by number. ``mark``: where the index of the running instruction is
    written, for whoever watches this process. ``agree`` comes before the first step. Raises UnsupportedRequest for
    instructions that are not executed here, ModelMismatch where the plan sends no gradients that the model has.
    """

    def __init__(
        self,
        program: Program,
        chain: Chain,
        shapes: Sequence[dict[str, TensorShape]],
        *,
        seed: int,
        transport: Transport,
        groups: Sequence[Any] = (),
        device: torch.device | str = "cpu",
        mark: Mark | None = None,
    ) -> None:
        _refuse(program)
        self.program = program
        self.chain = chain
        self.shapes = shapes
        self.seed = seed
        self.device = torch.device(device)
        self.mark: Mark = mark if mark is not None else [0]
        self.instructions = tuple(program.instructions())
        self.actions = Actions(chain, transport, self.device)
        self._carriers = [carrier(channel, transport) for channel in program.channels]
        self.stages = {held.stage: self._hold(held, groups) for held in program.stages}
        self._count_batch_uses()
        self._counted = self._count_first_terms()
        self.code = self._bind()
        self.waits = [self._wait_of(one) for one in self.instructions]

    @property
    def expected_count(self) -> float:
        """The terms that each backward takes the global batch's loss to have."""
        return self.actions.expected_count

    def agree(self) -> None:
        """Agree with all ranks on ``expected_count``: as if all samples had as many as the first; collective, once.

        Raises InvalidDocument when there are none.
        """
        count, rows = sum_of_pairs(*self._counted)
        if count <= 0:
            raise InvalidDocument("the loss of the first micro-batch has no terms, so no mean can be taken")
        self.actions.expected_count = count * self.program.global_batch_size / rows
        for stage in self.stages.values():
            stage.module.count = self.actions.expected_count

    def step(self, number: int, events: list[int] | None = None) -> StepResult:
        """Run one step. ``events`` gets start and end (``perf_counter_ns``) of each instruction, in order.

        The start of a computation is when its messages are there. Raises InstructionFailed.
        """
        self._begin(number)
        mark = self.mark
        index = 0
        try:
            if events is None:
                for index, (function, arguments) in enumerate(self.code):
                    mark[0] = index
                    function(*arguments)
            else:
                clock, add = time.perf_counter_ns, events.append
                for index, (function, arguments) in enumerate(self.code):
                    mark[0] = index
                    if (arrivals := self.waits[index]) is not None:
                        arrivals()
                    add(clock())
                    function(*arguments)
                    add(clock())
            return self._end()
        except Exception as error:
            raise InstructionFailed(index, self.instructions[index]) from error

    def _begin(self, number: int) -> None:
        for stage in self.stages.values():
            if stage.reduction is not None:
                stage.reduction.begin()
            else:
                for parameter in stage.parameters:
                    parameter.grad = None
        self.actions.begin(number, step_seed(self.seed, number))

    def _end(self) -> StepResult:
        self.actions.finish_totals()
        self.actions.transport.drain()
        return self.actions.result

    # Set-up

    def _hold(self, held: Held, groups: Sequence[Any]) -> HeldStage:
        module = StageModule(
            self.chain,
            self.shapes,
            held.first,
            held.last,
            seed=self.seed,
            recompute=held.recompute,
            device=self.device,
        )
        parameters = module.trainable()
        optimizer = self.chain.job.optimizer(parameters) if parameters else None
        reduction = None
        if len(held.ranks) > 1:
            ranges = [(first, last) for first, last, _ in held.buckets]
            reduction = Reduction(module, ranges, groups[held.buckets[0][2]])
        cells = {m: self._cell(held, module, m) for m in _micro_batches(self.instructions, held.stage)}
        return HeldStage(held, module, cells, optimizer, parameters, reduction)

    def _cell(self, held: Held, module: StageModule, micro_batch: int) -> MicroBatch:
        low, high = held.rows[self.program.row_class(micro_batch)]
        start = first_row(self.program, micro_batch)
        return MicroBatch(micro_batch, range(start + low, start + high), module.seeds(micro_batch, low))

    def _count_batch_uses(self) -> None:
        uses = self.actions.batches.uses
        for stage in self.stages.values():
            if stage.module.reads_batch or stage.module.is_last:
                for cell in stage.cells.values():
                    key = cell.rows.start, cell.rows.stop
                    uses[key] = uses.get(key, 0) + 1

    def _count_first_terms(self) -> tuple[int, int]:
        """Terms of the loss of the first micro-batch of step 0, and its rows; 0 and 0 without the last stage."""
        for stage in self.stages.values():
            busy = [cell.rows for cell in stage.cells.values() if len(cell.rows)]
            if stage.module.is_last and stage.held.replica == 0 and busy:
                return self._terms(stage.module, busy[0]), len(busy[0])
        return 0, 0

    def _terms(self, stage: StageModule, rows: range) -> int:
        """The terms of the loss over some rows of step 0, found with zeros for what comes from other stages."""
        before = self.shapes[stage.first - 1].values() if stage.first else ()
        zeros = [torch.zeros((len(rows), *one.sample_shape), dtype=one.dtype, device=self.device) for one in before]
        return stage.count_terms(zeros, *self.actions.batches.read(0, rows))

    # Binding

    def _bind(self) -> list[Call]:
        self._refuse_lost_gradients()
        code: list[Call] = []
        last_send: dict[tuple[str, int, int], int] = {}
        last_backward: dict[int, int] = {}
        for index, one in enumerate(self.instructions):
            if one.kind in ("SEND_F", "LOCAL_F", "SEND_B", "LOCAL_B"):
                last_send[one.kind[-1], one.stage, one.micro_batch] = index
            elif one.kind == "B":
                last_backward[one.stage] = index
            elif one.kind == "F" and self._makes_loss(one):
                self.actions.num_losses += 1
        for index, one in enumerate(self.instructions):
            is_last = last_send.get((one.kind[-1], one.stage, one.micro_batch)) == index
            code.append(self._call(one, is_last, index < last_backward.get(one.stage, -1)))
        return code

    def _makes_loss(self, one: Instruction) -> bool:
        stage = self.stages.get(one.stage)
        return stage is not None and stage.module.is_last and len(stage.cells[one.micro_batch].rows) > 0

    def _refuse_lost_gradients(self) -> None:
        """A backward whose cut needs gradients that no message brings would train wrong numbers."""
        fed = {(i.stage, i.micro_batch) for i in self.instructions if i.kind == "RECV_B"}
        for one in self.instructions:
            if one.kind == "LOCAL_B":
                fed.add((self._channel(one.channel + 1, one).stage, one.micro_batch))
        for one in self.instructions:
            if one.kind == "B" and (one.stage, one.micro_batch) not in fed:
                module = self.stages[one.stage].module
                if not module.is_last and any(module.needs_grad[-1]):
                    names = [name for name, shape in self.shapes[module.last].items() if shape.needs_grad]
                    raise ModelMismatch(
                        f"tensors {names} after layer {self.chain.names[module.last]!r} have gradients, but the plan "
                        f"sends none back before {one}",
                        remedy="profile this model and plan with that profile",
                    )

    def _call(self, one: Instruction, is_last: bool, backward_follows: bool) -> Call:
        if one.stage not in self.stages:
            raise InvalidDocument(f"rank {self.program.rank} runs {one}, but does not hold stage {one.stage}")
        stage = self.stages[one.stage]
        match one.kind:
            case "F" | "B" | "R" | "LOAD" | "FREE":
                return self._compute_call(one.kind, stage, stage.cells[one.micro_batch])
            case "SEND_F" | "SEND_B" | "RECV_F" | "RECV_B":
                return self._message_call(one, stage.cells[one.micro_batch], is_last)
            case "LOCAL_F" | "LOCAL_B":
                return self._local_call(one, stage.cells[one.micro_batch], is_last)
            case "REDUCE" | "WAIT_REDUCE":
                reduction = stage.reduction
                if reduction is None:
                    return _nothing, ()
                if one.kind == "WAIT_REDUCE":
                    return reduction.wait, (one.micro_batch,)
                return (reduction.arm if backward_follows else reduction.start), (one.micro_batch,)
            case "STEP":
                return self.actions.optimizer_step, (stage,)
            case _:
                raise UnsupportedRequest(f"instruction {one} is not executed here")

    def _compute_call(self, kind: str, stage: HeldStage, cell: MicroBatch) -> Call:
        module = stage.module
        if not len(cell.rows):
            return _nothing, ()
        match kind:
            case "F" if module.is_last:
                return self.actions.forward_last, (module, cell)
            case "F":
                return (self.actions.forward_reading if module.reads_batch else self.actions.forward), (module, cell)
            case "B":
                return self.actions.backward, (module, cell)
            case "R":
                return self.actions.recompute, (module, cell)
            case "LOAD":
                return (self.actions.load if module.reads_batch or module.is_last else _nothing_of), (cell,)
            case _:
                return cell.clear, ()

    def _channel(self, number: int, one: Instruction) -> Channel:
        if not 0 <= number < len(self.program.channels):
            raise InvalidDocument(f"{one} names channel {number}; the program has {len(self.program.channels)}")
        return self.program.channels[number]

    def _cut_of(self, channel: Channel) -> int:
        """The cut that a channel crosses: after the stage for what goes forward from it, before it otherwise."""
        held = self.stages[channel.stage].held
        return held.last if channel.peer_stage == held.next else held.first - 1

    def _messages(self, one: Instruction, cell: MicroBatch) -> tuple[list[Message], list[TensorShape]]:
        channel = self._channel(one.channel, one)
        shapes = list(self.shapes[self._cut_of(channel)].values())
        low, high = channel.rows[self.program.row_class(one.micro_batch)]
        whole = (low, high) == (0, len(cell.rows))
        messages: list[Message] = []
        ends = self._carriers[one.channel]
        move = ends.send if one.kind.startswith("SEND") else ends.receive
        for t, shape in enumerate(shapes):
            if high > low and (shape.needs_grad or channel.kind == "F"):
                tag = channel.tag + one.micro_batch * len(shapes) + t
                size_bytes = shape.bytes_per_sample * (high - low)
                messages.append((t, -1 if whole else low, high, move, channel.peer, tag, size_bytes))
        return messages, shapes

    def _message_call(self, one: Instruction, cell: MicroBatch, is_last: bool) -> Call:
        messages, shapes = self._messages(one, cell)
        if not messages and not (is_last and len(cell.rows)):
            return _nothing, ()
        if one.kind == "SEND_F":
            return self.actions.send_forward, (cell, messages, is_last)
        if one.kind == "SEND_B":
            return self.actions.send_backward, (cell, messages, is_last)
        sizes = [((len(cell.rows), *shape.sample_shape), shape.dtype) for shape in shapes]
        if not messages:
            return _nothing, ()
        if one.kind == "RECV_F":
            return self.actions.receive_forward, (cell, messages, sizes)
        wanted = [size if shape.needs_grad else None for size, shape in zip(sizes, shapes, strict=True)]
        return self.actions.receive_backward, (cell, messages, wanted)

    def _local_call(self, one: Instruction, cell: MicroBatch, is_last: bool) -> Call:
        sending, receiving = self._channel(one.channel, one), self._channel(one.channel + 1, one)
        cls = self.program.row_class(one.micro_batch)
        target = self.stages[receiving.stage].cells[one.micro_batch]
        source_rows, target_rows = sending.rows[cls], receiving.rows[cls]
        whole = source_rows == (0, len(cell.rows)) and target_rows == (0, len(target.rows))
        copy = None if whole else (slice(*source_rows), slice(*target_rows), len(target.rows))
        function = self.actions.hand_forward if one.kind == "LOCAL_F" else self.actions.hand_backward
        return function, (cell, target, copy, is_last)

    def _wait_of(self, one: Instruction) -> Callable[[], object] | None:
        """What a traced step waits for before it takes an instruction's start."""
        if one.kind == "F":
            return self.stages[one.stage].cells[one.micro_batch].wait_inputs
        if one.kind == "B":
            return self.stages[one.stage].cells[one.micro_batch].wait_gradients
        return self.actions.finish_totals if one.kind == "STEP" else None


def first_row(program: Program, micro_batch: int) -> int:
    """The first sample of a micro-batch within the global batch."""
    (rows, number), *smaller = program.row_classes
    if micro_batch <= number:
        return rows * micro_batch
    return rows * number + smaller[0][0] * (micro_batch - number)


def _micro_batches(instructions: Iterable[Instruction], stage: int) -> list[int]:
    """The micro-batches that a stage computes here, in order."""
    return sorted({one.micro_batch for one in instructions if one.stage == stage and one.kind == "F"})


def _refuse(program: Program) -> None:
    if program.update_rule != "synchronous":
        raise UnsupportedRequest(
            f"the update rule {program.update_rule!r} is not executed here; only 'synchronous' is",
            remedy="plan with update_rules: [synchronous]",
        )
    for one in program.instructions():
        if one.kind in _NOT_EXECUTED:
            raise UnsupportedRequest(
                f"rank {program.rank} has the instruction {one}; {one.kind} is not executed here",
                remedy="choose a schedule with whole backwards (F and B)",
            )


def _nothing() -> None:
    """An instruction that moves nothing here."""


def _nothing_of(_: MicroBatch) -> None:
    """The same, for a micro-batch."""

"""Runs one rank's program: every instruction is a bound method with its arguments, prepared once.

No decision is left to the step itself: what is sent where, which rows, which random state, is fixed when the program
is bound. Gradients are those of the mean loss over the global batch: each backward starts from 1 / (terms expected in
the global batch); should a batch have another number of terms, gradients are corrected before the optimizer's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.executor.chain import Chain, TensorShape
from penstock.executor.reduction import Reduction
from penstock.executor.stage_module import MicroBatch, StageModule, step_seed
from penstock.executor.transport import GlooTransport, sum_of_pairs, sum_over
from penstock.schemas.errors import InvalidDocument, ModelMismatch, UnsupportedRequest
from penstock.schemas.program import Channel, Held, Instruction, Program

Call = tuple[Callable[..., None], tuple[Any, ...]]
Mark: TypeAlias = "list[int] | memoryview[int]"
Message = tuple[int, int, int, int, int, int]
"""Index of the tensor in the cut, rows [low, high) (-1: all), peer, tag, bytes."""

_WEIGHTED = ("I", "W", "PASS")


class InstructionFailed(Exception):
    """An instruction raised; the cause is the exception's ``__cause__``."""

    def __init__(self, index: int, instruction: Instruction) -> None:
        super().__init__(f"instruction {index} ({instruction}) failed")
        self.index = index
        self.instruction = instruction


@dataclass(slots=True)
class HeldStage:
    """A stage of this rank with its micro-batches and its optimizer."""

    held: Held
    module: StageModule
    cells: dict[int, MicroBatch]
    optimizer: Optimizer | None
    parameters: list[torch.nn.Parameter]
    reduction: Reduction | None
    unfinished: int = 0


@dataclass(slots=True)
class StepResult:
    """A step's mean loss, the same on all ranks, and the terms that it is the mean of."""

    loss: float
    count: int


@dataclass
class _Batches:
    """The rows of the global batch that this rank reads, each asked for once per step."""

    chain: Chain
    device: torch.device
    uses: dict[tuple[int, int], int] = field(default_factory=dict)
    held: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    step: int = 0

    def take(self, rows: range) -> tuple[dict[str, Tensor], Any]:
        """Inputs and targets of some rows."""
        key = rows.start, rows.stop
        entry = self.held.pop(key, None)
        if entry is None:
            inputs, targets = self.chain.job.batch(self.step, rows)
            entry = [inputs, targets, self.uses.get(key, 1)]
        entry[2] -= 1
        if entry[2] > 0:
            self.held[key] = entry
        return entry[0], entry[1]


class Interpreter:
    """A program bound to a job's layers, ready to run steps.

    ``groups``: the process group of each replicated stage. ``mark``: where the index of the running instruction is
    written, for whoever watches this process. Raises UnsupportedRequest for instructions that are not executed here.
    """

    def __init__(
        self,
        program: Program,
        chain: Chain,
        shapes: Sequence[dict[str, TensorShape]],
        *,
        seed: int,
        transport: GlooTransport,
        groups: dict[int, Any] | None = None,
        device: torch.device | str = "cpu",
        mark: Mark | None = None,
    ) -> None:
        _refuse(program)
        self.program = program
        self.chain = chain
        self.shapes = shapes
        self.seed = seed
        self.device = torch.device(device)
        self.transport = transport
        self.mark: Mark = mark if mark is not None else [0]
        self.instructions = tuple(program.instructions())
        self.batches = _Batches(chain, self.device)
        self.before_step: Callable[[HeldStage], None] | None = None
        self.stages = {held.stage: self._hold(held, groups or {}) for held in program.stages}
        self._count_batch_uses()
        self._key = 0
        self._losses: list[Tensor] = []
        self._count = 0
        self._last_forwards = 0
        self._totals: tuple[Tensor, Any] | None = None
        self._correction: float | None = None
        self._result = StepResult(0.0, 0)
        self.expected_count = self._expected_count()
        for stage in self.stages.values():
            stage.module.count = self.expected_count
        self.code = self._bind()
        self.waits = [self._wait_of(one) for one in self.instructions]

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
            self._end()
        except Exception as error:
            raise InstructionFailed(index, self.instructions[index]) from error
        return self._result

    def _begin(self, number: int) -> None:
        self._key = step_seed(self.seed, number)
        self.batches.step = number
        self.batches.held.clear()
        self._losses, self._count, self._correction = [], 0, None
        self._totals = None
        for stage in self.stages.values():
            stage.unfinished = 0
            if stage.reduction is not None:
                stage.reduction.begin()
            else:
                for parameter in stage.parameters:
                    parameter.grad = None
        self._missing_losses = self._last_forwards
        if self._missing_losses == 0:
            self._start_totals()

    def _end(self) -> None:
        self._finish_totals()
        self.transport.drain()

    def _start_totals(self) -> None:
        total = sum(loss.double() for loss in self._losses)
        totals = torch.tensor([float(total), self._count], dtype=torch.float64)
        self._losses = []
        self._totals = totals, sum_over(totals)

    def _finish_totals(self) -> float:
        """Wait for the loss of all ranks; by what gradients have to be multiplied."""
        if self._correction is not None:
            return self._correction
        assert self._totals is not None, "a forward of the last stage is missing"
        totals, work = self._totals
        work.wait()
        loss, count = totals.tolist()
        if count <= 0:
            raise InvalidDocument(f"the loss of step {self.batches.step} has {count:.0f} terms; its mean is undefined")
        self._correction = self.expected_count / count
        self._result = StepResult(loss / count, round(count))
        return self._correction

    # Set-up

    def _hold(self, held: Held, groups: dict[int, Any]) -> HeldStage:
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
            reduction = Reduction(module, held.buckets, groups[held.stage])
        cells = {m: self._cell(held, module, m) for m in _micro_batches(self.instructions, held.stage)}
        return HeldStage(held, module, cells, optimizer, parameters, reduction)

    def _cell(self, held: Held, module: StageModule, micro_batch: int) -> MicroBatch:
        low, high = held.rows[self.program.row_class(micro_batch)]
        start = first_row(self.program, micro_batch)
        return MicroBatch(micro_batch, range(start + low, start + high), module.seeds(micro_batch, low))

    def _count_batch_uses(self) -> None:
        for stage in self.stages.values():
            if stage.module.reads_batch or stage.module.is_last:
                for cell in stage.cells.values():
                    key = cell.rows.start, cell.rows.stop
                    self.batches.uses[key] = self.batches.uses.get(key, 0) + 1

    def _expected_count(self) -> float:
        """Terms of a global batch's loss, if all samples have as many as the first micro-batch of step 0."""
        count = rows = 0
        for stage in self.stages.values():
            busy = [cell.rows for cell in stage.cells.values() if len(cell.rows)]
            if stage.module.is_last and stage.held.replica == 0 and busy:
                count += _terms(self.chain, self.shapes, stage.module, busy[0])
                rows += len(busy[0])
        total, total_rows = sum_of_pairs(count, rows)
        if total <= 0:
            raise InvalidDocument("the loss of the first micro-batch has no terms, so no mean can be taken")
        return total * self.program.global_batch_size / total_rows

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
                self._last_forwards += 1
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
                return self._optimizer_step, (stage,)
            case _:
                raise UnsupportedRequest(f"instruction {one} is not executed here")

    def _compute_call(self, kind: str, stage: HeldStage, cell: MicroBatch) -> Call:
        module = stage.module
        if not len(cell.rows):
            return _nothing, ()
        match kind:
            case "F" if module.is_last:
                return self._forward_last, (module, cell)
            case "F":
                return (self._forward_reading if module.reads_batch else self._forward), (module, cell)
            case "B":
                return self._backward, (module, cell)
            case "R":
                return self._recompute, (module, cell)
            case "LOAD":
                return (self._load if module.reads_batch or module.is_last else _nothing_of), (cell,)
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
        for t, shape in enumerate(shapes):
            if high > low and (shape.needs_grad or channel.kind == "F"):
                tag = channel.tag + one.micro_batch * len(shapes) + t
                size_bytes = shape.bytes_per_sample * (high - low)
                messages.append((t, -1 if whole else low, high, channel.peer, tag, size_bytes))
        return messages, shapes

    def _message_call(self, one: Instruction, cell: MicroBatch, is_last: bool) -> Call:
        messages, shapes = self._messages(one, cell)
        if not messages and not (is_last and len(cell.rows)):
            return _nothing, ()
        if one.kind == "SEND_F":
            return self._send_forward, (cell, messages, is_last)
        if one.kind == "SEND_B":
            return self._send_backward, (cell, messages, is_last)
        sizes = [((len(cell.rows), *shape.sample_shape), shape.dtype) for shape in shapes]
        if not messages:
            return _nothing, ()
        if one.kind == "RECV_F":
            return self._receive_forward, (cell, messages, sizes)
        wanted = [size if shape.needs_grad else None for size, shape in zip(sizes, shapes, strict=True)]
        return self._receive_backward, (cell, messages, wanted)

    def _local_call(self, one: Instruction, cell: MicroBatch, is_last: bool) -> Call:
        sending, receiving = self._channel(one.channel, one), self._channel(one.channel + 1, one)
        cls = self.program.row_class(one.micro_batch)
        target = self.stages[receiving.stage].cells[one.micro_batch]
        source_rows, target_rows = sending.rows[cls], receiving.rows[cls]
        whole = source_rows == (0, len(cell.rows)) and target_rows == (0, len(target.rows))
        copy = None if whole else (slice(*source_rows), slice(*target_rows), len(target.rows))
        function = self._hand_forward if one.kind == "LOCAL_F" else self._hand_backward
        return function, (cell, target, copy, is_last)

    def _wait_of(self, one: Instruction) -> Callable[[], object] | None:
        """What a traced step waits for before it takes an instruction's start."""
        if one.kind == "F":
            return self.stages[one.stage].cells[one.micro_batch].wait_inputs
        if one.kind == "B":
            return self.stages[one.stage].cells[one.micro_batch].wait_gradients
        return self._finish_totals if one.kind == "STEP" else None

    # Instructions

    def _forward(self, module: StageModule, cell: MicroBatch) -> None:
        if cell.arrivals:
            cell.wait_inputs()
        cell.outputs = [
            tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            for tensor in module.forward(cell, self._key)
        ]

    def _forward_reading(self, module: StageModule, cell: MicroBatch) -> None:
        if cell.batch is None:
            cell.batch, _ = self.batches.take(cell.rows)
        self._forward(module, cell)

    def _forward_last(self, module: StageModule, cell: MicroBatch) -> None:
        if cell.arrivals:
            cell.wait_inputs()
        if cell.batch is None:
            cell.batch, cell.targets = self.batches.take(cell.rows)
        results = module.forward(cell, self._key)
        loss, count = module.loss_of(cell, results)
        if not module.recomputes_loss:
            cell.loss, cell.targets = loss, None
        self._losses.append(loss.detach())
        self._count += count
        self._missing_losses -= 1
        if self._missing_losses == 0:
            self._start_totals()

    def _backward(self, module: StageModule, cell: MicroBatch) -> None:
        if cell.gradient_arrivals:
            cell.wait_gradients()
        module.backward(cell, self._key)

    def _recompute(self, module: StageModule, cell: MicroBatch) -> None:
        module.recompute(cell, self._key)

    def _load(self, cell: MicroBatch) -> None:
        cell.batch, cell.targets = self.batches.take(cell.rows)

    def _send_forward(self, cell: MicroBatch, messages: list[Message], is_last: bool) -> None:
        outputs = cell.outputs
        assert outputs is not None, "sent before its forward"
        send = self.transport.send
        for t, low, high, peer, tag, size_bytes in messages:
            send(outputs[t] if low < 0 else outputs[t][low:high], peer, tag, size_bytes)
        if is_last:
            cell.outputs = None

    def _send_backward(self, cell: MicroBatch, messages: list[Message], is_last: bool) -> None:
        gradients = cell.input_gradients
        assert gradients is not None, "sent before its backward"
        send = self.transport.send
        for t, low, high, peer, tag, size_bytes in messages:
            gradient = gradients[t]
            assert gradient is not None
            gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            send(gradient if low < 0 else gradient[low:high], peer, tag, size_bytes)
        if is_last:
            cell.input_gradients = None

    def _receive_forward(self, cell: MicroBatch, messages: list[Message], sizes: list[Any]) -> None:
        buffers = cell.inputs
        if buffers is None:
            buffers = cell.inputs = [torch.empty(size, dtype=dtype, device=self.device) for size, dtype in sizes]
        receive, add = self.transport.receive, cell.arrivals.append
        for t, low, high, peer, tag, _ in messages:
            add(receive(buffers[t] if low < 0 else buffers[t][low:high], peer, tag))

    def _receive_backward(self, cell: MicroBatch, messages: list[Message], sizes: list[Any]) -> None:
        buffers = cell.gradients
        if buffers is None:
            buffers = cell.gradients = [
                None if size is None else torch.empty(size[0], dtype=size[1], device=self.device) for size in sizes
            ]
        receive, add = self.transport.receive, cell.gradient_arrivals.append
        for t, low, high, peer, tag, _ in messages:
            buffer = buffers[t]
            assert buffer is not None
            add(receive(buffer if low < 0 else buffer[low:high], peer, tag))

    def _hand_forward(
        self, cell: MicroBatch, target: MicroBatch, copy: tuple[slice, slice, int] | None, is_last: bool
    ) -> None:
        outputs = cell.outputs
        assert outputs is not None, "handed on before its forward"
        if copy is None:
            target.inputs = [tensor.detach() for tensor in outputs]
        else:
            source, place, rows = copy
            if target.inputs is None:
                target.inputs = [tensor.new_empty((rows, *tensor.shape[1:])) for tensor in outputs]
            for buffer, tensor in zip(target.inputs, outputs, strict=True):
                buffer[place] = tensor[source]
        if is_last:
            cell.outputs = None

    def _hand_backward(
        self, cell: MicroBatch, target: MicroBatch, copy: tuple[slice, slice, int] | None, is_last: bool
    ) -> None:
        gradients = cell.input_gradients
        assert gradients is not None, "handed on before its backward"
        if copy is None:
            target.gradients = gradients
        else:
            source, place, rows = copy
            if target.gradients is None:
                target.gradients = [None if g is None else g.new_empty((rows, *g.shape[1:])) for g in gradients]
            for buffer, gradient in zip(target.gradients, gradients, strict=True):
                if buffer is not None and gradient is not None:
                    buffer[place] = gradient[source]
        if is_last:
            cell.input_gradients = None

    def _optimizer_step(self, stage: HeldStage) -> None:
        correction = self._finish_totals()
        if stage.reduction is not None:
            stage.reduction.wait(len(stage.reduction.buckets) - 1)
        if correction != 1.0:
            for parameter in stage.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(correction)
        if self.before_step is not None:
            self.before_step(stage)
        if stage.optimizer is not None:
            stage.optimizer.step()


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
        if one.kind in _WEIGHTED:
            raise UnsupportedRequest(
                f"rank {program.rank} has the instruction {one}; {one.kind} is not executed here",
                remedy="choose a schedule with whole backwards (F and B)",
            )
    for channel in program.channels:
        if channel.codec is not None:
            raise UnsupportedRequest(f"the codec {channel.codec!r} is not executed here; send tensors as they are")


def _terms(chain: Chain, shapes: Sequence[dict[str, TensorShape]], stage: StageModule, rows: range) -> int:
    """The terms of the loss over some rows of step 0, found with outputs of zeros."""
    inputs, targets = chain.job.batch(0, rows)
    meta: dict[str, Tensor] = {name: tensor.to("meta") for name, tensor in inputs.items()}
    if stage.first:
        for name, shape in shapes[stage.first - 1].items():
            meta[name] = torch.empty((len(rows), *shape.sample_shape), dtype=shape.dtype, device="meta")
    with torch.no_grad():
        for i in range(stage.first, stage.last + 1):
            spec = chain.specs[i]
            layer = chain.build_layer(i, device="meta")
            results = chain.call(i, layer, [meta[name] for name in spec.reads])
            meta.update(zip(spec.writes, results, strict=True))
        outputs = {name: torch.zeros(meta[name].shape, dtype=meta[name].dtype) for name in chain.outputs}
        _, count = chain.job.loss(outputs, targets)
    return count


def _nothing() -> None:
    """An instruction that moves nothing here."""


def _nothing_of(_: MicroBatch) -> None:
    """The same, for a micro-batch."""

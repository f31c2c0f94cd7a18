"""What each instruction does: methods that the interpreter binds to their arguments, over the state of one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.executor.chain import Chain
from penstock.executor.gpu import moved
from penstock.executor.reduction import Reduction
from penstock.executor.stage_module import MicroBatch, StageModule
from penstock.executor.transport import Transport, sum_over
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.program import Held

Message = tuple[int, int, int, Callable[..., Any], int, int, int]
"""Index of the tensor in the cut, rows [low, high) (-1: all), what sends or receives it, peer, tag, bytes."""


@dataclass(slots=True)
class HeldStage:
    """A stage of this rank with its micro-batches and its optimizer."""

    held: Held
    module: StageModule
    cells: dict[int, MicroBatch]
    optimizer: Optimizer | None
    parameters: list[torch.nn.Parameter]
    reduction: Reduction | None


@dataclass(slots=True)
class StepResult:
    """A step's mean loss, the same on all ranks, and the terms that it is the mean of."""

    loss: float
    count: int


@dataclass
class Batches:
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
            entry = [*self.read(self.step, rows), self.uses.get(key, 1)]
        entry[2] -= 1
        if entry[2] > 0:
            self.held[key] = entry
        return entry[0], entry[1]

    def read(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        """The job's inputs and targets, on this rank's device."""
        batch = self.chain.job.batch(step, rows)
        return batch if self.device.type == "cpu" else moved(batch, self.device)


class Actions:
    """The state of a step, and what instructions do with it.

    ``num_losses``: the forwards of the last stage in a step here. ``expected_count``: the loss terms that each backward
    takes the global batch to have. ``before_step`` is called with each stage before its optimizer's step.
    """

    def __init__(self, chain: Chain, transport: Transport, device: torch.device) -> None:
        self.transport = transport
        self.device = device
        self.batches = Batches(chain, device)
        self.num_losses = 0
        self.expected_count = 1.0
        self.before_step: Callable[[HeldStage], None] | None = None
        self.result = StepResult(0.0, 0)
        self._key = 0
        self._losses: list[Tensor] = []
        self._count = 0
        self._totals: tuple[Tensor, Any] | None = None
        self._correction: float | None = None

    def begin(self, step: int, key: int) -> None:
        """Start a step; ``key`` is its part of every random state."""
        self._key = key
        self.batches.step = step
        self.batches.held.clear()
        self._losses, self._count = [], 0
        self._totals = self._correction = None
        self._missing_losses = self.num_losses
        if self._missing_losses == 0:
            self._start_totals()

    def _start_totals(self) -> None:
        total = sum(loss.double() for loss in self._losses)
        totals = torch.tensor([float(total), self._count], dtype=torch.float64)
        self._losses = []
        self._totals = totals, sum_over(totals)

    def finish_totals(self) -> float:
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
        self.result = StepResult(loss / count, round(count))
        return self._correction

    def forward(self, module: StageModule, cell: MicroBatch) -> None:
        """Run a micro-batch through a stage, and keep what leaves it."""
        if cell.arrivals:
            cell.wait_inputs()
        cell.outputs = [
            tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            for tensor in module.forward(cell, self._key)
        ]

    def forward_reading(self, module: StageModule, cell: MicroBatch) -> None:
        """The same for a stage that reads inputs of the batch."""
        if cell.batch is None:
            cell.batch, _ = self.batches.take(cell.rows)
        self.forward(module, cell)

    def forward_last(self, module: StageModule, cell: MicroBatch) -> None:
        """The same for the last stage, which also makes the loss; after its last one the totals set off."""
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

    def backward(self, module: StageModule, cell: MicroBatch) -> None:
        """Back-propagate a micro-batch through a stage."""
        if cell.gradient_arrivals:
            cell.wait_gradients()
        module.backward(cell, self._key)

    def recompute(self, module: StageModule, cell: MicroBatch) -> None:
        """Run a micro-batch's recomputed layers again."""
        module.recompute(cell, self._key)

    def load(self, cell: MicroBatch) -> None:
        """Ask for a micro-batch's inputs and targets ahead of its forward."""
        cell.batch, cell.targets = self.batches.take(cell.rows)

    def send_forward(self, cell: MicroBatch, messages: list[Message], is_last: bool) -> None:
        """Send rows of what a forward made; ``is_last``: nobody else wants it."""
        outputs = cell.outputs
        assert outputs is not None, "sent before its forward"
        for t, low, high, send, peer, tag, size_bytes in messages:
            send(outputs[t] if low < 0 else outputs[t][low:high], peer, tag, size_bytes)
        if is_last:
            cell.outputs = None

    def send_backward(self, cell: MicroBatch, messages: list[Message], is_last: bool) -> None:
        """Send rows of the gradients that a backward made."""
        gradients = cell.input_gradients
        assert gradients is not None, "sent before its backward"
        for t, low, high, send, peer, tag, size_bytes in messages:
            gradient = gradients[t]
            assert gradient is not None
            gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            send(gradient if low < 0 else gradient[low:high], peer, tag, size_bytes)
        if is_last:
            cell.input_gradients = None

    def receive_forward(self, cell: MicroBatch, messages: list[Message], sizes: list[Any]) -> None:
        """Post receives into the rows of one buffer per tensor."""
        buffers = cell.inputs
        if buffers is None:
            buffers = cell.inputs = [torch.empty(size, dtype=dtype, device=self.device) for size, dtype in sizes]
        add = cell.arrivals.append
        for t, low, high, receive, peer, tag, _ in messages:
            add(receive(buffers[t] if low < 0 else buffers[t][low:high], peer, tag))

    def receive_backward(self, cell: MicroBatch, messages: list[Message], sizes: list[Any]) -> None:
        """The same for gradients; ``sizes`` is None for a tensor that has none."""
        buffers = cell.gradients
        if buffers is None:
            buffers = cell.gradients = [
                None if size is None else torch.empty(size[0], dtype=size[1], device=self.device) for size in sizes
            ]
        add = cell.gradient_arrivals.append
        for t, low, high, receive, peer, tag, _ in messages:
            buffer = buffers[t]
            assert buffer is not None
            add(receive(buffer if low < 0 else buffer[low:high], peer, tag))

    def hand_forward(
        self, cell: MicroBatch, target: MicroBatch, copy: tuple[slice, slice, int] | None, is_last: bool
    ) -> None:
        """Give what a forward made to another stage of this rank: as it is, or some rows."""
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

    def hand_backward(
        self, cell: MicroBatch, target: MicroBatch, copy: tuple[slice, slice, int] | None, is_last: bool
    ) -> None:
        """Give gradients to the stage before on this rank."""
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

    def optimizer_step(self, stage: HeldStage) -> None:
        """Correct the gradients where the batch had another number of terms, then step."""
        correction = self.finish_totals()
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

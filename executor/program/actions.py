"""The actions of instructions: methods over the state of a run, which the interpreter binds to their arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.executor.program.global_batch import GlobalBatch, StepResult
from penstock.executor.stage.gradient_norm import GradientNorm
from penstock.executor.stage.held_stage import Cell, HeldStage
from penstock.executor.stage.stage_module import StageModule
from penstock.executor.stage.versions import Versions
from penstock.executor.transport import Transport, sum_over
from penstock.schemas.errors import InvalidDocument

__all__ = ["Actions", "HeldStage", "Message", "OnBatch", "StepResult"]

Message = tuple[int, int, int, Callable[..., Any], int, int, int]
"""Index of the tensor in the cut, rows [low, high) (-1: all), send or receive function, peer, tag, bytes."""

OnBatch = Callable[[int, StepResult, int], None]
"""A callback with a step, its result, and the time since the previous step (ns)."""


class Actions:
    """The actions of instructions, with the state that they share.

    ``expected_count``: the number of terms of the global batch's loss that each backward assumes. ``before_step`` is
    called with each stage before its optimizer's step, ``on_batch`` when a global batch has been trained here.
    ``norm``: the norm of all gradients, where the program computes it.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        self.transport = transport
        self.device = device
        self.expected_count = 1.0
        self.before_step: Callable[[HeldStage], None] | None = None
        self.norm: GradientNorm | None = None
        self.on_batch: OnBatch | None = None
        self._reported_ns = 0

    def begin(self) -> None:
        """Start to run a program."""
        self._reported_ns = time.perf_counter_ns()

    def report(self, batch: GlobalBatch, *, at_end: bool = False) -> None:
        """Call ``on_batch`` for a global batch and the ones before it, each once and in order.

        Batches that one update completes together get equal parts of its time. On GPUs the last batch is reported
        later, so that the host does not wait for it.
        """
        unreported, done = batch.source.unreported, []
        last = batch.step - (batch.source.loss_group is not None and not at_end)
        while self.on_batch is not None and unreported and unreported[0].step <= last:
            done.append((unreported[0], unreported[0].finish()))
            unreported.popleft()
        if self.on_batch is not None and done:
            now = time.perf_counter_ns()
            each_ns, self._reported_ns = (now - self._reported_ns) // len(done), now
            for one, result in done:
                self.on_batch(one.step, result, each_ns)

    def forward(self, module: StageModule, cell: Cell) -> None:
        """Run a micro-batch through a stage, and keep the tensors that leave it."""
        if cell.arrivals:
            cell.wait_inputs()
        cell.outputs = [
            tensor.detach() if tensor.is_contiguous() else tensor.detach().contiguous()
            for tensor in module.forward(cell, cell.within.key)
        ]

    def forward_reading(self, module: StageModule, cell: Cell) -> None:
        """Run a micro-batch through a stage that reads inputs of the batch."""
        if cell.batch is None:
            cell.batch, _ = cell.within.take(cell.rows)
        self.forward(module, cell)

    def forward_normalised(self, group: Any, module: StageModule, cell: Cell) -> None:
        """Run the last stage where each micro-batch has its mean loss; ``group``: the replicas that split it."""
        count = self.forward_last(module, cell)
        cell.terms = count
        if group is not None:
            terms = torch.tensor([count], dtype=torch.float64, device=self.device)
            cell.terms = terms, sum_over(terms, group)

    def forward_last(self, module: StageModule, cell: Cell) -> int:
        """Run a micro-batch through the last stage and the loss; return the number of the loss's terms."""
        if cell.arrivals:
            cell.wait_inputs()
        within = cell.within
        if cell.batch is None:
            cell.batch, cell.targets = within.take(cell.rows)
        results = module.forward(cell, within.key)
        loss, count = module.loss_of(cell, results)
        if not module.recomputes_loss:
            cell.loss, cell.targets = loss, None
        within.add_loss(*((loss.detach(), count) if module.counts_loss else (loss.new_zeros(()), 0)))
        return count

    def forward_versioned(
        self, versions: Versions, forward: Callable[..., None], module: StageModule, cell: Cell
    ) -> None:
        """Run a forward with the version of the weights that it has to use."""
        versions.enter(cell)
        forward(module, cell)

    def evaluate(self, module: StageModule, cell: Cell) -> None:
        """Run a forward without a backward."""
        if cell.arrivals:
            cell.wait_inputs()
        within = cell.within
        if module.reads_batch or module.is_last:
            cell.batch, cell.targets = within.take(cell.rows)
        tensors: list[Tensor] = cell.inputs or []
        for segment, seeds in zip(module.segments, cell.seeds, strict=True):
            tensors = segment.run(tensors, cell.batch, seeds, within.key)
        if module.is_last:
            loss, count = module.loss_of(cell, tensors)
            within.add_loss(*((loss, count) if module.counts_loss else (loss.new_zeros(()), 0)))
        else:
            cell.outputs = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
        cell.inputs = cell.batch = cell.targets = None

    def backward(self, module: StageModule, cell: Cell) -> None:
        """Back-propagate a micro-batch through a stage."""
        if cell.gradient_arrivals:
            cell.wait_gradients()
        module.backward(cell, cell.within.key)

    def backward_input(self, module: StageModule, cell: Cell) -> None:
        """Back-propagate a micro-batch to the stage's inputs (I)."""
        if cell.gradient_arrivals:
            cell.wait_gradients()
        module.backward_input(cell, cell.within.key)

    def backward_weight(self, module: StageModule, cell: Cell) -> None:
        """Add the gradients of the parameters (W)."""
        module.backward_weight(cell)

    def backward_normalised(self, module: StageModule, cell: Cell) -> None:
        """Run the last stage's backward of the micro-batch's mean loss."""
        module.count = self._terms(cell)
        self.backward(module, cell)

    def backward_input_normalised(self, module: StageModule, cell: Cell) -> None:
        """Run the last stage's I of the micro-batch's mean loss."""
        module.count = self._terms(cell)
        self.backward_input(module, cell)

    def _terms(self, cell: Cell) -> float:
        terms, cell.terms = cell.terms, None
        if isinstance(terms, tuple):
            terms[1].wait()
            terms = terms[0].item()
        if terms <= 0:
            raise InvalidDocument(
                f"the loss of micro-batch {cell.number} of step {cell.within.step} has {terms:.0f} terms; "
                "its mean is undefined"
            )
        return float(terms)

    def backward_versioned(
        self, versions: Versions, backward: Callable[..., None], module: StageModule, cell: Cell, is_last: bool
    ) -> None:
        """Run a backward with its forward's version, for recomputed layers; ``is_last``: no other half follows."""
        assert cell.version is not None, "a backward without its forward"
        versions.point_at(cell.version)
        backward(module, cell)
        if is_last:
            versions.leave(cell)

    def recompute(self, module: StageModule, cell: Cell) -> None:
        """Run a micro-batch's recomputed layers again."""
        module.recompute(cell, cell.within.key)

    def load(self, cell: Cell) -> None:
        """Read a micro-batch's inputs and targets ahead of its forward."""
        cell.batch, cell.targets = cell.within.take(cell.rows)

    def send_forward(self, cell: Cell, messages: list[Message], is_last: bool) -> None:
        """Send rows of a forward's results; ``is_last``: no later operation needs them."""
        outputs = cell.outputs
        assert outputs is not None, "sent before its forward"
        for t, low, high, send, peer, tag, size_bytes in messages:
            send(outputs[t] if low < 0 else outputs[t][low:high], peer, tag, size_bytes)
        if is_last:
            cell.outputs = None

    def send_backward(self, cell: Cell, messages: list[Message], is_last: bool) -> None:
        """Send rows of a backward's input gradients."""
        gradients = cell.input_gradients
        assert gradients is not None, "sent before its backward"
        for t, low, high, send, peer, tag, size_bytes in messages:
            gradient = gradients[t]
            assert gradient is not None
            gradient = gradient if gradient.is_contiguous() else gradient.contiguous()
            send(gradient if low < 0 else gradient[low:high], peer, tag, size_bytes)
        if is_last:
            cell.input_gradients = None

    def receive_forward(self, cell: Cell, messages: list[Message], sizes: list[Any]) -> None:
        """Post receives into the rows of one buffer per tensor."""
        buffers = cell.inputs
        if buffers is None:
            buffers = cell.inputs = [torch.empty(size, dtype=dtype, device=self.device) for size, dtype in sizes]
        add = cell.arrivals.append
        for t, low, high, receive, peer, tag, _ in messages:
            add(receive(buffers[t] if low < 0 else buffers[t][low:high], peer, tag))

    def receive_backward(self, cell: Cell, messages: list[Message], sizes: list[Any]) -> None:
        """Post receives of gradients; ``sizes`` has None for a tensor without a gradient."""
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

    def hand_forward(self, cell: Cell, target: Cell, copy: tuple[slice, slice, int] | None, is_last: bool) -> None:
        """Pass a forward's results, or some rows of them, to another stage of this rank."""
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

    def hand_backward(self, cell: Cell, target: Cell, copy: tuple[slice, slice, int] | None, is_last: bool) -> None:
        """Pass gradients to the previous stage on this rank."""
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

    def optimizer_step(self, stage: HeldStage, batch: GlobalBatch, ends: bool, clears: bool) -> None:
        """Correct the gradients where the batch had another number of terms, then step.

        ``ends``: this step completes the global batch for the stage; ``clears``: more gradients follow.
        """
        if stage.reduction is not None:
            stage.reduction.wait_all()
        factor = stage.scale
        if factor is None:
            factor = self.expected_count / batch.true_count
        norm = self.norm
        if norm is not None:
            factor = norm.factor(factor)
        if norm is None or not norm.overflow:
            self._step(stage, factor)
        if clears:
            stage.clear_gradients()
        if ends:
            self.report(batch)

    def _step(self, stage: HeldStage, factor: float) -> None:
        if factor != 1.0:
            for parameter in stage.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        if self.before_step is not None:
            self.before_step(stage)
        stage.step()

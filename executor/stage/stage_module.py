"""A stage's layers as one callable with a backward, cut into segments where some layers are recomputed.

Between segments, as between stages, tensors are detached. Each segment's inputs are leaves that get their gradient from
the segment's backward. A recomputed segment keeps only its inputs, and runs a second time before its backward with the
same random state. A tensor that a segment only passes on is both its input and its output, and backward on the leaf
itself passes the gradient through. Where the backward is split into I and W, every layer is a segment, so that the
graph that a weight's gradient holds is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.executor.run.chain import Chain, TensorShape, derived_seed
from penstock.executor.runtime.cpu import CPU
from penstock.executor.runtime.interface import Runtime
from penstock.executor.stage.precision import FULL, Training
from penstock.executor.stage.recomputed_modules import recompute_modules
from penstock.executor.stage.segment import Segment, segment_ranges
from penstock.executor.stage.split_backward import Recorded, SplitBackward
from penstock.schemas.errors import ModelMismatch

if TYPE_CHECKING:
    from penstock.executor.divided.division import Division

Root = Tensor | GradientEdge
"""The start of a backward: a loss, or the graph edge of a result whose numbers are freed after they were sent."""

Saved = tuple[list[Tensor], "Sequence[Root | None] | None", "Recorded | None"]
"""A segment's inputs, its results (None: to be recomputed), and its recording for a split backward.

For a result that needs no gradient, None stands in the list.
"""

_backward = torch.autograd.backward
_no_context = nullcontext()


class MicroBatch:
    """The tensors that a stage keeps of one micro-batch between its instructions; each is freed after its last use."""

    __slots__ = (
        "arrivals",
        "batch",
        "gradient_arrivals",
        "gradients",
        "input_gradients",
        "inputs",
        "loss",
        "number",
        "outputs",
        "pending",
        "rows",
        "saved",
        "seeds",
        "targets",
    )

    def __init__(self, number: int, rows: range, seeds: tuple[tuple[int, ...], ...]) -> None:
        self.number = number
        self.rows = rows
        self.seeds = seeds
        self.arrivals: list[Any] = []
        self.gradient_arrivals: list[Any] = []
        self.clear()

    def wait_inputs(self) -> None:
        """Wait until every tensor that the forward reads has arrived."""
        for work in self.arrivals:
            work.wait()
        self.arrivals.clear()

    def wait_gradients(self) -> None:
        """Wait until every gradient that the backward starts from has arrived."""
        for work in self.gradient_arrivals:
            work.wait()
        self.gradient_arrivals.clear()

    def clear(self) -> None:
        """Drop everything of this step."""
        self.inputs: list[Tensor] | None = None
        self.batch: dict[str, Tensor] | None = None
        self.targets: Any = None
        self.saved: Any = None
        self.outputs: list[Tensor] | None = None
        self.loss: Tensor | None = None
        self.gradients: list[Tensor | None] | None = None
        self.input_gradients: list[Tensor | None] | None = None
        self.pending: list[Recorded] | None = None


class StageModule:
    """Layers ``first`` to ``last`` of a chain on the device of ``runtime``.

    ``shapes``: the tensors that cross each cut (``Chain.infer_shapes``). ``recompute``: layer ranges, both ends
    included. ``recomputed_modules``: modules that each layer recomputes, by the names of plans. ``split``: some
    backwards are split into I and W. ``singly``: each layer that is not recomputed is a separate segment, as with
    ``split``. ``modules``: layers that exist already, by number. ``count``: the number of terms of the mean loss,
    divided by the loss scale if there is one. ``division``: the division of layers among ranks.
    """

    def __init__(
        self,
        chain: Chain,
        shapes: Sequence[dict[str, TensorShape]],
        first: int,
        last: int,
        *,
        seed: int,
        recompute: Sequence[tuple[int, int]] = (),
        recomputed_modules: Sequence[str] = (),
        runtime: Runtime = CPU,
        training: Training = FULL,
        split: bool = False,
        singly: bool = False,
        modules: Mapping[int, nn.Module] | None = None,
        division: Division | None = None,
    ) -> None:
        self.chain = chain
        self.division = division
        self.first = first
        self.last = last
        self.seed = seed
        self.is_last = last == len(chain.specs) - 1
        self.counts_loss = division is None or division.counts
        self.counts_rows = division is None or division.counts_rows
        self._loss_context: Callable[[], AbstractContextManager[Any]] = (
            division.loss if division is not None and self.is_last else nullcontext
        )
        self.modules = chain.build_layers(range(first, last + 1), seed, runtime.device, modules)
        if division is not None:
            self._divide(division, modules or {})
        for index in self.modules.keys() - (modules or {}).keys() if recomputed_modules else ():
            recompute_modules(chain.specs[index], self.modules[index], recomputed_modules, _enclosing(division))
        for module in self.modules.values():
            module.train()
        self.reseed = runtime.seed
        self._runtime, self._training = runtime, training
        self._autocast = training.autocast(runtime.device, keeps_casts=False)  # of the loss, which has no weights
        ranges = list(segment_ranges(first, last, recompute, singly=split or singly))
        self.segments = tuple(self._segment(a, b, recompute=again) for a, b, again in ranges)
        self.shapes = shapes
        self.halves = [SplitBackward(segment.modules) for segment in self.segments] if split else None
        self.reads_batch = any(segment.batch_slots for segment in self.segments)
        self.needs_grad = [wanted(shapes, segment.first - 1) for segment in self.segments]
        self.needs_grad.append(() if self.is_last else wanted(shapes, last))
        self.count = 1.0
        self.plain = len(self.segments) == 1 and not self.segments[0].recompute and not split and not singly

    def _segment(self, first: int, last: int, *, recompute: bool) -> Segment:
        return Segment(
            self.chain,
            first,
            last,
            [self.modules[i] for i in range(first, last + 1)],
            self.reseed,
            recompute=recompute,
            autocast=_autocast(self._training, self._runtime.device),
            local=None if self.division is None else self.division.local,
        )

    def _divide(self, division: Division, there: Mapping[int, nn.Module]) -> None:
        """Divide the layers that are not divided yet, and make each tied parameter one object again."""
        for index, module in self.modules.items():
            if index not in there:
                division.divide(self.chain.specs[index], module)
        for tie in self.chain.ties:
            tie.rejoin({**there, **self.modules})

    def seeds(self, micro_batch: int, first_row: int) -> tuple[tuple[int, ...], ...]:
        """Return the random seeds of each segment's layers for a micro-batch (or its rows from ``first_row`` on)."""
        return tuple(
            tuple(
                layer_seed(self.seed, micro_batch, self.chain.specs[call.layer].name, first_row)
                for call in segment.calls
            )
            for segment in self.segments
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, by the full model's name, ``layer.parameter``; a tied one by its first name."""
        return self.chain.named_parameters(self.modules)

    def trainable(self) -> list[nn.Parameter]:
        """Return the parameters that get gradients."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def forward(self, cell: MicroBatch, key: int) -> list[Tensor]:
        """Run ``cell.inputs`` through the layers, keep what backward needs, and return the stage's results."""
        inputs: list[Tensor] = cell.inputs or []
        if self.plain:
            for tensor, needs in zip(inputs, self.needs_grad[0], strict=True):
                if needs:
                    tensor.requires_grad_()
            results: list[Tensor] = self.segments[0].run(inputs, cell.batch, cell.seeds[0], key)
            cell.saved = () if self.is_last else edges_of(results)
            cell.batch = None
            return results
        saved: list[Saved] = []
        for k, segment in enumerate(self.segments):
            for tensor, needs in zip(inputs, self.needs_grad[k], strict=True):
                if needs:
                    tensor.requires_grad_()
            if segment.recompute:
                with torch.no_grad():
                    results = segment.run(inputs, cell.batch, cell.seeds[k], key)
                saved.append((inputs, None, None))
            else:
                recorded = None if self.halves is None else self.halves[k].record()
                with recorded or _no_context:
                    results = segment.run(inputs, cell.batch, cell.seeds[k], key)
                saved.append((inputs, () if self._ends_in(segment) else edges_of(results), recorded))
            if segment is not self.segments[-1]:
                inputs = [tensor.detach() for tensor in results]
        cell.saved = saved
        return results

    @property
    def recomputes_loss(self) -> bool:
        """True if the loss is computed again before backward."""
        return self.is_last and self.segments[-1].recompute

    def recompute(self, cell: MicroBatch, key: int) -> None:
        """Run the recomputed layers of a micro-batch again, ahead of its backward."""
        for k in range(len(self.segments)):
            self._results_again(cell, k, key)

    def backward(self, cell: MicroBatch, key: int) -> None:
        """Back-propagate ``cell.gradients`` (last stage: the loss, by ``count``) to ``cell.input_gradients``."""
        if self.division is None:
            self._backward(cell, key)
        else:
            with self._loss_context():
                self._backward(cell, key)

    def _backward(self, cell: MicroBatch, key: int) -> None:
        if self.plain:
            back(cell.saved, cell.gradients, cell.loss, self.count)
            cell.input_gradients = gradients_of(cell.inputs or (), self.needs_grad[0])
        else:
            gradients = cell.gradients
            for k in range(len(self.segments) - 1, -1, -1):
                self._results_again(cell, k, key)
                inputs, results, _ = cell.saved.pop()
                back(results, gradients, cell.loss, self.count)
                cell.loss = None
                gradients = gradients_of(inputs, self.needs_grad[k])
                del results, inputs, _
            cell.input_gradients = gradients
        cell.saved = cell.loss = cell.gradients = cell.inputs = cell.batch = cell.targets = None

    def backward_input(self, cell: MicroBatch, key: int) -> None:
        """Compute the gradients of the inputs (I), and keep in the cell what W needs."""
        with self._loss_context():
            self._backward_input(cell, key)

    def _backward_input(self, cell: MicroBatch, key: int) -> None:
        assert self.halves is not None, "the stage was not made for backwards in two halves"
        gradients = cell.gradients
        pending: list[Recorded] = []
        for k in range(len(self.segments) - 1, -1, -1):
            self._results_again(cell, k, key)
            inputs, results, recorded = cell.saved.pop()
            roots, arrived = _roots(results, gradients, cell.loss, self.count)
            cell.loss = None
            computed = recorded.backward_input(roots, arrived, inputs)
            gradients = [
                None if not needs else torch.zeros_like(tensor) if gradient is None else gradient
                for tensor, gradient, needs in zip(inputs, computed, self.needs_grad[k], strict=True)
            ]
            pending.append(recorded)
            del results, inputs, recorded, roots, arrived, computed
        cell.input_gradients = gradients
        cell.pending = pending
        cell.saved = cell.loss = cell.gradients = cell.inputs = cell.batch = cell.targets = None

    def backward_weight(self, cell: MicroBatch, _: int = 0) -> None:
        """Add the gradients of the parameters (W), last layers first; each parameter's hooks fire once per segment."""
        assert cell.pending is not None, "a weight half without its input half"
        for recorded in cell.pending:
            recorded.backward_weight()
        cell.pending = None

    def count_terms(self, inputs: list[Tensor], batch: dict[str, Tensor], targets: Any) -> int:
        """Count the terms of the loss for some targets (last stage), by a forward without side effects."""
        with torch.no_grad():
            for segment in self.segments:
                inputs = segment.run_again(inputs, batch, [0] * len(segment.modules), 0)
            return self._loss(inputs, targets)[1]

    def _ends_in(self, segment: Segment) -> bool:
        return self.is_last and segment is self.segments[-1]

    def _results_again(self, cell: MicroBatch, k: int, key: int) -> None:
        inputs, results, _ = cell.saved[k]
        if results is not None:
            return
        segment = self.segments[k]
        recorded = None if self.halves is None else self.halves[k].record()
        with recorded or _no_context:
            results = segment.run_again(inputs, cell.batch, cell.seeds[k], key)
        if self._ends_in(segment):
            cell.loss, _ = self.loss_of(cell, results)
        cell.saved[k] = inputs, () if self._ends_in(segment) else edges_of(results), recorded

    def loss_of(self, cell: MicroBatch, results: Sequence[Tensor]) -> tuple[Tensor, int]:
        """Return the job's loss of a micro-batch: its sum and number of terms. ModelMismatch if it is no scalar."""
        return self._loss(results, cell.targets)

    def _loss(self, results: Sequence[Tensor], targets: Any) -> tuple[Tensor, int]:
        chain = self.chain
        with self._autocast or _no_context, self._loss_context():
            total, count = chain.loss(dict(zip(chain.outputs, results, strict=True)), targets)
            if self.division is not None:
                total = self.division.whole_loss(total)
        if total.dim():
            raise ModelMismatch(
                f"the loss of job {chain.job.name!r} has the shape {tuple(total.shape)}, not one number"
            )
        return total, count


def _autocast(
    training: Training, device: torch.device
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]] | None:
    """Create the contexts of the layers, with gradients and without; None in full precision."""
    kept, apart = training.autocast(device), training.autocast(device, keeps_casts=False)
    return None if kept is None or apart is None else (kept, apart)


def _enclosing(division: Division | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that creates the context in which a rank's layers run, where ranks share sequences."""
    context = None if division is None else division.context
    return nullcontext if context is None else lambda: context


def layer_seed(seed: int, micro_batch: int, name: str, first_row: int) -> int:
    """Return a layer's part of its random seed; the part of the step (``step_seed``) is added to it."""
    return derived_seed("random", seed, micro_batch, name, first_row)


def step_seed(seed: int, step: int) -> int:
    """Return the step's part of every random seed."""
    return derived_seed("step", seed, step)


def wanted(shapes: Sequence[dict[str, TensorShape]], cut: int) -> tuple[bool, ...]:
    return tuple(shape.needs_grad for shape in shapes[cut].values()) if cut >= 0 else ()


def back_loss(loss: Tensor, count: float) -> None:
    """Back-propagate a sum of loss terms as its part of a mean over ``count`` terms."""
    if loss.requires_grad:
        _backward(loss, torch.full_like(loss, 1.0 / count))


def edges_of(results: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Return the results' places in the graph."""
    return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in results]


def back(
    results: Sequence[Root | None], gradients: list[Tensor | None] | None, loss: Tensor | None, count: float
) -> None:
    if loss is not None:
        back_loss(loss, count)
        return
    if gradients is None:
        return
    if len(results) == 1:
        if gradients[0] is not None and results[0] is not None:
            _backward(results[0], gradients[0])
        return
    roots, arrived = _roots(results, gradients, None, count)
    if roots:
        _backward(roots, arrived)


def _roots(
    results: Sequence[Root | None], gradients: list[Tensor | None] | None, loss: Tensor | None, count: float
) -> tuple[list[Any], list[Tensor]]:
    """Return the roots of a backward, and their gradients."""
    if loss is not None:
        return ([loss], [torch.full_like(loss, 1.0 / count)]) if loss.requires_grad else ([], [])
    pairs = [(t, g) for t, g in zip(results, gradients or (), strict=True) if g is not None and t is not None]
    return [t for t, _ in pairs], [g for _, g in pairs]


def gradients_of(inputs: Sequence[Tensor], needs_grad: Sequence[bool]) -> list[Tensor | None]:
    """Return the leaves' gradients: None where none is needed, zeros where the segment does not use the tensor."""
    return [
        None if not needs else tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        for tensor, needs in zip(inputs, needs_grad, strict=True)
    ]

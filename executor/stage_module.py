"""A stage's layers as one callable with a backward, cut into segments where some layers are recomputed.

Between segments, as between stages, tensors are detached: each segment's inputs are leaves that get their gradient
from the segment's own backward. A recomputed segment keeps its inputs alone and runs a second time before its backward,
with the same random state. A tensor that a segment only passes on is both its input and its output: backward on the
leaf itself hands the gradient through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.chain import Chain, TensorShape, derived_seed
from penstock.executor.gpu import reseeder
from penstock.schemas.errors import ModelMismatch

Reseed = Callable[[int], Any]
_backward = torch.autograd.backward


class MicroBatch:
    """What a stage keeps of one micro-batch between its instructions; everything goes as soon as it is used up."""

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
        """Return when every tensor that the forward reads is there."""
        for work in self.arrivals:
            work.wait()
        self.arrivals.clear()

    def wait_gradients(self) -> None:
        """Return when every gradient that the backward starts from is there."""
        for work in self.gradient_arrivals:
            work.wait()
        self.gradient_arrivals.clear()

    def clear(self) -> None:
        """Forget everything of this step."""
        self.inputs: list[Tensor] | None = None
        self.batch: dict[str, Tensor] | None = None
        self.targets: Any = None
        self.saved: Any = None
        self.outputs: list[Tensor] | None = None
        self.loss: Tensor | None = None
        self.gradients: list[Tensor | None] | None = None
        self.input_gradients: list[Tensor | None] | None = None


class Segment:
    """Consecutive layers that are run, and backed, as one; ``recompute``: they run again before their backward."""

    def __init__(
        self, chain: Chain, first: int, last: int, modules: Sequence[nn.Module], reseed: Reseed, *, recompute: bool
    ) -> None:
        self.chain = chain
        self.first = first
        self.recompute = recompute
        self.modules = tuple(modules)
        self.buffers = tuple(buffer for module in modules for buffer in module.buffers())
        self.reseed = reseed
        incoming = chain.cuts[first - 1] if first else ()
        outgoing = chain.cuts[last] if last < len(chain.specs) - 1 else chain.outputs
        slots = {name: i for i, name in enumerate(incoming)}
        self.given: list[tuple[int, str]] = []
        self.calls: list[tuple[nn.Module, int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]] = []
        size = len(incoming)
        for i, module in enumerate(modules, start=first):
            spec = chain.specs[i]
            reads = []
            for name in spec.reads:
                if name in chain.inputs[i]:
                    self.given.append((size, name))
                    reads.append(size)
                    size += 1
                else:
                    reads.append(slots[name])
            writes = []
            for name in spec.writes:
                slots[name] = size
                writes.append(size)
                size += 1
            read = reads[0] if len(reads) == 1 else -1
            write = writes[0] if len(writes) == 1 else -1
            self.calls.append((module, read, write, tuple(reads), tuple(writes), (), i))
        self.results = tuple(slots[name] for name in outgoing)
        self.free = (None,) * (size - len(incoming))
        self._drop_dead_slots(len(incoming))

    def _drop_dead_slots(self, num_incoming: int) -> None:
        """Each layer lets go of the slots that it is the last to read."""
        kept = set(self.results)
        for k in range(len(self.calls) - 1, -1, -1):
            module, read, write, reads, writes, _, i = self.calls[k]
            dead = tuple(slot for slot in dict.fromkeys((*reads, *writes)) if slot not in kept and slot >= num_incoming)
            kept.update(dead)
            self.calls[k] = module, read, write, reads, writes, dead, i

    def run(self, inputs: Sequence[Tensor], batch: dict[str, Tensor] | None, seeds: Sequence[int], key: int) -> Any:
        """The tensors that leave the segment, in the order of the cut after it; ``key`` is the step's seed."""
        env: list[Any] = [*inputs, *self.free]
        if batch is not None:
            for slot, name in self.given:
                env[slot] = batch[name]
        reseed = self.reseed
        for (module, read, write, reads, writes, dead, i), seed in zip(self.calls, seeds, strict=True):
            reseed(seed + key)
            result = module(env[read]) if read >= 0 else module(*[env[slot] for slot in reads])
            if write >= 0 and type(result) is Tensor:
                env[write] = result
            else:
                for slot, one in zip(writes, self._checked(i, result), strict=True):
                    env[slot] = one
            for slot in dead:
                env[slot] = None
        return [env[slot] for slot in self.results]

    def run_again(
        self, inputs: Sequence[Tensor], batch: dict[str, Tensor] | None, seeds: Sequence[int], key: int
    ) -> Any:
        """``run``, leaving buffers (running statistics) as the first run left them."""
        before = [buffer.clone() for buffer in self.buffers]
        results = self.run(inputs, batch, seeds, key)
        for buffer, value in zip(self.buffers, before, strict=True):
            buffer.data.copy_(value)
        return results

    def _checked(self, index: int, result: Any) -> Sequence[Tensor]:
        spec = self.chain.specs[index]
        results = result if isinstance(result, tuple | list) else (result,)
        if len(results) != len(spec.writes) or not all(isinstance(one, Tensor) for one in results):
            shown = ", ".join(type(one).__name__ for one in results)
            raise ModelMismatch(f"layer {spec.name!r} writes {spec.writes!r} but returned ({shown})")
        return results


class StageModule:
    """Layers ``first`` to ``last`` of a chain on one device.

    ``shapes``: what crosses each cut (``Chain.infer_shapes``). ``recompute``: layer ranges, both ends included.
    ``count``: how many terms the loss is the mean of.
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
        device: torch.device | str = "cpu",
    ) -> None:
        self.chain = chain
        self.first = first
        self.last = last
        self.seed = seed
        self.is_last = last == len(chain.specs) - 1
        self.modules = {i: chain.build_layer(i, seed, device) for i in range(first, last + 1)}
        for module in self.modules.values():
            module.train()
        self.reseed: Reseed = reseeder(torch.device(device))
        self.segments = tuple(
            Segment(chain, a, b, [self.modules[i] for i in range(a, b + 1)], self.reseed, recompute=again)
            for a, b, again in _segments(first, last, recompute)
        )
        self.reads_batch = any(segment.given for segment in self.segments)
        self.needs_grad = [_needs_grad(shapes, segment.first - 1) for segment in self.segments]
        self.needs_grad.append(() if self.is_last else _needs_grad(shapes, last))
        self.count = 1.0
        self.plain = len(self.segments) == 1 and not self.segments[0].recompute

    def seeds(self, micro_batch: int, first_row: int) -> tuple[tuple[int, ...], ...]:
        """The random seeds of each segment's layers for a micro-batch (or its rows from ``first_row`` on)."""
        return tuple(
            tuple(layer_seed(self.seed, micro_batch, self.chain.specs[i].name, first_row) for *_, i in segment.calls)
            for segment in self.segments
        )

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the full model's names, ``layer.parameter``, each once."""
        seen: set[int] = set()
        for i, module in self.modules.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{self.chain.specs[i].name}.{name}", parameter

    def trainable(self) -> list[nn.Parameter]:
        """The parameters that get gradients."""
        return [parameter for _, parameter in self.named_parameters() if parameter.requires_grad]

    def forward(self, cell: MicroBatch, key: int) -> list[Tensor]:
        """Run ``cell.inputs`` through the layers, keeping what backward needs; the tensors that leave the stage."""
        inputs: list[Tensor] = cell.inputs or []
        if self.plain:
            for tensor, needs in zip(inputs, self.needs_grad[0], strict=True):
                if needs:
                    tensor.requires_grad_()
            results: list[Tensor] = self.segments[0].run(inputs, cell.batch, cell.seeds[0], key)
            cell.saved = () if self.is_last else results
            cell.batch = None
            return results
        saved: list[tuple[list[Tensor], Sequence[Tensor] | None]] = []
        for segment, needs_grad, seeds in zip(self.segments, self.needs_grad, cell.seeds, strict=False):
            for tensor, needs in zip(inputs, needs_grad, strict=True):
                if needs:
                    tensor.requires_grad_()
            with torch.set_grad_enabled(not segment.recompute):
                results = segment.run(inputs, cell.batch, seeds, key)
            saved.append((inputs, None if segment.recompute else () if self._ends_in(segment) else results))
            if segment is not self.segments[-1]:
                inputs = [tensor.detach() for tensor in results]
        cell.saved = saved
        return results

    @property
    def recomputes_loss(self) -> bool:
        """Whether the loss is computed again before backward."""
        return self.is_last and self.segments[-1].recompute

    def recompute(self, cell: MicroBatch, key: int) -> None:
        """Run the recomputed layers of a micro-batch again, ahead of its backward."""
        for k in range(len(self.segments)):
            self._results_again(cell, k, key)

    def backward(self, cell: MicroBatch, key: int) -> None:
        """Back-propagate ``cell.gradients`` (last stage: the loss, by ``count``) to ``cell.input_gradients``."""
        if self.plain:
            _back(cell.saved, cell.gradients, cell.loss, self.count)
            cell.input_gradients = _gradients(cell.inputs or (), self.needs_grad[0])
        else:
            gradients = cell.gradients
            for k in range(len(self.segments) - 1, -1, -1):
                self._results_again(cell, k, key)
                inputs, results = cell.saved.pop()
                _back(results, gradients, cell.loss, self.count)
                cell.loss = None
                gradients = _gradients(inputs, self.needs_grad[k])
                del results, inputs
            cell.input_gradients = gradients
        cell.saved = cell.loss = cell.gradients = cell.inputs = cell.batch = cell.targets = None

    def count_terms(self, inputs: list[Tensor], batch: dict[str, Tensor], targets: Any) -> int:
        """How many terms the loss has for some targets (last stage): a forward that leaves no trace."""
        with torch.no_grad():
            for segment in self.segments:
                inputs = segment.run_again(inputs, batch, [0] * len(segment.modules), 0)
            return self._loss(inputs, targets)[1]

    def _ends_in(self, segment: Segment) -> bool:
        return self.is_last and segment is self.segments[-1]

    def _results_again(self, cell: MicroBatch, k: int, key: int) -> None:
        inputs, results = cell.saved[k]
        if results is not None:
            return
        segment = self.segments[k]
        results = segment.run_again(inputs, cell.batch, cell.seeds[k], key)
        if self._ends_in(segment):
            cell.loss, _ = self.loss_of(cell, results)
            results = ()
        cell.saved[k] = inputs, results

    def loss_of(self, cell: MicroBatch, results: Sequence[Tensor]) -> tuple[Tensor, int]:
        """The job's loss of a micro-batch: its sum and how many terms. ModelMismatch when it is not a scalar."""
        return self._loss(results, cell.targets)

    def _loss(self, results: Sequence[Tensor], targets: Any) -> tuple[Tensor, int]:
        chain = self.chain
        total, count = chain.job.loss(dict(zip(chain.outputs, results, strict=True)), targets)
        if total.dim():
            raise ModelMismatch(
                f"the loss of job {chain.job.name!r} has the shape {tuple(total.shape)}, not one number"
            )
        return total, count


def layer_seed(seed: int, micro_batch: int, name: str, first_row: int) -> int:
    """What a layer's random state is made of, but for the step (``step_seed``), which is added."""
    return derived_seed("random", seed, micro_batch, name, first_row)


def step_seed(seed: int, step: int) -> int:
    """The step's part of every random state."""
    return derived_seed("step", seed, step)


def _segments(first: int, last: int, recompute: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, bool]]:
    """Layer ranges that cover the stage, and whether they are recomputed."""
    at = first
    for a, b in sorted(recompute):
        if at < a:
            yield at, a - 1, False
        yield max(a, at), b, True
        at = b + 1
    if at <= last:
        yield at, last, False


def _needs_grad(shapes: Sequence[dict[str, TensorShape]], cut: int) -> tuple[bool, ...]:
    return tuple(shape.needs_grad for shape in shapes[cut].values()) if cut >= 0 else ()


def back_loss(loss: Tensor, count: float) -> None:
    """Back-propagate a sum of loss terms as its part of a mean over ``count`` terms."""
    if loss.requires_grad:
        _backward(loss, torch.full_like(loss, 1.0 / count))


def _back(results: Sequence[Tensor], gradients: list[Tensor | None] | None, loss: Tensor | None, count: float) -> None:
    if loss is not None:
        back_loss(loss, count)
        return
    if gradients is None:
        return
    if len(results) == 1:
        if gradients[0] is not None and results[0].requires_grad:
            _backward(results[0], gradients[0])
        return
    pairs = [(t, g) for t, g in zip(results, gradients, strict=True) if g is not None and t.requires_grad]
    if pairs:
        _backward([t for t, _ in pairs], [g for _, g in pairs])


def _gradients(inputs: Sequence[Tensor], needs_grad: Sequence[bool]) -> list[Tensor | None]:
    """The leaves' gradients; zeros for a tensor that the segment passes nowhere; None where none is wanted."""
    return [
        None if not needs else tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
        for tensor, needs in zip(inputs, needs_grad, strict=True)
    ]

"""One run of a job's layers on the meta device: operations, memory and collectives of one GPU.

Layers that are built alike, and read tensors alike, are run once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from penstock.executor.profiling.memory_use import LiveBytes
from penstock.executor.profiling.meta_cost import (
    FusedKernels,
    Operation,
    OperationRecorder,
    SavedStorages,
    storage_of,
)
from penstock.executor.profiling.numberless import Copying, Numberless
from penstock.executor.run.chain import Chain, TensorShape, remedy_of, tensor_shape
from penstock.executor.run.job import Job, alike
from penstock.executor.runtime.nested import on_tensors
from penstock.executor.stage.precision import FULL, Training
from penstock.facts.device_table import DeviceFacts
from penstock.schemas.errors import ModelMismatch, PenstockError
from penstock.schemas.transformers.degrees import Collective
from penstock.schemas.transformers.degrees import Operation as LayersCollective

CollectiveKind = LayersCollective | Literal["reduce", "broadcast"]
"""The collectives within layers, and the collectives of optimizer shares."""


class Sent(NamedTuple):
    """One collective: its kind, its group's name, and the bytes of the whole tensor, or the bytes one GPU sends."""

    operation: CollectiveKind
    group: str
    bytes: int


class LayerCost(NamedTuple):
    """A layer's cost for one micro-batch; ``sent_…``: its collectives one by one, summed up in ``collectives``.

    ``workspace_bytes``: bytes needed only while it runs, where the tracer counts them. ``copied_bytes``: bytes of its
    parameters' copies in 16 bits, which autocast keeps for all micro-batches.
    """

    forward: list[Operation]
    backward: list[Operation]
    stash_bytes: int
    workspace_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    sent_forward: tuple[Sent, ...] = ()
    sent_backward: tuple[Sent, ...] = ()
    copied_bytes: int = 0


class LayerSizes(NamedTuple):
    """The sizes of a layer on one GPU: bytes of each parameter by name, and the traffic of one optimizer step."""

    parameters: dict[str, int]
    update_bytes: int


class Run(NamedTuple):
    """All layers at one micro-batch size, with the shapes of the batch's ``inputs`` and of each layer's results."""

    costs: list[LayerCost]
    shapes: list[dict[str, TensorShape]]
    written: list[list[tuple[int, ...]]]
    inputs: dict[str, tuple[int, ...]]


Maker = Callable[[list[Tensor], SavedStorages], Tensor]
"""A function that creates a layer's result from the tensors that it reads and the storages that are kept."""


Key = tuple[Hashable, bool, Hashable]
"""The way a layer is built and divided, whether it is the last one, and the properties of its inputs."""


class Traced(NamedTuple):
    """The cost of all layers alike; ``makers`` create their results, where this is possible."""

    cost: LayerCost
    makers: list[Maker] | None


class Tracer:
    """A tracer of the whole layers of a chain, at any number of sizes; ``dtype`` None: in the types they are built in.

    ``modules``: the layers by number, on the meta device; of layers that are built alike the first is enough.
    ``counts_workspace``: run layers once more, to count the bytes that they need only while they run. ``training``: its
    autocast is used for layers and loss, as on ranks. ``traced``: the layers that have run, by size.
    """

    def __init__(
        self,
        chain: Chain,
        modules: Sequence[nn.Module] | Mapping[int, nn.Module],
        dtype: torch.dtype | None,
        *,
        counts_workspace: bool = False,
        training: Training = FULL,
    ) -> None:
        self.chain, self.dtype, self.counts_workspace, self.training = chain, dtype, counts_workspace, training
        self.numberless = Numberless(training)
        self._modules = {index: self.numberless.module(modules[index]) for index in _numbers(modules)}
        self.alike = [(alike(spec.build), alike(spec.parallel)) for spec in chain.specs]
        self.traced: dict[int, dict[Key, Traced]] = {}
        self._runs: dict[int, Run] = {}
        self._layer_sizes: dict[Hashable, LayerSizes] = {}

    def module(self, index: int) -> nn.Module:
        """Return the layer, or the first layer that is built alike."""
        return self._modules[self.alike.index(self.alike[index])]

    def sizes(self, index: int) -> LayerSizes:
        """Return the sizes of layer ``index`` on one GPU."""
        key = self.alike[index]
        if key not in self._layer_sizes:
            self._layer_sizes[key] = self.sizes_of(self.module(index))
        return self._layer_sizes[key]

    def sizes_of(self, module: nn.Module) -> LayerSizes:
        """Compute the sizes of a layer on one GPU."""
        each = {name: parameter.numel() * parameter.itemsize for name, parameter in module.named_parameters()}
        return LayerSizes(each, update_bytes(self.chain.job, module.parameters()))

    def batch(self, size: int) -> tuple[dict[str, Tensor], Any]:
        """Return inputs and targets of ``size`` samples, without numbers."""
        inputs, targets = self.chain.batch_inputs(range(size)), self.chain.job.batch(0, range(size))[1]
        here = self.numberless.tensor
        return {name: here(_as(each, self.dtype)) for name, each in inputs.items()}, on_tensors(here, targets)

    def run(self, size: int) -> Run:
        """Run all layers at ``size`` samples, once. ModelMismatch or UnsupportedRequest if a layer does not run."""
        if size not in self._runs:
            self._runs[size] = self._run(size)
        return self._runs[size]

    def _run(self, size: int) -> Run:
        chain = self.chain
        env, targets = self.batch(size)
        storages = SavedStorages()
        traces = self.traced.setdefault(size, {})
        run = Run([], [], [], {name: tuple(tensor.shape) for name, tensor in env.items()})
        for i, spec in enumerate(chain.specs):
            inputs = [env[name] for name in spec.reads]
            key: Key = (self.alike[i], i == len(chain.specs) - 1, _seen(inputs, storages))
            traced = traces.get(key)
            if traced is not None and traced.makers is not None:
                results = [make(inputs, storages) for make in traced.makers]
            else:
                storages.leave_out([*self.module(i).parameters(), *self.module(i).buffers()])
                results, cost = self._checked(i, inputs, env, storages, targets)
                traced = traces[key] = Traced(cost, _makers(inputs, results, storages))
            run.costs.append(traced.cost)
            run.written.append([tuple(tensor.shape) for tensor in results])
            for name, tensor in zip(spec.writes, results, strict=True):
                env[name] = tensor.detach().requires_grad_(tensor.requires_grad)
            if i < len(chain.cuts):
                run.shapes.append({name: tensor_shape(env[name]) for name in chain.cuts[i]})
        return run

    def _checked(
        self, index: int, inputs: list[Tensor], env: dict[str, Tensor], storages: SavedStorages, targets: Any
    ) -> tuple[list[Tensor], LayerCost]:
        try:
            return self.trace(index, inputs, env, storages, targets)
        except PenstockError:
            raise
        except Exception as error:
            raise self.failure(index, error) from error

    def failure(self, index: int, error: Exception) -> PenstockError:
        """Create the error for a layer that does not run."""
        why, name = f"{type(error).__name__}: {error}", self.chain.specs[index].name
        needs_numbers = any(word in why for word in ("NotImplementedError", "DataDependent", "meta"))
        measuring = "measure the profile instead of computing it" if needs_numbers else None
        return ModelMismatch(
            f"layer {name!r} does not run on the meta device: {why}", remedy=remedy_of(name, error) or measuring
        )

    def trace(
        self, index: int, inputs: list[Tensor], env: dict[str, Tensor], storages: SavedStorages, targets: Any
    ) -> tuple[list[Tensor], LayerCost]:
        """Run layer ``index`` forward and backward; return its results and its cost."""
        for parameter in self.module(index).parameters():
            parameter.grad = torch.empty_like(parameter)
        forward, backward = OperationRecorder(), OperationRecorder()
        with self.copying(index) as copies:
            if self.numberless.lowered:
                self.passes(index, inputs, env, SavedStorages(), targets, copies, nullcontext())
            storages.leave_out(copies.copies)
            results, kept = self.passes(index, inputs, env, storages, targets, forward, backward)
            needed = self.workspace(index, inputs, env, targets, kept)
        return results, LayerCost(
            forward.operations, backward.operations, kept, needed, copied_bytes=copies.copied_bytes
        )

    def copying(self, index: int) -> AbstractContextManager[Copying]:
        """Let autocast keep its copies of layer ``index``'s parameters within this context. It starts without any.

        The layer's first run within this context makes the copies; later runs find them.
        """
        return self.numberless.copying(self.module(index).parameters())

    def workspace(self, index: int, inputs: list[Tensor], env: dict[str, Tensor], targets: Any, kept: int) -> int:
        """Count the bytes that layer ``index`` needs only while it runs: the most of a pass, less what stays.

        The result is 0 if the tracer does not count workspace. After a forward the stash of ``kept`` bytes stays, or
        the results. A backward frees the stash, and leaves its inputs' gradients. A parameter's new gradient exists
        together with the gradient to which it is added.
        """
        if not self.counts_workspace:
            return 0
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        alive = LiveBytes(on_meta=True)
        with alive:
            with FusedKernels():
                results, roots = self._forward(index, leaves, env, targets)
            if index == len(self.chain.specs) - 1:
                results = roots  # the loss has freed the tensors before it
            forward = alive.bytes - max(kept, held_once(results))
            gradients = [torch.empty_like(root) for root in roots]
            before = alive.restart()
            if roots:
                torch.autograd.backward(roots, gradients)
            arrived = [leaf.grad for leaf in leaves if leaf.grad is not None]
            backward = alive.bytes - before - held_once(arrived)
        return max(0, forward, backward)

    def _forward(
        self, index: int, leaves: list[Tensor], env: dict[str, Tensor], targets: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run layer ``index`` forward. Return its results and the roots of its backward; at the end, the loss."""
        with self.numberless.layers():
            results = list(self.chain.call(index, self.module(index), leaves))
            roots = [tensor for tensor in results if tensor.requires_grad]
            if index == len(self.chain.specs) - 1:
                tensors = env | dict(zip(self.chain.specs[index].writes, results, strict=True))
                roots = _loss(self.chain, tensors, targets) or roots
        return results, roots

    def passes(
        self,
        index: int,
        inputs: list[Tensor],
        env: dict[str, Tensor],
        storages: SavedStorages,
        targets: Any,
        forward: AbstractContextManager[Any],
        backward: AbstractContextManager[Any],
    ) -> tuple[list[Tensor], int]:
        """Run both passes of a layer, each within its context; return its results and the bytes that it adds."""
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs]
        with storages.counting() as kept:
            with FusedKernels(), forward:
                results, roots = self._forward(index, leaves, env, targets)
            stash_bytes = kept()
        with backward:
            if roots:
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        return results, stash_bytes


def held_once(tensors: Iterable[Tensor]) -> int:
    """Sum the bytes of the storages of this rank's parts, each once."""
    storages = {storage._cdata: storage for storage in map(storage_of, tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _loss(chain: Chain, env: dict[str, Tensor], targets: Any) -> list[Tensor]:
    total, _ = chain.loss(env, targets)
    return [total] if total.requires_grad else []


def update_bytes(job: Job, parameters: Iterable[nn.Parameter]) -> int:
    """Return the traffic of one fused optimizer step: parameters and states read and written, gradients read."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return 0
    optimizer = job.optimizer(trainable)
    for parameter in trainable:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    parameter_bytes = sum(parameter.numel() * parameter.itemsize for parameter in trainable)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return 3 * parameter_bytes + 2 * sum(state.numel() * state.itemsize for state in states)


def update_ns(sizes: LayerSizes, cost: LayerCost, device: DeviceFacts) -> int:
    """Return the time of a layer's optimizer step and of autocast's new copies (4 to 2 bytes), in ns."""
    return math.ceil((sizes.update_bytes + 3 * cost.copied_bytes) / device.bytes_per_s() * 1e9)


def _seen(inputs: Sequence[Tensor], storages: SavedStorages) -> Hashable:
    """Return all that a layer's costs depend on besides the layer: its inputs, and which of them are kept already."""
    places = [storage_of(tensor)._cdata for tensor in inputs]
    return tuple(
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor in storages, places.index(place))
        for tensor, place in zip(inputs, places, strict=True)
    )


def _makers(tensors: Sequence[Tensor], results: Sequence[Tensor], storages: SavedStorages) -> list[Maker] | None:
    """Return functions that create an alike layer's results: new tensors, or inputs again; None where neither fits."""
    makers: list[Maker] = []
    inputs = [storage_of(tensor)._cdata for tensor in tensors]
    places = [storage_of(tensor)._cdata for tensor in results]
    for result, place in zip(results, places, strict=True):
        if place in inputs and result.shape == tensors[inputs.index(place)].shape:
            makers.append(partial(_input, index=inputs.index(place)))
        elif (
            place in inputs
            or places.count(place) > 1
            or storage_of(result).nbytes() != result.numel() * result.itemsize
        ):
            return None
        else:
            makers.append(partial(_new, like=result, is_kept=result in storages))
    return makers


def _input(inputs: list[Tensor], _storages: SavedStorages, index: int) -> Tensor:
    return inputs[index]


def _new(_inputs: list[Tensor], storages: SavedStorages, like: Tensor, is_kept: bool) -> Tensor:
    tensor = torch.empty_like(like.detach()).requires_grad_(like.requires_grad)
    if is_kept:
        storages.leave_out([tensor])
    return tensor


def _numbers(modules: Sequence[nn.Module] | Mapping[int, nn.Module]) -> Iterable[int]:
    return modules if isinstance(modules, Mapping) else range(len(modules))


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

"""One run of a job's layers on the meta device: what each computes, keeps and sends, on one GPU of those that share it.

Of layers that are built alike, and read tensors alike, only the first is run.
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
"""Those within layers, and those of shares of the optimizer."""


class Sent(NamedTuple):
    """One collective: its kind, the name of its group, and the bytes of the whole tensor, or of what one GPU sends."""

    operation: CollectiveKind
    group: str
    bytes: int


class LayerCost(NamedTuple):
    """What a layer does for one micro-batch; ``sent_…``: its collectives one by one, which ``collectives`` sums up.

    ``workspace_bytes``: needed only while it runs, where the tracer counts them. ``copied_bytes``: of its parameters'
    copies in 16 bits, which autocast keeps for all micro-batches.
    """

    forward: list[Operation]
    backward: list[Operation]
    stash_bytes: int
    workspace_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    sent_forward: tuple[Sent, ...] = ()
    sent_backward: tuple[Sent, ...] = ()
    copied_bytes: int = 0


class Held(NamedTuple):
    """What one GPU has of a layer: bytes of each parameter by name, and the traffic of one optimizer step."""

    parameters: dict[str, int]
    update_bytes: int


class Run(NamedTuple):
    """All layers at one micro-batch size; shapes of the batch's ``inputs``, and of what each layer has ``written``."""

    costs: list[LayerCost]
    shapes: list[dict[str, TensorShape]]
    written: list[list[tuple[int, ...]]]
    inputs: dict[str, tuple[int, ...]]


Maker = Callable[[list[Tensor], SavedStorages], Tensor]
"""Makes a result of a layer of what it reads, and of the storages that are kept."""


Key = tuple[Hashable, bool, Hashable]
"""How a layer is built and divided, whether it is the last one, and what it is given."""


class Traced(NamedTuple):
    """The cost of all layers alike; ``made`` says how to make their results, where that is known."""

    cost: LayerCost
    made: list[Maker] | None


class Tracer:
    """Runs the layers of a chain, whole, at any number of sizes; ``dtype`` None: in the types they are built in.

    ``modules``: the layers by number, on the meta device; of those that are built alike the first will do.
    ``counts_workspace``: layers are run once more, for the bytes that they need only while they run. ``training``:
    layers and loss run under its autocast, as ranks run them. ``traced``: the layers that have run, by size.
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
        self._held: dict[Hashable, Held] = {}

    def module(self, index: int) -> nn.Module:
        """The layer, or the first one that is built alike."""
        return self._modules[self.alike.index(self.alike[index])]

    def held(self, index: int) -> Held:
        """What one GPU has of layer ``index``."""
        key = self.alike[index]
        if key not in self._held:
            self._held[key] = self.held_of(self.module(index))
        return self._held[key]

    def held_of(self, module: nn.Module) -> Held:
        """What one GPU has of a layer."""
        each = {name: parameter.numel() * parameter.itemsize for name, parameter in module.named_parameters()}
        return Held(each, update_bytes(self.chain.job, module.parameters()))

    def batch(self, size: int) -> tuple[dict[str, Tensor], Any]:
        """Inputs and targets of ``size`` samples, without numbers."""
        inputs, targets = self.chain.batch_inputs(range(size)), self.chain.job.batch(0, range(size))[1]
        here = self.numberless.tensor
        return {name: here(_as(each, self.dtype)) for name, each in inputs.items()}, on_tensors(here, targets)

    def run(self, size: int) -> Run:
        """All layers at ``size`` samples, run once. Raises ModelMismatch or UnsupportedRequest for one that cannot."""
        if size not in self._runs:
            self._runs[size] = self._run(size)
        return self._runs[size]

    def _run(self, size: int) -> Run:
        chain = self.chain
        env, targets = self.batch(size)
        storages = SavedStorages()
        known = self.traced.setdefault(size, {})
        found = Run([], [], [], {name: tuple(tensor.shape) for name, tensor in env.items()})
        for i, spec in enumerate(chain.specs):
            given = [env[name] for name in spec.reads]
            key: Key = (self.alike[i], i == len(chain.specs) - 1, _seen(given, storages))
            traced = known.get(key)
            if traced is not None and traced.made is not None:
                results = [make(given, storages) for make in traced.made]
            else:
                storages.leave_out([*self.module(i).parameters(), *self.module(i).buffers()])
                results, cost = self._checked(i, given, env, storages, targets)
                traced = known[key] = Traced(cost, _makers(given, results, storages))
            found.costs.append(traced.cost)
            found.written.append([tuple(tensor.shape) for tensor in results])
            for name, tensor in zip(spec.writes, results, strict=True):
                env[name] = tensor.detach().requires_grad_(tensor.requires_grad)
            if i < len(chain.cuts):
                found.shapes.append({name: tensor_shape(env[name]) for name in chain.cuts[i]})
        return found

    def _checked(
        self, index: int, given: list[Tensor], env: dict[str, Tensor], storages: SavedStorages, targets: Any
    ) -> tuple[list[Tensor], LayerCost]:
        try:
            return self.trace(index, given, env, storages, targets)
        except PenstockError:
            raise
        except Exception as error:
            raise self.failure(index, error) from error

    def failure(self, index: int, error: Exception) -> PenstockError:
        """The error of a layer that does not run."""
        why, name = f"{type(error).__name__}: {error}", self.chain.specs[index].name
        needs_numbers = any(word in why for word in ("NotImplementedError", "DataDependent", "meta"))
        measuring = "measure the profile instead of computing it" if needs_numbers else None
        return ModelMismatch(
            f"layer {name!r} does not run on the meta device: {why}", remedy=remedy_of(name, error) or measuring
        )

    def trace(
        self, index: int, given: list[Tensor], env: dict[str, Tensor], storages: SavedStorages, targets: Any
    ) -> tuple[list[Tensor], LayerCost]:
        """Forward and backward of layer ``index``; its results, and what it took."""
        for parameter in self.module(index).parameters():
            parameter.grad = torch.empty_like(parameter)
        forward, backward = OperationRecorder(), OperationRecorder()
        with self.copying(index) as copies:
            if self.numberless.lowered:
                self.passes(index, given, env, SavedStorages(), targets, copies, nullcontext())
            storages.leave_out(copies.copies)
            results, kept = self.passes(index, given, env, storages, targets, forward, backward)
            needed = self.workspace(index, given, env, targets, kept)
        return results, LayerCost(
            forward.operations, backward.operations, kept, needed, copied_bytes=copies.copied_bytes
        )

    def copying(self, index: int) -> AbstractContextManager[Copying]:
        """Inside it autocast keeps its copies of the parameters of layer ``index``, which it has made none of before.

        Its first run, within what this gives, makes them; those after it find them.
        """
        return self.numberless.copying(self.module(index).parameters())

    def workspace(self, index: int, given: list[Tensor], env: dict[str, Tensor], targets: Any, kept: int) -> int:
        """Bytes that layer ``index`` needs only while it runs: the most of a pass, less what stays; 0 if not counted.

        After a forward what is ``kept`` stays, or its results; a backward gives back what it uses up, and leaves the
        gradients of its inputs. A new gradient of a parameter is there with the one that it is added to.
        """
        if not self.counts_workspace:
            return 0
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
        alive = LiveBytes(on_meta=True)
        with alive:
            with FusedKernels():
                results, roots = self._forward(index, leaves, env, targets)
            if index == len(self.chain.specs) - 1:
                results = roots  # what a loss has used up is gone
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
        """What layer ``index`` writes, and where its backward begins: the loss, after the last layer."""
        with self.numberless.layers():
            results = list(self.chain.call(index, self.module(index), leaves))
            roots = [tensor for tensor in results if tensor.requires_grad]
            if index == len(self.chain.specs) - 1:
                known = env | dict(zip(self.chain.specs[index].writes, results, strict=True))
                roots = _loss(self.chain, known, targets) or roots
        return results, roots

    def passes(
        self,
        index: int,
        given: list[Tensor],
        env: dict[str, Tensor],
        storages: SavedStorages,
        targets: Any,
        forward: AbstractContextManager[Any],
        backward: AbstractContextManager[Any],
    ) -> tuple[list[Tensor], int]:
        """Both passes of a layer, each within its context; what it writes, and the bytes that it newly keeps."""
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given]
        with storages.counting() as kept:
            with FusedKernels(), forward:
                results, roots = self._forward(index, leaves, env, targets)
            stash_bytes = kept()
        with backward:
            if roots:
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        return results, stash_bytes


def held_once(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages of this rank's parts, each once."""
    storages = {storage._cdata: storage for storage in map(storage_of, tensors)}
    return sum(storage.nbytes() for storage in storages.values())


def _loss(chain: Chain, env: dict[str, Tensor], targets: Any) -> list[Tensor]:
    total, _ = chain.loss(env, targets)
    return [total] if total.requires_grad else []


def update_bytes(job: Job, parameters: Iterable[nn.Parameter]) -> int:
    """Traffic of one fused optimizer step: parameters and states read and written, gradients read."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not trainable:
        return 0
    optimizer = job.optimizer(trainable)
    for parameter in trainable:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    held = sum(parameter.numel() * parameter.itemsize for parameter in trainable)
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return 3 * held + 2 * sum(state.numel() * state.itemsize for state in states)


def update_ns(held: Held, cost: LayerCost, device: DeviceFacts) -> int:
    """One optimizer step over a layer, and autocast's copies of its parameters, which are made again: 4 bytes to 2."""
    return math.ceil((held.update_bytes + 3 * cost.copied_bytes) / device.bytes_per_s() * 1e9)


def _seen(given: Sequence[Tensor], storages: SavedStorages) -> Hashable:
    """What a layer's costs depend on besides itself: the tensors that it reads, and which of them are kept already."""
    places = [storage_of(tensor)._cdata for tensor in given]
    return tuple(
        (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, tensor in storages, places.index(place))
        for tensor, place in zip(given, places, strict=True)
    )


def _makers(given: Sequence[Tensor], results: Sequence[Tensor], storages: SavedStorages) -> list[Maker] | None:
    """How each result of another layer alike is made: new, or one of its inputs again; None where it is neither."""
    makers: list[Maker] = []
    inputs = [storage_of(tensor)._cdata for tensor in given]
    own = [storage_of(tensor)._cdata for tensor in results]
    for result, place in zip(results, own, strict=True):
        if place in inputs and result.shape == given[inputs.index(place)].shape:
            makers.append(partial(_input, index=inputs.index(place)))
        elif place in inputs or own.count(place) > 1 or storage_of(result).nbytes() != result.numel() * result.itemsize:
            return None
        else:
            makers.append(partial(_new, like=result, is_kept=result in storages))
    return makers


def _input(given: list[Tensor], _storages: SavedStorages, index: int) -> Tensor:
    return given[index]


def _new(_given: list[Tensor], storages: SavedStorages, like: Tensor, is_kept: bool) -> Tensor:
    made = torch.empty_like(like.detach()).requires_grad_(like.requires_grad)
    if is_kept:
        storages.leave_out([made])
    return made


def _numbers(modules: Sequence[nn.Module] | Mapping[int, nn.Module]) -> Iterable[int]:
    return modules if isinstance(modules, Mapping) else range(len(modules))


def _as(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

"""A tracer of a job's layers as the first of the GPUs that share them; it compares them with the whole layers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import loss_parallel

from penstock.executor.divided.division import Gradient, Meshes, divide, gradients_of, local, reason, refused
from penstock.executor.divided.module_shapes import ModuleShapes, Shape, misfit
from penstock.executor.divided.tensor_group import LocalRecorder, local_bytes, own_parameters
from penstock.executor.profiling.meta_cost import FusedKernels, SavedStorages
from penstock.executor.profiling.tracing import LayerCost, LayerSizes, Run, Sent, Tracer, update_bytes
from penstock.executor.stage.recomputed_modules import has_modules, recompute_modules
from penstock.schemas.errors import PenstockError
from penstock.schemas.transformers.degrees import Collective, Operation

Phase = Literal["forward", "backward"]
Over = Literal["tensor", "context", "expert"]
_OVER: tuple[Over, ...] = get_args(Over)
"""The meshes' names, in their order."""
_REMEDY = "ask for a degree that divides heads, widths and the sequence, or mend the layer's `parallel`"


def divided(whole: Tracer, meshes: Meshes) -> DividedTracer:
    """Return a tracer of the layers of ``whole`` as ranks share them: first sequences are cut, then layers divided.

    Each run is compared with the run of the tracer that it is built on. UnsupportedRequest names the layer that ranks
    cannot share so, and the reason.
    """
    tracer = whole
    for each in dict.fromkeys((Meshes(context=meshes.context), meshes)):
        if each.shares:
            tracer = DividedTracer(tracer, each)
    assert isinstance(tracer, DividedTracer), "ranks share nothing"
    return tracer


class DividedTracer(Tracer):
    """A tracer of the layers of ``whole`` as ``meshes`` divide them.

    Where ``meshes`` divide layers and cut sequences, ``whole`` has cut sequences.
    """

    def __init__(self, whole: Tracer, meshes: Meshes) -> None:
        super().__init__(whole.chain, [], whole.dtype, counts_workspace=whole.counts_workspace, training=whole.training)
        self.numberless = whole.numberless
        self._gradients: dict[Hashable, dict[str, Gradient]] = {}
        self.whole, self._meshes, self._context = whole, meshes, meshes.sequences
        self._only_cuts = meshes.tensor is None and meshes.expert is None
        self._degree = meshes.size("context" if self._only_cuts else "tensor")
        self._over: dict[str, Over] = {
            mesh.get_group().group_name: name for name, mesh in zip(_OVER, meshes, strict=True) if mesh is not None
        }
        self._divided: dict[Hashable, nn.Module] = {}

    def recomputing(self, modules: Sequence[str]) -> DividedTracer:
        """Return a tracer of the same layers, with these modules recomputed in backward."""
        return _Recomputing(self, modules) if modules else self

    def batch(self, size: int) -> tuple[dict[str, Tensor], Any]:
        """Return inputs and targets of ``size`` samples on the meta device; of sequences, this rank's part."""
        inputs, targets = super().batch(size)
        return (inputs, targets) if self._context is None else self._context.cut(self.chain.job, inputs, targets)

    def module(self, index: int) -> nn.Module:
        """Return the divided layer, or the first divided layer that is built alike."""
        key = self.alike[index]
        if key not in self._divided:
            whole = self.chain.build_layer(index, device="meta")
            if self.dtype is not None:
                whole = whole.to(self.dtype)
            self._divided[key] = divide(self.chain.specs[index], self.numberless.module(whole), self._meshes)
        return self._divided[key]

    def sizes_of(self, module: nn.Module) -> LayerSizes:
        """Return the sizes of one GPU's part of a layer."""
        return LayerSizes(local_bytes(module), update_bytes(self.chain.job, own_parameters(module)))

    def gradients(self, index: int) -> dict[str, Gradient]:
        """Return the layout of the gradients of layer ``index``, after it has run."""
        return self._gradients[self.alike[index]]

    def failure(self, index: int, error: Exception) -> PenstockError:
        """Create the error for a layer that cannot be divided so."""
        return refused(self.chain.specs[index], self._meshes, reason(error), remedy=_REMEDY)

    def trace(
        self, index: int, inputs: list[Tensor], env: dict[str, Tensor], storages: SavedStorages, targets: Any
    ) -> tuple[list[Tensor], LayerCost]:
        """Trace forward and backward of layer ``index`` on one GPU.

        They run twice the first time, so that gradients are added to gradients, and parts of sums to parts of sums.
        """
        last = index == len(self.chain.specs) - 1
        rows = env[next(iter(env))].shape[0]
        self._refuse_parts(index, inputs, rows)
        module = self.module(index)
        parallel = loss_parallel() if last and self._meshes.tensor is not None else nullcontext()
        with parallel, self.copying(index) as copies:
            added_to = all(each.grad is not None for each in module.parameters() if each.requires_grad)
            if self.numberless.lowered or not added_to:
                self.passes(index, inputs, env, SavedStorages(), targets, copies, nullcontext())
            storages.leave_out(copies.copies)
            forward, backward = LocalRecorder(), LocalRecorder()
            with self._checking(index, inputs, rows):
                results, kept = self.passes(index, inputs, env, storages, targets, forward, backward)
            needed = self.workspace(index, inputs, env, targets, kept)
        written = results if last else [local(tensor) for tensor in results]
        self._refuse_mixed(index, inputs, written, rows)
        shapes = self.whole.run(rows).written[index]
        divided = not self._only_cuts and any(
            tuple(tensor.shape) != shape for tensor, shape in zip(written, shapes, strict=True)
        )
        unnamed = divided and self.chain.specs[index].parallel != "replicated"
        gradients = self._gradients[self.alike[index]] = gradients_of(module, unnamed=unnamed)
        parameters = dict(module.named_parameters())
        # in fp32, as trainers keep them
        summed = sum(
            parameters[name].numel() * torch.float32.itemsize for name, each in gradients.items() if each.is_part
        )
        collectives = [
            *self._collectives("forward", forward.sent, rows),
            *self._collectives("backward", backward.sent, rows),
        ]
        if summed:
            collectives.append(Collective(phase="step", operation="all_reduce", over="tensor", bytes_per_sample=summed))
        sent = tuple(forward.sent), tuple(backward.sent)
        passes = forward.operations, backward.operations
        return written, LayerCost(*passes, kept, needed, tuple(collectives), *sent, copies.copied_bytes)

    def _whole_inputs(self, index: int, inputs: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Return the inputs of the whole layer ``index``, in the shapes of the batch or of their writers."""
        shapes: dict[str, Shape] = dict(self.whole.run(rows).inputs)
        for spec, written in zip(self.chain.specs[:index], self.whole.run(rows).written, strict=False):
            shapes.update(zip(spec.writes, written, strict=True))
        reads = self.chain.specs[index].reads
        return [
            self.numberless.tensor(torch.empty(shapes[name], dtype=tensor.dtype, device="meta"))
            for name, tensor in zip(reads, inputs, strict=True)
        ]

    def _refuse_parts(self, index: int, inputs: Sequence[Tensor], rows: int) -> None:
        """Raise UnsupportedRequest where a replicated layer reads a tensor of which each GPU has a part."""
        spec = self.chain.specs[index]
        if self._only_cuts or spec.parallel != "replicated":
            return
        for name, tensor, whole in zip(spec.reads, inputs, self._whole_inputs(index, inputs, rows), strict=True):
            if tensor.shape != whole.shape:
                raise refused(
                    spec,
                    self._meshes,
                    f"it is replicated and needs all of {name!r}, but earlier layers leave each GPU only a part",
                    remedy=_REMEDY,
                )

    @contextmanager
    def _checking(self, index: int, local_inputs: Sequence[Tensor], rows: int) -> Iterator[None]:
        """Raise UnsupportedRequest where the divided layer's modules work on other tensors than the whole layer's."""
        shapes, whole = ModuleShapes(), ModuleShapes()
        with shapes.watching(self.module(index)):
            yield
        module, inputs = self.whole.module(index), self._whole_inputs(index, local_inputs, rows)
        with whole.watching(module), torch.no_grad():
            self.chain.call(index, module, inputs)
        wrong = misfit(whole.seen, shapes.seen, self._degree)
        if wrong is not None:
            raise refused(self.chain.specs[index], self._meshes, wrong, remedy=_REMEDY)

    def _refuse_mixed(self, index: int, inputs: Sequence[Tensor], written: Sequence[Tensor], rows: int) -> None:
        """Raise UnsupportedRequest where a layer computes from a part of a sequence a tensor of the whole length."""
        whole = self._whole_inputs(index, inputs, rows)
        if not self._only_cuts or all(one.shape == other.shape for one, other in zip(inputs, whole, strict=True)):
            return
        spec = self.chain.specs[index]
        for name, tensor, shape in zip(spec.writes, written, self.whole.run(rows).written[index], strict=True):
            if tuple(tensor.shape) == shape:
                raise refused(
                    spec,
                    self._meshes,
                    f"from a part of a sequence it computes {name!r} of shape {shape}, as from all of it; only "
                    "attention"
                    " may mix positions",
                    remedy="plan with --context 1",
                )

    def _collectives(self, phase: Phase, sent: Iterable[Sent], rows: int) -> Iterator[Collective]:
        """Yield one entry for each kind of collective and group."""
        together: dict[tuple[Operation, Over], list[int]] = defaultdict(list)
        for each in sent:
            if each.operation == "reduce" or each.operation == "broadcast":
                raise NotImplementedError(f"a layer's {each.operation} has no cost")
            together[each.operation, self._over[each.group]].append(each.bytes)
        for (operation, over), sizes in together.items():
            yield Collective(
                phase=phase,
                operation=operation,
                over=over,
                bytes_per_sample=math.ceil(sum(sizes) / rows),
                count=len(sizes),
            )


class _Recomputing(DividedTracer):
    """A tracer of the layers of ``kept`` with recomputed modules; layers without such modules are not run again.

    Gradients are added to the gradients of ``kept``.
    """

    def __init__(self, kept: DividedTracer, modules: Sequence[str]) -> None:
        super().__init__(kept.whole, kept._meshes)
        self.counts_workspace = False
        self._kept, self._recomputed = kept, modules

    def module(self, index: int) -> nn.Module:
        """Return the divided layer with recomputed modules, or the first one that is built alike."""
        key = self.alike[index]
        if key not in self._divided:
            layer = super().module(index)
            recompute_modules(self.chain.specs[index], layer, self._recomputed, self._enclosing)
            for name, parameter in self._kept.module(index).named_parameters():
                layer.get_parameter(name).grad = parameter.grad
        return self._divided[key]

    @contextmanager
    def _enclosing(self) -> Iterator[None]:
        """Create the context in which a module is recomputed, equal to the layer's context."""
        with FusedKernels(), self.numberless.layers(), self._context or nullcontext():
            yield

    def _run(self, size: int) -> Run:
        self._kept.run(size)
        self._gradients |= self._kept._gradients
        kinds = {self.alike[i] for i, spec in enumerate(self.chain.specs) if has_modules(spec, self._recomputed)}
        existing = self._kept.traced[size]
        self.traced[size] = {key: traced for key, traced in existing.items() if key[0] not in kinds}
        return super()._run(size)

    @contextmanager
    def _checking(self, index: int, inputs: Sequence[Tensor], rows: int) -> Iterator[None]:
        """Skip the check: modules that run again would count twice, and ``kept`` has been checked."""
        yield

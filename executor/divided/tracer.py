"""Runs a job's layers as the first of the GPUs that share them, and checks that they compute what whole layers do."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel

from penstock.executor.divided.module_shapes import ModuleShapes, Shape, misfit
from penstock.executor.divided.tensor_group import (
    LocalRecorder,
    Sent,
    divide,
    local,
    local_bytes,
    own_parameters,
    reason,
    refused,
    summed_bytes,
)
from penstock.executor.profiling.meta_cost import SavedStorages
from penstock.executor.profiling.tracing import Held, LayerCost, Run, Tracer, update_bytes
from penstock.schemas.errors import PenstockError
from penstock.schemas.transformers.degrees import Collective, Operation

Phase = Literal["forward", "backward"]
_REMEDY = "ask for a degree that divides heads, widths and the sequence, or mend the layer's `parallel`"


class DividedTracer(Tracer):
    """Runs the layers of ``whole`` as ``mesh`` divides them; ``runs`` are those of whole layers, by size."""

    def __init__(self, whole: Tracer, runs: Mapping[int, Run], mesh: DeviceMesh) -> None:
        super().__init__(whole.chain, [], whole.dtype)
        self._whole, self._runs, self._mesh = whole, runs, mesh
        self._degree = mesh.size()
        self._divided: dict[Hashable, nn.Module] = {}

    def module(self, index: int) -> nn.Module:
        """The layer as it is divided, or the first one that is built alike."""
        key = self.alike[index]
        if key not in self._divided:
            whole = self.chain.build_layer(index, device="meta").to(self.dtype)
            self._divided[key] = divide(self.chain.specs[index], whole, self._mesh)
        return self._divided[key]

    def held(self, index: int) -> Held:
        """What one GPU has of layer ``index``."""
        module = self.module(index)
        return Held(local_bytes(module), update_bytes(self.chain.job, own_parameters(module)))

    def failure(self, index: int, error: Exception) -> PenstockError:
        """The error of a layer that cannot be divided so."""
        return refused(self.chain.specs[index], self._degree, reason(error), remedy=_REMEDY)

    def trace(
        self, index: int, given: list[Tensor], env: dict[str, Tensor], storages: SavedStorages, targets: Any
    ) -> tuple[list[Tensor], LayerCost]:
        """Forward and backward of layer ``index`` on one GPU.

        They run twice: gradients are accumulated in the second pass, parts of sums as parts of sums.
        """
        last = index == len(self.chain.specs) - 1
        rows = env[next(iter(env))].shape[0]
        self._refuse_parts(index, given, rows)
        module, shapes = self.module(index), ModuleShapes()
        with loss_parallel() if last else nullcontext():
            with shapes.watching(module):
                self.passes(index, given, env, SavedStorages(), targets, nullcontext(), nullcontext())
            self._check(index, shapes, given, rows)
            forward, backward = LocalRecorder(), LocalRecorder()
            results, kept = self.passes(index, given, env, storages, targets, forward, backward)
        written = results if last else [local(tensor) for tensor in results]
        divided = any(
            tuple(tensor.shape) != shape for tensor, shape in zip(written, self._runs[rows].written[index], strict=True)
        )
        summed = summed_bytes(module, unnamed=divided and self.chain.specs[index].parallel != "replicated")
        collectives = [*_collectives("forward", forward.sent, rows), *_collectives("backward", backward.sent, rows)]
        if summed:
            collectives.append(Collective(phase="step", operation="all_reduce", over="tensor", bytes_per_sample=summed))
        return written, LayerCost(forward.operations, backward.operations, kept, tuple(collectives))

    def _whole_inputs(self, index: int, given: Sequence[Tensor], rows: int) -> list[Tensor]:
        """What layer ``index`` reads at degree 1: as its writers leave it; the batch's tensors are whole anyway."""
        shapes: dict[str, Shape] = {}
        for spec, written in zip(self.chain.specs[:index], self._runs[rows].written, strict=False):
            shapes.update(zip(spec.writes, written, strict=True))
        reads = self.chain.specs[index].reads
        return [
            torch.empty(shapes.get(name, tensor.shape), dtype=tensor.dtype, device="meta")
            for name, tensor in zip(reads, given, strict=True)
        ]

    def _refuse_parts(self, index: int, given: Sequence[Tensor], rows: int) -> None:
        """Raise UnsupportedRequest where a replicated layer reads a tensor of which each GPU has a part."""
        spec = self.chain.specs[index]
        if spec.parallel != "replicated":
            return
        for name, tensor, whole in zip(spec.reads, given, self._whole_inputs(index, given, rows), strict=True):
            if tensor.shape != whole.shape:
                raise refused(
                    spec,
                    self._degree,
                    f"it is replicated and reads {name!r} whole, of which the layers before leave each GPU a part",
                    remedy=_REMEDY,
                )

    def _check(self, index: int, shapes: ModuleShapes, given: Sequence[Tensor], rows: int) -> None:
        """Raise UnsupportedRequest where the divided layer's modules work on other tensors than the whole layer's."""
        whole = ModuleShapes()
        module = self._whole.module(index)
        with whole.watching(module), torch.no_grad():
            self.chain.call(index, module, self._whole_inputs(index, given, rows))
        wrong = misfit(whole.seen, shapes.seen, self._degree)
        if wrong is not None:
            raise refused(self.chain.specs[index], self._degree, wrong, remedy=_REMEDY)


def _collectives(phase: Phase, sent: Iterable[Sent], rows: int) -> Iterator[Collective]:
    """Those of each kind together."""
    together: dict[Operation, list[int]] = defaultdict(list)
    for each in sent:
        together[each.operation].append(each.bytes)
    for operation, sizes in together.items():
        yield Collective(
            phase=phase,
            operation=operation,
            over="tensor",
            bytes_per_sample=math.ceil(sum(sizes) / rows),
            count=len(sizes),
        )

"""A rehearsal of a rank's computations before its first step, while nothing on its device waits for another rank.

CUDA loads a kernel, and libraries load theirs, at its first use, and that waits until the device is idle [1]_. A
message or a sum that waits for its peers would block it, while the peers may wait for this rank. So each stage's
forward and backward run here, twice, on a micro-batch of each size, with zeros for tensors of other stages, and each
optimizer steps miniatures of its parameters. Gradients and running statistics are restored.

.. [1] CUDA programming guide, Lazy loading, "Potential hazards"; on an H100 ``cublasCreate`` waited so (decision 48).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.executor.run.chain import Chain, TensorShape
from penstock.executor.runtime.interface import Runtime
from penstock.executor.stage.gradient_norm import sum_of_squares
from penstock.executor.stage.held_stage import Cell, HeldStage
from penstock.executor.stage.precision import forget_casts
from penstock.executor.stage.stage_module import StageModule

MINIATURE = 16
"""The largest dimension of a parameter's miniature."""

Shapes = Sequence[Mapping[str, TensorShape]]


def rehearse(
    cells: Iterable[tuple[int, int, Cell]],
    stages: Mapping[int, HeldStage],
    shapes: Shapes,
    chain: Chain,
    runtime: Runtime,
) -> None:
    """Run the computations of a rank's stages, for each size of ``cells``.

    Entries of ``cells``: number of the stage, samples of the whole micro-batch, and the micro-batch's part here.
    """
    seen = set()
    for number, size, cell in cells:
        if len(cell.rows) and (number, size) not in seen:
            seen.add((number, size))
            _micro_batch(stages[number].module, cell, shapes, runtime)
    for stage in stages.values():
        stage.clear_gradients()
        _miniature_step(stage, chain, runtime)
        if stage.shards is not None:
            stage.shards.forget_copies()
    forget_casts()
    runtime.synchronize()


def _micro_batch(module: StageModule, cell: Cell, shapes: Shapes, runtime: Runtime) -> None:
    """Run forward and backward twice, so that gradients are added up, and restore running statistics."""
    buffers = [(buffer, buffer.clone()) for segment in module.segments for buffer in segment.buffers]
    within = cell.within
    for split in (False, module.halves is not None):
        within.open_rehearsal()
        if module.reads_batch or module.is_last:
            cell.batch, cell.targets = within.take(cell.rows)
        if module.first:
            cell.inputs = _zeros(shapes[module.first - 1], len(cell.rows), runtime)
        results = module.forward(cell, within.key)
        if module.is_last:
            loss, count = module.loss_of(cell, results)
            cell.loss = None if module.recomputes_loss else loss
            within.add_loss(loss.detach(), count)
            within.take_losses()
        else:
            needs = [shape.needs_grad for shape in shapes[module.last].values()]
            cell.gradients = [torch.zeros_like(one) if need else None for one, need in zip(results, needs, strict=True)]
        if split:
            module.backward_input(cell, within.key)
            module.backward_weight(cell)
        else:
            module.backward(cell, within.key)
        cell.clear()
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)


def _zeros(cut: Mapping[str, TensorShape], rows: int, runtime: Runtime) -> list[Tensor]:
    zeros = [torch.zeros((rows, *one.sample_shape), dtype=one.dtype) for one in cut.values()]
    tensors: list[Tensor] = runtime.moved(zeros)
    return tensors


def _miniature_step(stage: HeldStage, chain: Chain, runtime: Runtime) -> None:
    """Run the operations of a step, with the job's optimizer, on small parameters of the same kinds."""
    small = [_miniature(parameter) for parameter in stage.stepped.values()]
    if not small:
        return
    sum_of_squares(small, runtime.device)
    gradients = [parameter.grad for parameter in small if parameter.grad is not None]
    for gradient in gradients:
        gradient.mul_(1.0)
    optimizer = chain.job.optimizer(small)
    runtime.prepare(optimizer)
    optimizer.step()
    if stage.versions is not None:
        torch._foreach_copy_(gradients, [parameter.detach() for parameter in small])
    for gradient in gradients:
        gradient.zero_()


def _miniature(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy of a parameter's corner, with a gradient."""
    corner = parameter.detach()[tuple(slice(MINIATURE) for _ in parameter.shape)].clone()
    small = nn.Parameter(corner)
    small.grad = torch.zeros_like(corner)
    return small

"""A stage whose layers run backward one by one, so that shards are gathered and summed per layer.

``sharded_parameters`` describes the parts that ranks share out.

Each layer is a separate segment. Recomputed layers run again as in the forward, together with their recomputed
neighbours, before the first of their backwards. Each layer then keeps its inputs until its own backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from penstock.executor.stage.segment import Segment
from penstock.executor.stage.sharded_parameters import Shards
from penstock.executor.stage.stage_module import MicroBatch, Root, StageModule, back, edges_of, gradients_of, wanted


class _Kept(NamedTuple):
    """The tensors that are kept of a segment: inputs and results. ``results`` is None where the segment runs again."""

    segment: Segment
    inputs: list[Tensor]
    results: Sequence[Root | None] | None
    seeds: Sequence[int]


class LayerwiseStage(StageModule):
    """Layers of a chain, built as a ``StageModule`` with ``singly``; ``shards``: the units that ranks share out."""

    shards: Shards

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options, singly=True)
        self._layers = {index: self._segment(index, index, recompute=False) for index in self.modules}

    def forward(self, cell: MicroBatch, key: int) -> list[Tensor]:
        """Run ``cell.inputs`` through the layers, keep what backward needs, and return the stage's results."""
        with self.shards.ahead_in(range(self.first, self.last + 1)):
            results = super().forward(cell, key)
        cell.saved = [
            _Kept(segment, inputs, outgoing, seeds)
            for segment, (inputs, outgoing, _), seeds in zip(self.segments, cell.saved, cell.seeds, strict=True)
        ]
        return results

    def recompute(self, cell: MicroBatch, key: int) -> None:
        """Run the recomputed layers of a micro-batch again, ahead of its backward."""
        cell.saved = [one for kept in cell.saved for one in self._again(cell, kept, key)]

    def backward_input(self, cell: MicroBatch, key: int) -> None:
        """Raise NotImplementedError: programs for this stage do not split backwards."""
        raise NotImplementedError("a stage that sums gradients after each layer's backward has no halves of backwards")

    def _backward(self, cell: MicroBatch, key: int) -> None:
        gradients, saved = cell.gradients, cell.saved
        while saved:
            saved[-1:] = self._again(cell, saved[-1], key)
            segment, inputs, results, _ = saved.pop()
            layer = segment.first
            before = layer - 1 if saved and saved[-1].results is not None else None
            with self.shards.backward(layer, before):
                back(results or (), gradients, cell.loss, self.count)
            cell.loss = None
            gradients = gradients_of(inputs, wanted(self.shapes, layer - 1))
            del results, inputs
        self.shards.finish()
        cell.input_gradients = gradients
        cell.saved = cell.loss = cell.gradients = cell.inputs = cell.batch = cell.targets = None

    def _again(self, cell: MicroBatch, kept: _Kept, key: int) -> list[_Kept]:
        """Run layers again that were not kept. Return one entry per layer that ran, or ``kept`` as it is."""
        if kept.results is not None:
            return [kept]
        entries, inputs = [], kept.inputs
        layers = kept.segment.layers
        with self.shards.ahead_in(layers):
            for layer, seed in zip(layers, kept.seeds, strict=True):
                for tensor, wants in zip(inputs, wanted(self.shapes, layer - 1), strict=True):
                    if wants:
                        tensor.requires_grad_()
                segment = self._layers[layer]
                results = segment.run_again(inputs, cell.batch, (seed,), key)
                if self.is_last and layer == self.last:
                    cell.loss, _ = self.loss_of(cell, results)
                    entries.append(_Kept(segment, inputs, (), ()))
                else:
                    entries.append(_Kept(segment, inputs, edges_of(results), ()))
                    inputs = [tensor.detach() for tensor in results]
        return entries

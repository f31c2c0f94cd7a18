"""The job of a Hugging Face model: embedding, decoder layers, head with the loss; divided as the library divides them.

The library's own tensor parallelism (``base_model_tp_plan``) leaves whole tensors between layers: it has no sequence
parallelism. It gathers all scores before the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from penstock.executor.hugging_face.pieces import Pieces, divide
from penstock.executor.run.job import LayerSpec, SimpleJob

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

USUAL_LENGTH = 8192
"""Tokens of a sample by default: this, or the model's longest sequence where that is shorter."""


class HuggingFaceJob(SimpleJob):
    """A job on the meta device: its layers have no numbers, so that it can be costed and not trained.

    ``values``: what the config.json holds. Raises MissingExtra without the library, InvalidDocument and
    UnsupportedRequest for a configuration that makes no causal language model.
    """

    def __init__(
        self, values: Mapping[str, Any], *, sequence_length: int | None = None, origin: str = "config.json"
    ) -> None:
        self._pieces = Pieces(values, origin)
        config = self._pieces.config
        name = str(values.get("_name_or_path") or values["model_type"])
        super().__init__(name, batch_size=1)
        longest = getattr(config, "max_position_embeddings", None) or USUAL_LENGTH
        self.length = sequence_length or min(longest, USUAL_LENGTH)
        if config.tie_word_embeddings:
            self.shared_parameters = ((f"embedding.base.{self._pieces.words}.weight", "head.lm_head.weight"),)

    def layers(self) -> list[LayerSpec]:
        """Embedding, decoder layers, head."""
        pieces = self._pieces
        kinds = [pieces.kind(i) for i in range(len(pieces.layers))]
        return [
            LayerSpec("embedding", pieces.embedding, parallel=self._divided("embedding")),
            *(
                LayerSpec(f"block.{i}", partial(pieces.block, kind), parallel=self._divided("block"))
                for i, kind in enumerate(kinds)
            ),
            LayerSpec("head", pieces.head, parallel=self._divided("head")),
        ]

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Tensor]:
        """Token numbers, and those that follow."""
        ids = torch.zeros(len(rows), self.length, dtype=torch.int64)
        return {"x": ids}, ids

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        """Cross entropy summed over all positions."""
        scores = outputs["x"].flatten(0, -2).float()
        return functional.cross_entropy(scores, targets.flatten(), reduction="sum"), targets.numel()

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """AdamW."""
        return AdamW(params)

    def _divided(self, piece: str) -> Any:
        return partial(_styles, self._pieces, piece)


def _styles(pieces: Pieces, piece: str) -> Mapping[str, ParallelStyle]:
    from torch.distributed.tensor.parallel import ParallelStyle

    class OfTheLibrary(ParallelStyle):
        """The library's own plan, and its own way to follow it."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return divide(module, device_mesh, pieces.styles(piece), pieces.config)

    return {"": OfTheLibrary()}

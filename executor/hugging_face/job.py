"""The job of a Hugging Face model: embedding, decoder layers, head with the loss; divided by the library's plan.

The library's tensor parallelism (``base_model_tp_plan``) leaves whole tensors between layers: it has no sequence
parallelism. It gathers all scores before the loss. Sequences and experts are shared as in other jobs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from penstock.executor.hugging_face.pieces import COSTED, TRAINED, Pieces, divide
from penstock.executor.run.chain import derived_seed
from penstock.executor.run.job import ANY_BATCH, LayerSpec, SimpleJob
from penstock.schemas.errors import InvalidDocument

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

USUAL_LENGTH = 8192
"""Tokens of a sample by default, or the model's longest sequence where that is shorter."""


class HuggingFaceJob(SimpleJob):
    """A job on random tokens, in global batches of any size.

    ``values``: the contents of the config.json. ``attention``: see ``pieces``; the costed attention has no sinks, which
    do not change costs. Raises MissingExtra without the library, InvalidDocument and UnsupportedRequest for a
    configuration of which the library builds no causal language model.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        *,
        sequence_length: int | None = None,
        origin: str = "config.json",
        attention: str = COSTED,
    ) -> None:
        self._pieces = Pieces(values, origin, attention)
        config = self._pieces.config
        name = str(values.get("_name_or_path") or values["model_type"])
        super().__init__(name, batch_size=ANY_BATCH)
        self.sequences = ("x",)
        self.vocabulary = int(config.vocab_size)
        longest = getattr(config, "max_position_embeddings", None) or USUAL_LENGTH
        self.length = sequence_length or min(longest, USUAL_LENGTH)
        if config.tie_word_embeddings:
            self.shared_parameters = ((f"embedding.base.{self._pieces.words}.weight", "head.lm_head.weight"),)

    def layers(self) -> list[LayerSpec]:
        """Return embedding, decoder layers, head."""
        pieces = self._pieces
        kinds = [pieces.kind(i) for i in range(len(pieces.layers))]
        return [
            LayerSpec("embedding", pieces.embedding, parallel=self._divided("embedding"), modules={}),
            *(
                LayerSpec(
                    f"block.{i}",
                    partial(pieces.block, kind),
                    parallel=self._divided("block", kind),
                    modules=pieces.modules(kind),
                )
                for i, kind in enumerate(kinds)
            ),
            LayerSpec("head", pieces.head, parallel=self._divided("head"), modules={}),
        ]

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Tensor]:
        """Draw token numbers, and the tokens that follow them, each row from (seed, step, row) alone."""
        samples = []
        for row in rows:
            generator = torch.Generator("cpu").manual_seed(derived_seed(self.seed, "sample", step, row))
            samples.append(torch.randint(0, self.vocabulary, (self.length + 1,), generator=generator, device="cpu"))
        ids = torch.stack(samples)
        return {"x": ids[:, :-1]}, ids[:, 1:]

    def loss(self, outputs: dict[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        """Compute the cross entropy, summed over all positions."""
        scores = outputs["x"].flatten(0, -2).float()
        return functional.cross_entropy(scores, targets.flatten(), reduction="sum"), targets.numel()

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        """Create AdamW."""
        return AdamW(params, lr=3e-4)

    def _divided(self, piece: str, kind: int | None = None) -> Any:
        return partial(_styles, self._pieces, piece, kind)


def job_of(reference: str, directory: Path) -> HuggingFaceJob:
    """Build the job of ``FILE`` or ``FILE@TOKENS``: a config.json in ``directory``, and the length of a sample.

    Raises InvalidDocument without such a file, and the errors of the job.
    """
    name, _, length = reference.partition("@")
    try:
        values = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidDocument(f"cannot read the configuration {name!r}: {error}") from None
    if not isinstance(values, dict):
        raise InvalidDocument(f"{name!r} holds {type(values).__name__}, not the object of a config.json")
    if length and not (length.isdecimal() and int(length)):
        raise InvalidDocument(
            f"{reference!r} has the sequence length {length!r}; give a number of tokens, such as 4096"
        )
    return HuggingFaceJob(values, sequence_length=int(length) if length else None, origin=repr(name), attention=TRAINED)


def _styles(pieces: Pieces, piece: str, kind: int | None) -> Mapping[str, ParallelStyle]:
    """Return the styles of a piece; for a block, whose ``kind`` is the first layer built alike, with its experts."""
    from torch.distributed.tensor.parallel import ParallelStyle

    class OfTheLibrary(ParallelStyle):
        """The library's plan, executed by the library."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            return divide(module, device_mesh, pieces.styles(piece), pieces.config)

    return {"": OfTheLibrary(), **({} if kind is None else pieces.experts(kind))}

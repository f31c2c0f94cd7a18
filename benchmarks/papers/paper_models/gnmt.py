"""GNMT: stacked LSTMs with attention. The encoder's output stays in use only in the first decoder layer, whose
attention context every later decoder layer reads: two tensors cross the decoder's cuts.

.. [1] Wu et al., Google's Neural Machine Translation System (2016), section 3.
.. [2] DAPPLE, Table II: GNMT-16, eight layers each side, 291M parameters; vocabulary as in its profile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from penstock.examples.transformer import TranslationJob
from penstock.executor.run.job import LayerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of one GNMT; ``depth`` counts the layers of each side."""

    depth: int
    width: int
    length: int = 50
    vocabulary: int = 36_560


class Recurrent(nn.Module):
    """One LSTM over the positions, with a residual where input and output agree and ``residual`` says so."""

    def __init__(self, inputs: int, width: int, *, bidirectional: bool = False, residual: bool = False) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True, bidirectional=bidirectional)
        self.dropout = nn.Dropout(0.2)
        self.residual = residual

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Map (samples, positions, inputs) to (samples, positions, width)."""
        inputs = self.dropout(x)
        out: Tensor = self.lstm(inputs if context is None else torch.cat((inputs, context), dim=-1))[0]
        return out + x if self.residual else out


class AttentiveDecoder(nn.Module):
    """The first decoder layer: an LSTM, then Bahdanau's attention to the encoder, with output and context."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Map (samples, positions, width) twice to (samples, positions, width) twice."""
        out: Tensor = self.lstm(self.dropout(x))[0]
        scores = self.score(torch.tanh(self.query(out)[:, :, None] + self.key(memory)[:, None])).squeeze(-1)
        return out, scores.softmax(dim=-1) @ memory


def layers(config: Config) -> list[LayerSpec]:
    """Build the encoder, then the decoder.

    ``x`` is the encoder's state, ``y`` the decoder's, ``context`` the attention's result.
    """
    width, embedding = config.width, partial(nn.Embedding, config.vocabulary, config.width)
    specs = [
        LayerSpec("encoder.embedding", embedding, ("source",), ("x",)),
        LayerSpec("encoder.0", partial(Recurrent, width, width, bidirectional=True)),
        LayerSpec("encoder.1", partial(Recurrent, 2 * width, width)),
    ]
    specs += [
        LayerSpec(f"encoder.{i}", partial(Recurrent, width, width, residual=True)) for i in range(2, config.depth)
    ]
    specs += [
        LayerSpec("decoder.embedding", embedding, ("target",), ("y",)),
        LayerSpec("decoder.0", partial(AttentiveDecoder, width), ("y", "x"), ("y", "context")),
    ]
    specs += [
        LayerSpec(f"decoder.{i}", partial(Recurrent, 2 * width, width, residual=i > 1), ("y", "context"), ("y",))
        for i in range(1, config.depth)
    ]
    return [*specs, LayerSpec("classifier", partial(nn.Linear, width, config.vocabulary), ("y",), ("y",))]


def make(name: str, config: Config, *, batch_size: int) -> TranslationJob:
    """Return a job that trains this GNMT on random pairs."""
    job = TranslationJob(
        name, partial(layers, config), batch_size=batch_size, length=config.length, vocabulary=config.vocabulary
    )
    job.outputs = ("y",)
    return job


gnmt_16 = make("gnmt-16", Config(depth=8, width=1024), batch_size=1024)
tiny = make("gnmt-tiny", Config(depth=3, width=16, length=6, vocabulary=32), batch_size=16)

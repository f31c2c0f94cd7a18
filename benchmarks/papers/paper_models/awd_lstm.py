"""AWD-LSTM: three LSTMs between an embedding and logits; dropout between them, no weight drop.

.. [1] Merity et al., Regularizing and Optimizing LSTM Language Models (2017), section 5: 24M parameters on Penn
   Treebank with logits tied to the embedding; here they are not tied, which adds 4M.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from penstock.examples.synthetic import TokenJob
from penstock.executor.run.job import LayerSpec

from .gnmt import Recurrent


class Embedding(nn.Module):
    """A map from token ids to vectors."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Map (samples, positions) to (samples, positions, width)."""
        out: Tensor = self.dropout(self.table(ids))
        return out


def layers(vocabulary: int, width: int, hidden: int) -> list[LayerSpec]:
    """Build embedding, three LSTMs, logits."""
    return [
        LayerSpec("embedding", partial(Embedding, vocabulary, width)),
        LayerSpec("lstm.0", partial(Recurrent, width, hidden)),
        LayerSpec("lstm.1", partial(Recurrent, hidden, hidden)),
        LayerSpec("lstm.2", partial(Recurrent, hidden, width)),
        LayerSpec("logits", partial(nn.Linear, width, vocabulary)),
    ]


job = TokenJob("awd-lstm", partial(layers, 10_000, 400, 1150), batch_size=40, length=70, vocabulary=10_000)
tiny = TokenJob("awd-lstm-tiny", partial(layers, 32, 8, 16), batch_size=16, length=6, vocabulary=32)
for each in (job, tiny):
    each.sequences = ()  # an LSTM mixes positions

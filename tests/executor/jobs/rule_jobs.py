"""Jobs for the tests of update rules: every kind of optimizer, batches with other numbers of terms, ties."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import small_jobs
import torch
from small_jobs import LENGTH, WIDTH, Regression, blocks
from torch import Tensor, nn

from penstock.executor.run.job import LayerSpec

OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.001, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.003),
    "asgd": partial(torch.optim.ASGD, lr=0.01, t0=1.0),
}


class Trained(Regression):
    """A regression in fp64 with one of ``OPTIMIZERS``."""

    def __init__(self, layers: Any, optimizer: str, **more: Any) -> None:
        super().__init__(f"rules-{optimizer}", layers, dtype=torch.float64, **more)
        self._optimizer = optimizer

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = OPTIMIZERS[self._optimizer](params)
        return optimizer

    num_evaluation_batches = 3

    def evaluation(self, number: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        return self.batch(1000 + number, rows)


class Projection(nn.Module):
    """Back to the width by a weight that the embedding has too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(small_jobs.WORDS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight


class Recurrent(nn.Module):
    """An LSTM, which keeps its weights in a separate list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lstm(x)[0]
        return x + result


def _tied() -> Sequence[LayerSpec]:
    embedding = partial(nn.Embedding, small_jobs.WORDS, WIDTH)
    return [LayerSpec("embedding", embedding, ("ids",)), *blocks(2), LayerSpec("projection", Projection)]


def _recurrent() -> Sequence[LayerSpec]:
    return [*blocks(2), LayerSpec("lstm", Recurrent), *[one._replace(name=f"last.{one.name}") for one in blocks(1)]]


sgd = Trained(partial(blocks, 6), "sgd")
adam = Trained(partial(blocks, 6), "adam")
asgd = Trained(partial(blocks, 6), "asgd")
uneven = Trained(partial(blocks, 6), "sgd", batch_size=22)
masked = Trained(partial(blocks, 6), "adam", batch_size=11, masked=True)
dropped = Trained(partial(blocks, 6, 0.3), "sgd")
recurrent = Trained(_recurrent, "sgd")
tied = Trained(_tied, "sgd", inputs=(), ids=("ids",))
tied.shared_parameters = (("embedding.weight", "projection.weight"),)
assert LENGTH > 1

"""A complete training job, as small as possible: README's commands train it, and you can start your own from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from penstock.executor.run.job import SimpleJob

WIDTH = 1024


class Tiny(SimpleJob):
    """Eight layers that learn to turn their input around."""

    def layers(self) -> list[tuple[str, Callable[[], nn.Module]]]:
        """Return full names and builders; a rank builds only its own layers."""
        return [(f"layer{i}", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for i in range(8)]

    def batch(self, step: int, rows: slice) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return inputs and targets of some rows of a step's global batch."""
        generator = torch.Generator().manual_seed(step)
        samples = torch.randn(self.batch_size, WIDTH, generator=generator)[rows.start : rows.stop]
        return {"x": samples}, samples.flip(1)

    def loss(self, outputs: Mapping[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        """Return the sum of the squared errors, and the number of errors."""
        return ((outputs["x"] - targets) ** 2).sum(), targets.numel()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return plain gradient descent."""
        return torch.optim.SGD(params, lr=0.01)


job = Tiny("mytrain", batch_size=256)

"""A whole training job, as small as one can be: what README's commands train, and a start for one of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from penstock.executor.run.job import SimpleJob

WIDTH = 1024


class Tiny(SimpleJob):
    """Eight layers that learn to turn their input around."""

    def layers(self) -> list[tuple[str, Callable[[], nn.Module]]]:
        """Full names and builders; a rank builds only its own layers."""
        return [(f"layer{i}", lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for i in range(8)]

    def batch(self, step: int, rows: slice) -> tuple[Mapping[str, Tensor], Tensor]:
        """Inputs and targets of some rows of a step's global batch."""
        made = torch.Generator().manual_seed(step)
        samples = torch.randn(self.batch_size, WIDTH, generator=made)[rows.start : rows.stop]
        return {"x": samples}, samples.flip(1)

    def loss(self, outputs: Mapping[str, Tensor], targets: Tensor) -> tuple[Tensor, int]:
        """The sum of the squared errors, and how many there are."""
        return ((outputs["x"] - targets) ** 2).sum(), targets.numel()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(params, lr=0.01)


job = Tiny("mytrain", batch_size=256)

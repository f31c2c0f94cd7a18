"""A small job whose batches wait at a gate: while the file that PENSTOCK_TEST_GATE names is there, from step 3 on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.executor.run.job import LayerSpec, SimpleJob

WIDTH, LAYERS, BATCH = 12, 8, 16
GATE = Path(os.environ.get("PENSTOCK_TEST_GATE", "/nowhere"))


class Block(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Regression(SimpleJob):
    """Learns to turn vectors round."""

    def layers(self) -> Sequence[LayerSpec]:
        return [LayerSpec(f"block{i}", Block) for i in range(LAYERS)]

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        while step >= 3 and GATE.exists():
            time.sleep(0.01)
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))[rows.start : rows.stop]
        return {"x": x}, x.flip(-1)

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        return (outputs["x"] - targets).square().sum(), targets.numel()

    def optimizer(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)


job = Regression("toy", batch_size=BATCH)

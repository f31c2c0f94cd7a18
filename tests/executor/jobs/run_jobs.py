"""Jobs for tests of whole runs: optimizers with states, a learning-rate schedule, evaluation, deaths and full disks."""

from __future__ import annotations

import errno
import math
import os
import resource
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from small_jobs import Block, Regression, blocks
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from penstock.executor.run.job import LayerSpec

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.02),
}


class Scheduled(Regression):
    """Trained with an optimizer that has states, at a learning rate that falls; evaluated on two batches."""

    num_evaluation_batches = 2

    def __init__(self, name: str, optimizer: str, **more: Any) -> None:
        super().__init__(name, more.pop("layers", partial(blocks, 6)), **more)
        self._optimizer = OPTIMIZERS[optimizer]

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return self._optimizer(params)

    def lr_scheduler(self, optimizer: Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, falling)

    def evaluation(self, number: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        return self.batch(1000 + number, rows)


def falling(step: int) -> float:
    """Return the factor of the learning rate after ``step`` steps."""
    return 1.0 / (1.0 + 0.5 * step)


class Normalised(nn.Module):
    """A layer with running statistics, which are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Wider(nn.Module):
    """A block whose parameters have another shape than ``Block``'s."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def _widened() -> list[LayerSpec]:
    return [*blocks(3), LayerSpec("block.3", Wider), LayerSpec("block.4", Block), LayerSpec("block.5", Block)]


def _renamed() -> list[LayerSpec]:
    return [*blocks(5), LayerSpec("head", Block)]


class FullDisk(Scheduled):
    """A job that lets no file grow while steps 1 and 2 are trained, like a full disk."""

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if step in (1, 2) else hard, hard))
        return super().batch(step, rows)


class Diverging(Scheduled):
    """A job with a loss that is not a number."""

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(outputs, targets)
        return loss * float("nan"), count


class DivergesAt(Scheduled):
    """A job whose loss is not a number, or infinite, in one step; the gradient of an infinite loss is finite."""

    def __init__(self, name: str, step: int, factor: float) -> None:
        super().__init__(name, "momentum")
        self._at, self._factor, self._now = step, factor, 0

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        self._now = step
        return super().batch(step, rows)

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(outputs, targets)
        if self._now != self._at:
            return loss, count
        return (loss + self._factor if math.isinf(self._factor) else loss * self._factor), count


class Exploding(Scheduled):
    """A job with finite losses, and in step 2 a gradient that is not finite: after it the parameters are not finite."""

    def loss(self, outputs: dict[str, Tensor], targets: Any) -> tuple[Tensor, int]:
        loss, count = super().loss(outputs, targets)
        if loss.requires_grad:
            loss.register_hook(lambda gradient: gradient * (math.nan if self._now == 2 else 1.0))
        return loss, count

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        self._now = step
        return super().batch(step, rows)


_rename = Path.rename


class Unremovable(Scheduled):
    """A job during whose steps 1 and 2 no old checkpoint can be moved away, as on NFS while its files are open."""

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        Path.rename = _refuse_removed if step in (1, 2) else _rename  # type: ignore[method-assign]
        return super().batch(step, rows)


def _refuse_removed(self: Path, target: Path) -> Path:
    if target.name.endswith(".removed"):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
    return _rename(self, target)


class DiesOnce(Scheduled):
    """Kills its process in step 3, if the file that ``PENSTOCK_TEST_DEATH`` names is there; it is removed then."""

    def batch(self, step: int, rows: range) -> tuple[dict[str, Tensor], Any]:
        note = Path(os.environ.get("PENSTOCK_TEST_DEATH", "/nowhere"))
        if step == 3 and note.exists():
            note.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(step, rows)


momentum = Scheduled("run", "momentum")
adam = Scheduled("run", "adam")
asgd = Scheduled("run", "asgd")
widened = Scheduled("run", "momentum", layers=_widened)
renamed = Scheduled("run", "momentum", layers=_renamed)
normalised = Scheduled("normalised", "momentum", layers=lambda: [*blocks(2), LayerSpec("norm", Normalised), *_last()])
full_disk = FullDisk("run", "momentum")
unremovable = Unremovable("run", "momentum")
diverging = Diverging("run", "momentum")
nan_at_2 = DivergesAt("run", 2, math.nan)
infinite_at_2 = DivergesAt("run", 2, math.inf)
exploding = Exploding("run", "momentum")
dies_once = DiesOnce("run", "momentum")


def _last() -> list[LayerSpec]:
    return [LayerSpec("last.0", Block), LayerSpec("last.1", Block)]

"""SIGTERM to a rank means: save and end. All ranks do so at the same step, whichever of them was told."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist


class ToldToEnd(Exception):
    """A rank of the run was told to end; ``step`` steps are trained and saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"told to end after {step} steps")
        self.step = step


class GracefulShutdown:
    """Whether somebody has been told to end."""

    def __init__(self) -> None:
        self._is_told = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM for a request while the block runs; otherwise it ends the process."""
        before = signal.signal(signal.SIGTERM, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def agreed(self) -> bool:
        """Whether any rank was told to end. Collective."""
        told = torch.tensor([self._is_told], dtype=torch.int32)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return bool(told.item())

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True

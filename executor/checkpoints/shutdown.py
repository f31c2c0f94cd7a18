"""SIGTERM to a rank means: save and end. All ranks do so after the same step, whichever of them gets the signal."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist


class ShutdownRequested(Exception):
    """A rank of the run was asked to end; ``step`` steps are trained and saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"asked to end after {step} steps")
        self.step = step


class GracefulShutdown:
    """A handler that notes SIGTERM, so that all ranks end together after a step."""

    def __init__(self) -> None:
        self._is_requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle SIGTERM as a request within this context; outside of it SIGTERM ends the process."""
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def agreed(self) -> bool:
        """Return whether any rank was asked to end. Collective."""
        requested = torch.tensor([self._is_requested], dtype=torch.int32)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX)
        return bool(requested.item())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True

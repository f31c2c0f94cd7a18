"""Graceful shutdown: on SIGTERM to any rank of a run, all ranks save after the same step and end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist


class ShutdownRequested(Exception):
    """A rank of the run got SIGTERM; ``step`` steps are trained and saved."""

    def __init__(self, step: int) -> None:
        super().__init__(f"told to end after {step} steps")
        self.step = step


class GracefulShutdown:
    """Whether a shutdown was requested, of this rank or of another one."""

    def __init__(self) -> None:
        self._is_requested = False

    @contextmanager
    def on_sigterm(self) -> Iterator[None]:
        """Within the block, SIGTERM is a request; elsewhere it ends the process."""
        before = signal.signal(signal.SIGTERM, self._request)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def is_requested(self) -> bool:
        """Whether any rank got SIGTERM. Collective."""
        requested = torch.tensor([self._is_requested], dtype=torch.int32)
        dist.all_reduce(requested, op=dist.ReduceOp.MAX)
        return bool(requested.item())

    def _request(self, number: int, frame: FrameType | None) -> None:
        self._is_requested = True

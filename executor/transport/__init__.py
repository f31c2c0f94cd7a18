"""Messages between ranks, and the process groups of a run.

| transport | tensors travel | matched by |
|---|---|---|
| ``gloo`` | between host memories | tags |
| ``gloo-staged`` | from a GPU through pinned host memory over gloo; several ranks may share the GPU | tags |
| ``nccl`` | from GPU to GPU, over one communicator per directed edge | their order |

May import: `schemas`, `executor`.
Start reading at `__init__.py`, then `gloo.py`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

from torch import Tensor

from penstock.executor.transport.choice import AUTO, agree_on_transport, make_transport
from penstock.executor.transport.gloo import GlooTransport
from penstock.executor.transport.rendezvous import (
    SETUP_LIMIT,
    connect,
    process_groups,
    smallest,
    sum_of_pairs,
    sum_over,
    wait_for_all,
)

__all__ = [
    "AUTO",
    "SETUP_LIMIT",
    "GlooTransport",
    "Transport",
    "agree_on_transport",
    "connect",
    "make_transport",
    "process_groups",
    "smallest",
    "sum_of_pairs",
    "sum_over",
    "wait_for_all",
]


class Transport(Protocol):
    """Point-to-point messages of one rank, none of which blocks its issuer."""

    @property
    def bytes_sent(self) -> Counter[int]:
        """The bytes sent to each peer since the beginning."""

    def send(self, tensor: Tensor, peer: int, tag: int, size_bytes: int) -> None:
        """Start to send a contiguous tensor; it must not change until ``drain``."""

    def receive(self, buffer: Tensor, peer: int, tag: int) -> Any:
        """Start to receive into a contiguous tensor; call ``wait()`` on the result before reading it."""

    def hand_over(self) -> None:
        """Free the buffers of small recent sends when these are done."""

    def begin(self, *, is_first: bool) -> None:
        """Begin a part of a program; in its first run the device may have to load kernels."""

    def drain(self) -> None:
        """Wait until every send is done. Raises the error of a failed send."""

    def close(self) -> None:
        """Close threads and communicators, without waiting for sends that are under way."""

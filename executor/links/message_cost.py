"""The time that a thread spends to issue a message, between two transports of this process."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from penstock.executor.runtime.interface import Runtime
from penstock.executor.transport.gloo import GlooTransport
from penstock.executor.transport.staged import StagedTransport

_ROUND = 64
"""Messages of a round."""
_ROUNDS = 30
_TIMEOUT = timedelta(seconds=30)


class IssueCost(NamedTuple):
    """Time of the issuing thread per message: medians over rounds of messages."""

    send_ns: int
    receive_ns: int


def pair_of_groups() -> Sequence[Any]:
    """Create the gloo process groups of two ranks, both in this process."""
    store = HashStore()
    groups: dict[int, Any] = {}

    def make(rank: int) -> None:
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, _TIMEOUT)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return groups[0], groups[1]


def issue_cost(runtime: Runtime, size_bytes: int, *, staged: bool) -> IssueCost:
    """Measure rounds of messages of ``size_bytes``, sent and received; the first round does not count."""
    groups = pair_of_groups()
    ends = [StagedTransport(runtime, group) if staged else GlooTransport(group) for group in groups]
    tensor = torch.zeros(size_bytes, dtype=torch.uint8, device=runtime.device)
    buffers = [torch.empty_like(tensor) for _ in range(_ROUND)]
    sends, receives = [], []
    try:
        for _ in range(_ROUNDS + 1):
            start = time.thread_time_ns()
            arrivals = [ends[1].receive(buffer, 0, tag) for tag, buffer in enumerate(buffers)]
            between = time.thread_time_ns()
            for tag in range(_ROUND):
                ends[0].send(tensor, 1, tag, size_bytes)
            end = time.thread_time_ns()
            for arrival in arrivals:
                arrival.wait()
            ends[0].drain()
            receives.append((between - start) // _ROUND)
            sends.append((end - between) // _ROUND)
    finally:
        for one in ends:
            one.close()
    return IssueCost(int(statistics.median(sends[1:])), int(statistics.median(receives[1:])))

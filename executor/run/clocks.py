"""One clock for all ranks: the difference between each rank's clock and rank 0's, at the start and the end of a run.

Ranks of one host share a clock. Others exchange pings with rank 0, and the fastest ping gives the difference
(Cristian's algorithm). Its error is at most half of that round trip. Between two readings the difference is assumed to
change linearly (drift), so the larger of the two errors bounds the error in between.

.. [1] Cristian, "Probabilistic clock synchronization", Distributed Computing 3, 1989.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_PINGS = 9


class Reading(NamedTuple):
    """A comparison of clocks: at ``at_ns`` of this rank's clock, rank 0's shows ``offset_ns`` more, ± ``error_ns``."""

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True, slots=True)
class CommonClock:
    """A conversion from this rank's clock to rank 0's, linear between two readings."""

    first: Reading
    last: Reading

    @property
    def error_ns(self) -> int:
        """The largest error of a time between the readings."""
        return max(self.first.error_ns, self.last.error_ns)

    def common_ns(self, times_ns: Iterable[int]) -> list[int]:
        """Convert times of this rank's clock to rank 0's."""
        since, apart = self.first.at_ns, self.last.at_ns - self.first.at_ns
        offset, drift = self.first.offset_ns, self.last.offset_ns - self.first.offset_ns
        if not drift or apart <= 0:
            return [at + offset for at in times_ns]
        return [at + offset + (at - since) * drift // apart for at in times_ns]


def read_clock(host: str) -> Reading:
    """Compare this rank's ``perf_counter_ns`` with rank 0's. Every rank must call it at the same point.

    ``host``: a text that is equal on all ranks that share a clock.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, host)
    for peer in range(1, world_size):
        if hosts[peer] == hosts[0] or rank not in (0, peer):
            continue
        readings = [_ping(rank, peer) for _ in range(_PINGS)]
        if rank == peer:
            return min(readings, key=lambda one: one.error_ns)
    return Reading(time.perf_counter_ns(), 0, 0)


def _ping(rank: int, peer: int) -> Reading:
    clock = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        dist.recv(clock, src=peer)
        clock.fill_(time.perf_counter_ns())
        dist.send(clock, dst=peer)
        return Reading(int(clock.item()), 0, 0)
    sent = time.perf_counter_ns()
    dist.send(clock, dst=0)
    dist.recv(clock, src=0)
    trip = time.perf_counter_ns() - sent
    middle = sent + trip // 2
    return Reading(middle, int(clock.item()) - middle, -(-trip // 2))

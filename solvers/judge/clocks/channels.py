"""Private channels, which carry transfers between neighbouring stages, and the waiting transfer that each takes next.

An *edge* lies between a stage and the next one of its pipeline and has the first one's number; *way* 0 is forward, 1
backward. With one channel for each way, a channel carries transfers in the order of their senders' operations. With
one channel for both, it takes the transfer that is ready first, forward before backward (``docs/theory/judge.md``,
section 4); this needs no event heap (``docs/theory/solvers.md``, section D).
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.costs.infinity import NEVER_NS

never_negative(__name__)

FREE, FULL, HALF, EVENTS = range(4)
"""Channel kinds: a pure delay, one channel for each way of an edge, one for both. EVENTS: none of these; transfers
compete for links, which only the event heap can simulate."""


class Channels(NamedTuple):
    """The channels of S stages, and the transfers that wait for channels which both ways of an edge share.

    All but ``queued`` by 2 edge + way (2 S,). ``free``: when a channel becomes free (half duplex: way 0's entry stands
    for both). ``first``: since when the first transfer waits, NEVER_NS if none waits; ``what``: its number. The
    transfers after it are ``queued`` (places, 2), ready time and number, from ``base`` on. Since the queue was last
    empty, ``put`` have been added and ``got`` removed.
    """

    free: np.ndarray
    first: np.ndarray
    what: np.ndarray
    put: np.ndarray
    got: np.ndarray
    base: np.ndarray
    queued: np.ndarray


@compiled
def new_channels(transfers: np.ndarray, kind: int) -> Channels:
    """Return channels that have carried nothing; ``transfers`` (S + 1,): prefix sums of each edge's number one way."""
    stages = transfers.size - 1
    base = np.empty(2 * stages, dtype=np.int64)
    for edge in range(stages):
        base[2 * edge] = 2 * transfers[edge]
        base[2 * edge + 1] = transfers[edge] + transfers[edge + 1]
    return Channels(
        np.zeros(2 * stages, dtype=np.int64),
        np.full(2 * stages, NEVER_NS),
        np.zeros(2 * stages, dtype=np.int64),
        np.zeros(2 * stages, dtype=np.int64),
        np.zeros(2 * stages, dtype=np.int64),
        base,
        np.empty((2 * transfers[stages] if kind == HALF else 0, 2), dtype=np.int64),
    )


@inner
def carry(channels: Channels, channel: int, ready: int, takes: int) -> int:
    """Carry a transfer as soon as the channel is free; return when it starts."""
    start = max(channels.free[channel], ready)
    channels.free[channel] = start + takes
    return start


@inner
def put(channels: Channels, channel: int, ready: int, what: int) -> None:
    """Queue a transfer for a channel that both ways of an edge share."""
    if channels.first[channel] == NEVER_NS:
        channels.first[channel] = ready
        channels.what[channel] = what
        return
    place = channels.base[channel] + channels.put[channel]
    channels.queued[place, 0] = ready
    channels.queued[place, 1] = what
    channels.put[channel] += 1


@inner
def get(channels: Channels, channel: int) -> int:
    """Remove the first waiting transfer of a channel; return its number."""
    first = channels.what[channel]
    got = channels.got[channel]
    if got == channels.put[channel]:
        channels.first[channel] = NEVER_NS
        channels.put[channel] = channels.got[channel] = 0
        return first
    place = channels.base[channel] + got
    channels.first[channel] = channels.queued[place, 0]
    channels.what[channel] = channels.queued[place, 1]
    channels.got[channel] = got + 1
    return first


@inner
def goes_first(way: int, ready: int, other: int) -> bool:
    """Return whether a shared channel carries this way's transfer before the other way's.

    ``ready`` and ``other``: when each is ready. At one instant forward goes first.
    """
    return ready <= other if way == 0 else ready < other


@loop
def earliest_waiting(channels: Channels, stages: int) -> int:
    """Return the channel (2 edge + way) whose first transfer has been waiting longest, -1 if none waits.

    That transfer can always be carried: later outputs follow the arrival of a transfer that waits now.
    """
    earliest, longest = NEVER_NS, -1
    for channel in range(2 * stages):
        if channels.first[channel] < earliest:
            earliest, longest = channels.first[channel], channel
    return longest

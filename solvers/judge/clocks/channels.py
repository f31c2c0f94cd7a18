"""Private channels: what carries transfers between neighbouring stages, and which waiting one it takes next.

An *edge* lies between a stage and the next one of its pipeline and is numbered after the first; *way* 0 is forward, 1
backward. With one channel for each way a channel carries transfers in the order in which its sender makes them. With
one channel for both it takes the transfer that is ready first, forward before backward (``docs/theory/judge.md``,
section 4); which one that is can be known without an event heap (``docs/theory/solvers.md``, section D).
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
"""Channel kinds: nothing but time, one channel for each way of an edge, one for both. EVENTS: none of these, transfers
compete for links, and only the event heap can tell."""


class Channels(NamedTuple):
    """The channels of S stages, and the transfers that wait for those that both ways of an edge share.

    All but ``queued`` by 2 edge + way (2 S,). When a channel is ``free`` (half duplex: that of way 0 stands for both).
    Since when the ``first`` transfer waits, NEVER_NS where none does, and ``what`` it is. Those after it are ``queued``
    (places, 2), ready time and what, from ``base`` on: the first ``put`` have come, the first ``got`` have left, since
    there were none.
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
    """Channels that have carried nothing; ``transfers`` (S + 1,): how many each edge has one way, added up from 0."""
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
    """A channel carries a transfer as soon as it is free; when that starts."""
    start = max(channels.free[channel], ready)
    channels.free[channel] = start + takes
    return start


@inner
def put(channels: Channels, channel: int, ready: int, what: int) -> None:
    """A transfer waits for the channel that it shares with those of the other way."""
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
    """Take the first transfer from those that wait; what it is."""
    found = channels.what[channel]
    got = channels.got[channel]
    if got == channels.put[channel]:
        channels.first[channel] = NEVER_NS
        channels.put[channel] = channels.got[channel] = 0
        return found
    place = channels.base[channel] + got
    channels.first[channel] = channels.queued[place, 0]
    channels.what[channel] = channels.queued[place, 1]
    channels.got[channel] = got + 1
    return found


@inner
def goes_first(way: int, ready: int, other: int) -> bool:
    """Whether a shared channel carries what is ready this way before what is ready the other way, at ``other``.

    At one instant forward goes first.
    """
    return ready <= other if way == 0 else ready < other


@loop
def earliest_waiting(channels: Channels, stages: int) -> int:
    """The channel (2 edge + way) whose first transfer has been waiting longest, -1 if none waits.

    It can always be carried: what is made later follows the arrival of one that waits now.
    """
    earliest, found = NEVER_NS, -1
    for channel in range(2 * stages):
        if channels.first[channel] < earliest:
            earliest, found = channels.first[channel], channel
    return found

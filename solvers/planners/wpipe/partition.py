"""Parts of the model for pipelines whose devices hold one part of each group (ALGORITHMS 5.2).

With two groups a period lasts about M (x + y), where x and y are the longest part of either group: the devices run M
slots of one group, then M of the other, and 1F1B keeps them in step. So the search minimises x + y: for each place
where the halves may meet, the smallest longest part of either half by dynamic programming. Where two parts that fall on
one device do not fit together, x and y are raised until they do.

Where the warm-up lets devices run ahead of each other by a good part of a period (small M, warm-up B), the load of a
device counts, x_i + y_i: ``even_partition`` minimises the largest load.

One group is PipeDream-2BW's case: the smallest longest part. Pairs are exact with up to ``EXACT_PLACES`` places to cut.
Beyond that only the most promising meeting places, a few levels of x and a few ends of parts are followed. Long chains
are cut at places at even distances and at the places of the halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.grid.memory_cut import Demand, longest_parts, memory_cut
from penstock.solvers.planners.wpipe.partition_kernel import pair_parts

EXACT_PLACES = 17
MAX_MIDDLES = 4
MAX_LEVELS = 4
WIDTH = 4
MAX_PLACES = 96
PRECISION = 256
"""The precision of the largest load beyond ``EXACT_PLACES`` places, as a fraction."""


def partition(demands: tuple[Demand, ...], room_bytes: np.ndarray) -> list[int] | None:
    """Return the places between the parts, 0 and P - 1 included, or None if no parts fit.

    Part p belongs to device p mod N and to group p div N. ``room_bytes`` (C, N): free memory of a device for its parts
    together. Ties: groups as even as can be, the earliest meeting place.
    """
    if len(demands) == 1:
        return memory_cut(demands[0], room_bytes)
    return _two_groups(demands[0], demands[1], room_bytes)


def _two_groups(first: Demand, second: Demand, room_bytes: np.ndarray) -> list[int] | None:
    best_ns, best = NEVER_NS, None
    for half in _halves(first, second, room_bytes):
        if half.x_ns + half.y_ns >= best_ns:
            break
        if _fits(first, second, room_bytes, half):
            return half.upper + half.lower[1:]
        improved = _Pairing(first, second, room_bytes, half).raised(half.x_ns, half.y_ns, best_ns)
        if improved is not None:
            best_ns, best = improved
    return best


def even_partition(first: Demand, second: Demand, room_bytes: np.ndarray) -> list[int] | None:
    """Return the places, as in ``partition``, that minimise the largest load of a device; None if no parts fit."""
    loads = Demand(first.time_ns, np.concatenate((first.bytes, first.time_ns[None])))
    others = Demand(second.time_ns, np.concatenate((second.bytes, second.time_ns[None])))
    free = np.concatenate((room_bytes, np.full_like(room_bytes[:1], NEVER_NS)))
    best_ns, best = int(first.time_ns[:, -1].max()) + 1, None
    for half in _halves(first, second, room_bytes):
        improved = _Pairing(loads, others, free, half).evened(best_ns)
        if improved is not None:
            best_ns, best = improved
    return best


class _Half(NamedTuple):
    """The smallest longest parts, x and y, of both halves where they meet at a place, each half for itself."""

    middle: int
    x_ns: int
    y_ns: int
    upper: list[int]
    lower: list[int]


def _halves(first: Demand, second: Demand, room_bytes: np.ndarray) -> Iterator[_Half]:
    """Yield every meeting place; for a long chain only the most promising ones.

    They are ordered by x + y, then the most even first.
    """
    places = first.time_ns.shape[1]
    ahead = longest_parts(first, room_bytes)
    after = longest_parts(_mirrored(second), room_bytes[:, ::-1])
    x, y = ahead.largest_ns[-1], after.largest_ns[-1][::-1]
    middles = [k for k in range(places) if x[k] < NEVER_NS and y[k] < NEVER_NS]
    middles.sort(key=lambda k: (int(x[k] + y[k]), abs(int(x[k] - y[k])), k))
    for k in middles if places <= EXACT_PLACES else middles[:MAX_MIDDLES]:
        lower = [places - 1 - place for place in after.bounds(places - 1 - k)[::-1]]
        yield _Half(k, int(x[k]), int(y[k]), ahead.bounds(k), lower)


def _mirrored(demand: Demand) -> Demand:
    """Return the same group from its last layer and last device on."""
    time_ns = demand.time_ns[:, -1:] - demand.time_ns
    size = demand.bytes[:, :, -1:] - demand.bytes
    return Demand(time_ns[::-1, ::-1], size[:, ::-1, ::-1])


def _fits(first: Demand, second: Demand, room_bytes: np.ndarray, half: _Half) -> bool:
    devices = np.arange(len(half.upper) - 1)
    resident = first.bytes[:, devices, half.upper[1:]] - first.bytes[:, devices, half.upper[:-1]]
    resident = resident + second.bytes[:, devices, half.lower[1:]] - second.bytes[:, devices, half.lower[:-1]]
    return bool((resident <= room_bytes).all())


class _Pairing:
    """A search for parts that fit together in pairs, by bisection over what ``partition_kernel.pair_parts`` decides."""

    def __init__(self, first: Demand, second: Demand, room: np.ndarray, half: _Half) -> None:
        kept = _kept_places(first.time_ns.shape[1], half)
        self._kept = kept
        self._middle = int(np.searchsorted(kept, half.middle))
        self._exact = len(kept) <= EXACT_PLACES
        self._width = len(kept) if self._exact else WIDTH
        self._came_from = np.empty((len(half.upper), len(kept), len(kept)), dtype=np.int32)
        self._arrays = tuple(np.ascontiguousarray(each[..., kept]) for each in (*first, *second))
        self._room = room.copy()

    def raised(self, x_ns: int, y_ns: int, limit_ns: int) -> tuple[int, list[int]] | None:
        """Return the smallest sum of longest parts that fit together, and the places.

        The parts are at least these long and their sum is below ``limit_ns``.
        """
        firsts, seconds = _lengths(self._arrays[0]), _lengths(self._arrays[2])
        firsts = firsts[firsts >= x_ns]
        if not self._exact and len(firsts) > MAX_LEVELS:
            firsts = firsts[np.unique(np.linspace(0, len(firsts) - 1, MAX_LEVELS).astype(np.int64))]
        best: tuple[int, list[int]] | None = None
        for x in firsts.tolist():
            low, high = np.searchsorted(seconds, [y_ns, limit_ns - x]).tolist()
            if low == high:
                break
            if not self._possible(x, int(seconds[high - 1])):
                continue
            high -= 1
            while low < high:
                between = (low + high) // 2
                if self._possible(x, int(seconds[between])):
                    high = between
                else:
                    low = between + 1
            self._possible(x, int(seconds[high]))
            limit_ns = x + int(seconds[high])
            best = limit_ns, self._trace()
        return best

    def evened(self, limit_ns: int) -> tuple[int, list[int]] | None:
        """Return the smallest largest load below ``limit_ns``, and the places.

        Loads are the last kind of resource that a device has.
        """
        low, high = 0, limit_ns - 1
        if not self._loaded(high):
            return None
        while low < high and (self._exact or (high - low) * PRECISION > high):
            between = (low + high) // 2
            if self._loaded(between):
                high = between
            else:
                low = between + 1
        self._loaded(high)
        return high, self._trace()

    def _loaded(self, load_ns: int) -> bool:
        self._room[-1] = load_ns
        return self._possible(load_ns, load_ns)

    def _possible(self, x_ns: int, y_ns: int) -> bool:
        first_ns, first_bytes, second_ns, second_bytes = self._arrays
        return bool(
            pair_parts(
                first_ns,
                second_ns,
                first_bytes,
                second_bytes,
                self._room,
                self._middle,
                x_ns,
                y_ns,
                self._width,
                self._came_from,
            )
        )

    def _trace(self) -> list[int]:
        """Return the places of the last search, in the numbers of the whole chain."""
        count, places = self._came_from.shape[0] - 1, self._came_from.shape[1]
        a, b = self._middle, places - 1
        upper, lower = [a], [b]
        for i in range(count, 0, -1):
            a, b = divmod(int(self._came_from[i, a, b]), places)
            upper.append(a)
            lower.append(b)
        return [int(self._kept[k]) for k in upper[::-1] + lower[::-1][1:]]


def _kept_places(places: int, half: _Half) -> np.ndarray:
    """Return all places of a short chain.

    For a long chain, return the places of the halves and ``MAX_PLACES`` at even distances.
    """
    if places <= MAX_PLACES:
        return np.arange(places)
    evenly = np.linspace(0, places - 1, MAX_PLACES).astype(np.int64)
    return np.unique(np.concatenate((evenly, half.upper, half.lower)))


def _lengths(time_ns: np.ndarray) -> np.ndarray:
    """Return every length that a part may have on some device, ascending."""
    rows = np.unique(time_ns, axis=0)
    return np.unique(rows[:, None, :] - rows[:, :, None])

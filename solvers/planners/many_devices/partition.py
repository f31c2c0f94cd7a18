"""Runs of layers with their replicas on the fewest devices that keep to a time, and the least such time.

Within a time T, a stage that begins with layer i may work for T minus the time before its first micro-batch arrives
and after its last one leaves. That *head* is taken from the partition before. A stage with no more micro-batches in
flight than 1F1B needs also idles while its first gradient is on its way, and again after its last forward, so each such
stage loses the whole round trip. How much of it is lost depends on memory: partitions for several shares of it
(``IDLE``) are computed, and the simulator decides.

Among all partitions within T, the search takes the one with the fewest devices. The round trip of a micro-batch counts
as additional devices there: a longer trip delays all that comes after it. O(L W K) for runs of at most W layers and K
numbers of replicas, in bands (L, W): row i, column n - 1 is the run of n layers from i on.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.planners.many_devices.stage_costs import Band, Pieces

PRICES = (1.0, 0.5, 1.5, 0.25, 2.5)
"""The weights of a ns of transfer, in devices: 1 is what the time per global batch loses with one device less."""
IDLE = (1.0, 0.5, 0.0)
"""The shares of the round trip after a stage for which it idles: all with 1F1B's warm-up, 0 with ample memory."""
AGREEING = 3
"""The most partitions in turn for one time, until each stage holds a micro-batch for every stage after it."""
HALVINGS = 14
FURTHER = 2
"""The factor by which a time that no partition keeps to is raised, at most ``HALVINGS`` times."""


class Run(NamedTuple):
    """The layers ``first`` to ``last`` on ``replicas`` devices, each of which takes ``time_ns`` for a micro-batch."""

    first: int
    last: int
    replicas: int
    recompute: bool
    time_ns: int
    hop_ns: int
    after_ns: int
    flying: int


class Split(NamedTuple):
    """A partition and the time per global batch that it promises."""

    estimate_ns: int
    runs: tuple[Run, ...]

    @property
    def devices(self) -> int:
        """The number of devices of all runs."""
        return sum(run.replicas for run in self.runs)


class _Met(NamedTuple):
    """Two arrays by layer (L,), of a stage that begins with the layer.

    ``passes_ns``: ns that pass while it cannot work; ``depth``: the number of stages from it on.
    """

    passes_ns: np.ndarray
    depth: np.ndarray


class Partitions:
    """Partitions for one number of micro-batches."""

    def __init__(self, pieces: Pieces) -> None:
        self.pieces = pieces
        self._number = pieces.batch.num_micro_batches
        self._layers = pieces.problem.num_layers

    def splits(self, idle: float) -> Iterator[Split]:
        """Yield the best split for each price, as soon as it is computed; none where nothing fits at the first price.

        ``idle``: as in ``IDLE``.
        """
        for price in PRICES:
            split = self._least(price * len(self.pieces.line) / self._load_ns, idle)
            if split is not None:
                yield split
            elif price == PRICES[0]:
                return

    def allocation(self, split: Split) -> Allocation:
        """Return the split as an allocation: its runs one after the other on the line."""
        stages, place = [], 0
        for run in split.runs:
            devices = tuple(sorted(self.pieces.line[place : place + run.replicas]))
            again = ((run.first, run.last),) if run.recompute else ()
            stages.append(Stage(run.first, run.last, devices, recompute=again))
            place += run.replicas
        return single_pipeline(tuple(stages), self._number)

    @cached_property
    def _load_ns(self) -> int:
        """The time of all work, shared evenly."""
        work = self.pieces.plain_ns[:, -1] * self.pieces.replicas
        return max(1, int(work.min()) * self._number // len(self.pieces.line))

    def _least(self, price: float, idle: float) -> Split | None:
        """Return the split with the least time, by halving; what passes is taken from the partition before."""
        met = _Met(
            self.pieces.plain_ns[-1, : self._layers].astype(np.float64),
            np.full(self._layers, min(len(self.pieces.line), self._layers), dtype=np.int64),
        )
        low, high, best = self._load_ns, FURTHER * self._load_ns, None
        for step in range(2 * HALVINGS):
            if best is None and step == HALVINGS:
                return None
            middle = high if best is None else (low + high) // 2
            split, met = self._agreeing(middle, price, idle, met)
            if split is not None:
                best, high = split if best is None else min(best, split), middle
                if high - low <= low >> HALVINGS // 2:
                    break
                continue
            low = middle
            high = high if best is not None else FURTHER * high
        return best

    def _agreeing(self, time_ns: int, price: float, idle: float, met: _Met) -> tuple[Split | None, _Met]:
        """Return a partition within a time that fits in memory with its number of stages, or None.

        Also returns what passes in the last partition.
        """
        for _ in range(AGREEING):
            runs = self._fewest(time_ns - met.passes_ns, price, met.depth)
            if not runs:
                break
            met = self._as_met(runs, idle)
            split = Split(self._estimate_ns(runs), runs)
            if split.devices <= len(self.pieces.line) and self._holds_micro_batches(runs):
                return split, met
        return None, met

    def _holds_micro_batches(self, runs: tuple[Run, ...]) -> bool:
        """Return whether each stage holds a micro-batch for itself and every stage after it."""
        return all(run.flying >= min(len(runs) - n, self._number) for n, run in enumerate(runs))

    def _as_met(self, runs: tuple[Run, ...], idle: float) -> _Met:
        layers = np.arange(self._layers)
        firsts = [run.first for run in runs]
        way = np.concatenate(([0], np.cumsum([run.time_ns + run.hop_ns for run in runs])[:-1]))
        follow = np.interp(layers, firsts, len(runs) - np.arange(len(runs)))
        head = np.interp(layers, firsts, way)
        whole = way[-1] + runs[-1].time_ns + runs[-1].hop_ns
        return _Met(head + idle * (whole - head), np.ceil(follow).astype(np.int64))

    def _estimate_ns(self, runs: tuple[Run, ...]) -> int:
        way, slowest, longest = 0, 0, 0
        for run in runs:
            way += run.hop_ns
            slowest = max(slowest, run.time_ns, run.hop_ns)
            longest = max(longest, way + run.time_ns * self._number + run.after_ns)
            way += run.time_ns
        return max(longest, way + slowest * (self._number - 1))

    def _fewest(self, limit_ns: np.ndarray, price: float, depth: np.ndarray) -> tuple[Run, ...]:
        """Return runs whose steps take at most ``limit_ns`` of their first layer, or () if no partition is possible."""
        width = self._width(limit_ns)
        best = np.full((self._layers, width), np.inf)
        choice = np.zeros((self._layers, width), dtype=np.int64)
        for k, replicas in enumerate(self.pieces.replicas.tolist()):
            band = self.pieces.band(k, width, depth)
            late = band.time_ns * self._number + band.after_ns > limit_ns[:, None]
            cost = replicas + price * (band.time_ns + self.pieces.hop_ns[k][:, None])
            better = (cost < best) & band.fits & ~late
            best[better], choice[better] = cost[better], k
        return self._traced(self._joined(best), choice, depth)

    def _width(self, limit_ns: np.ndarray) -> int:
        """Return the number of layers of the longest run that the most replicas keep within the limits."""
        fastest = self.pieces.plain_ns[-1]
        room = fastest[:-1] + np.maximum(0, limit_ns) / self._number
        stops = np.searchsorted(fastest, room, side="right") - 1
        return max(1, int((stops - np.arange(self._layers)).max()))

    def _joined(self, cost: np.ndarray) -> list[int]:
        """Return the first layer of the best last run before each layer; -1 where no run ends."""
        ends = np.append(self.pieces.problem.cuttable, True).tolist()
        width = cost.shape[1]
        total = np.full(self._layers + 1, np.inf)
        total[0] = 0.0
        begins = [-1] * (self._layers + 1)
        for end in range(1, self._layers + 1):
            if ends[end - 1]:
                first = np.arange(max(0, end - width), end)
                sums = total[first] + cost[first, end - first - 1]
                at = int(sums.argmin())
                if sums[at] < np.inf:
                    total[end], begins[end] = sums[at], int(first[at])
        return begins

    def _traced(self, begins: list[int], choice: np.ndarray, depth: np.ndarray) -> tuple[Run, ...]:
        runs: list[Run] = []
        end = self._layers
        bands: dict[int, Band] = {}
        while end > 0:
            first = begins[end]
            if first < 0:
                return ()
            at = first, end - first - 1
            k = int(choice[at])
            if k not in bands:
                bands[k] = self.pieces.band(k, choice.shape[1], depth)
            time, after, flying = (int(of[at]) for of in (bands[k].time_ns, bands[k].after_ns, bands[k].flying))
            what = int(self.pieces.replicas[k]), bool(bands[k].again[at]), time, int(self.pieces.hop_ns[k, first])
            runs.append(Run(first, end - 1, *what, after, flying))
            end = first
        return tuple(reversed(runs))

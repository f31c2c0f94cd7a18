"""A bound where memory binds: activations between forward and backward need memory, for some time (BOUNDS section 15).

A slice of many rows is computed quicker, row by row, but its activations wait while slices as large pass through all
later layers and back. Recomputing frees their memory and costs time. All devices together have their bytes for the
duration of the step: a price on bytes times time gives the least cost of each row, over all sizes of its slices.

Before the first backward there are only forwards, and their results for later are in memory, or computed once more
(section 14). So the time until then is counted by itself, and the cost of a row after it (section 16): of some layers
the forward is over, at a price on the devices' time before, and on the bytes that are kept at that moment. No row has
come further by then than its slices, one after the other, could: large slices are not far, and small slices are slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.coverage import class_bound, fitting
from penstock.solvers.bounds.first_backward import room_bytes
from penstock.solvers.bounds.one_pipeline.layer_costs import numbers_of
from penstock.solvers.bounds.one_pipeline.slice_times import ROUNDED_NS
from penstock.solvers.bounds.over_time_kernel import Paid, UnlikeLayers, least_row
from penstock.solvers.bounds.schedule_bound import first_slice_ns
from penstock.solvers.model.problem import Costs, Problem
from penstock.solvers.model.result import Bound

OVER_TIME = "memory over time: what forwards keep until their backwards, and how long"
AFTER_FIRST = "memory over time, from the first backward on: what is kept, and how long, or computed again"
MOST_LAYERS = 256
"""The most layers for which the bound takes no longer than planners do: some ms for each."""
LESS = 1 - 1e-9
"""A factor that covers the rounding errors of the sums."""
TIMES = 4_096
"""Factor on the largest measured size; of so many rows, the rounding of one row is negligible."""
SINGLE = 16
"""Largest size of a slice that is examined by itself; above, there are two ranges to each doubling."""
MOST = 512
"""The most labels of a layer: more are merged."""
PRICES = 2.0**-10, 4.0
"""The least and the largest price, in all devices' time for all their room."""
FINEST = 2**0.2
"""The last factor by which the search for the best price changes it."""
START = 1.0, 0.25, 0.5, 0.25
"""Start of the search for these prices.

The first in units of the best price where that time does not count by itself. The others in units of the values of the
devices' time, of all their memory, and of the time of all rows before the first backward.
"""
STEPS = 40
"""Most prices tried where the time before the first backward counts by itself."""
MERGED = 48
"""The most labels of a layer where the time before the first backward counts by itself."""
SHORT = 64
"""The time before the first backward counts if it exceeds this part of the bound; it cannot raise the bound by more."""


class Before(NamedTuple):
    """Prices, at the first backward, of forwards that are over.

    ``time``: for each ns of a device. ``byte``: for each byte that is kept. ``way``: for each ns that the row's slices
    took one after the other.
    """

    time: float
    byte: float
    way: float


def over_time_bound(problem: Problem) -> Bound | None:
    """Return a bound on the plans of a request that fit into memory; None if an update rule has no flush.

    None also if no device has memory besides a copy of all parameters and states: no such plan exists.
    """
    if not problem.update_rules <= {"synchronous"} or not room_bytes(problem):
        return None
    bound_ns, method = _largest(Prices(problem))
    return class_bound(problem, fitting(problem), bound_ns, method)


@lru_cache(maxsize=64)
def _largest(prices: Prices) -> tuple[int, str]:
    """Return the largest bound, and its method; choices that differ in their sharding alone share it."""
    price, whole_ns = prices.best()
    after_ns = prices.after_first_ns(price, whole_ns) if SHORT * prices.first_ns > whole_ns else 0
    return max(whole_ns, after_ns), OVER_TIME if whole_ns >= after_ns else AFTER_FIRST


class _Layer(NamedTuple):
    """A layer's least costs by the size of a slice on a kind of device, for O of these; times in ns.

    Of one slice: ``forward_ns`` (O,), and ``way_ns``: forward and the gradient of its input. Of one row: ``work_ns``
    (O,), ``area``: its bytes times ns under any recomputation, and by M ways of recomputing ``again_ns`` (O, M) and
    ``kept_bytes`` (O, M), from the forward on. ``stash_bytes``: the most that it keeps. The same from the end of its
    forward on: ``back_ns`` of ``way_ns``, ``backward_ns`` of ``work_ns``, ``area_after`` of ``area``.
    ``forward_of_row_ns``: the part that is over then.
    """

    forward_ns: np.ndarray
    way_ns: np.ndarray
    work_ns: np.ndarray
    area: np.ndarray
    back_ns: np.ndarray
    forward_of_row_ns: np.ndarray
    backward_ns: np.ndarray
    area_after: np.ndarray
    again_ns: np.ndarray
    kept_bytes: np.ndarray
    stash_bytes: float


class Prices:
    """The bound of every price on bytes times time; equal where all costs are."""

    def __init__(self, problem: Problem) -> None:
        self._rows, self._devices = problem.global_batch_size, problem.num_devices
        self._update_ns = int(problem.update_ns[-1])
        self._room = max(1, room_bytes(problem))
        layers, costs = _layers(problem)
        self._stash = np.cumsum([layer.stash_bytes for layer in layers])
        self._arrays = _arrays(layers)
        self.first_ns = first_slice_ns(problem)
        self._key = costs, self._rows, self._devices, self._update_ns, self._room, self.first_ns

    def __eq__(self, other: object) -> bool:
        """Return whether all costs are equal, so that all bounds are."""
        return isinstance(other, Prices) and self._key == other._key

    def __hash__(self) -> int:
        """Return a hash of all costs."""
        return hash(self._key)

    def best(self) -> tuple[float, int]:
        """Return the price of the largest bound, and the bound: it rises up to that price, and falls after it."""
        price, step = 2.0**-5, 2.0
        best = self.at(price)
        while step > FINEST:
            for factor in (step, 1 / step):
                while PRICES[0] <= price * factor <= PRICES[1] and (bound := self.at(price * factor)) > best:
                    best, price = bound, price * factor
            step = step**0.5
        return price, best

    def after_first_ns(self, price: float, known_ns: int) -> int:
        """Return the largest bound above ``known_ns`` that counts the time before the first backward by itself.

        ``price``: the best price where that time counts like any other; it sets the scale of the search. The bound of
        four prices is a concave function over a linear one, so that no price on the other side of a tangent plane is
        better: the ellipsoid method with deep cuts (Bland, Goldfarb and Todd 1981), for ``STEPS`` prices or until no
        price is left.
        """
        scale = np.asarray([price, 1.0, 1.0, 1.0])
        at, shape, best = np.asarray(START), np.eye(4), known_ns
        for _ in range(STEPS):
            if at.min() < 0:
                slope, depth_ns = (at == at.min()).astype(np.float64), float(-at.min())
            else:
                bound, slope, depth_ns = self._sloped(at * scale, best)
                best, slope = max(best, bound), slope * scale
            length = float(np.sqrt(slope @ shape @ slope))
            if depth_ns >= length:
                break
            depth, along = max(0.0, depth_ns / length), shape @ slope / length
            at = at + (1 + 4 * depth) / 5 * along
            cut = (2 + 8 * depth) / (5 + 5 * depth) * np.outer(along, along)
            shape = 16 / 15 * (1 - depth**2) * (shape - cut)
        return best

    def _sloped(self, prices: np.ndarray, known_ns: int) -> tuple[int, np.ndarray, float]:
        """Return the bound of four prices, the slope of its excess over a known bound, and its distance below that
        bound.

        Slope and distance are of the numerator, in ns of a device.
        """
        price, before_ns = float(prices[0]), self._devices * self.first_ns
        time, byte, way = map(float, prices[1:])
        paid = Before(time, byte * before_ns / self._room, way * self._devices / self._rows)
        row = self._row(price * self._devices / self._room, paid)
        all_ns = self._rows * row.cost_ns * LESS + self._update_ns - (time + byte + way) * before_ns / LESS
        bound_ns = self.first_ns + max(0, int(LESS * all_ns / (self._devices * (1 + price))))
        over_ns = self._devices * max(0, known_ns - self.first_ns)
        slope = (
            self._rows * row.area * self._devices / self._room - over_ns,
            self._rows * row.before_ns - before_ns,
            (self._rows * row.kept_bytes / self._room - 1) * before_ns,
            self._devices * row.way_ns - before_ns,
        )
        return bound_ns, np.asarray(slope), over_ns * (1 + price) - all_ns

    def at(self, price: float) -> int:
        """Return the bound of a price: the part of all devices' time that all of their memory is worth."""
        cost_ns = self._rows * self._row(price * self._devices / self._room).cost_ns + self._update_ns
        return int(LESS * cost_ns / (self._devices * (1 + price)))

    def _row(self, price: float, before: Before | None = None) -> _Row:
        """Return the least cost of a row, where a byte for one ns costs ``price`` ns of a device.

        A label is a cost of the layers from one on, and the way through them and back for which earlier layers wait.
        ``before``: the prices for the first layers, whose forward is over at the first backward.
        """
        most = price * np.concatenate(([0.0], self._stash[:-1]))
        paid = Paid(price, *(before or Before(0.0, 0.0, 0.0)))
        number = MOST if before is None else MERGED
        least = least_row(self._arrays, paid, most, number, before is not None)
        return _Row(*least.tolist())


class _Row(NamedTuple):
    """The cost of a row; of it, bytes times ns, and the parts that are over and kept at the first backward.

    ``before_ns`` is the row's part of its slices' times of completed forwards, ``way_ns`` all of these times.
    """

    cost_ns: float
    area: float
    before_ns: float
    kept_bytes: float
    way_ns: float


def _layers(problem: Problem) -> tuple[list[_Layer], tuple[bytes, ...]]:
    """Return all layers, alike layers as one object, and the bytes that define them."""
    sizes = _sizes(problem)
    kinds = sorted({device.kind for device in problem.devices})
    tables = [_table(problem, kind, each) for kind in kinds for each in sizes]
    if (largest := sizes[-1][-1]) < numbers_of(problem)[0].rows(problem.global_batch_size)[1]:
        tables += [_beyond(problem, kind, largest) for kind in kinds]
    stacked = np.stack(tables)
    gradients = np.diff(problem.trainable_bytes) * problem.memory.gradient_factor
    layer_of: dict[bytes, tuple[_Layer, bytes]] = {}
    layers = []
    for number in range(problem.num_layers):
        values = stacked[:, :, number]
        key = values.tobytes() + int(gradients[number]).to_bytes(8, "little")
        if key not in layer_of:
            layer_of[key] = _layer(values, int(gradients[number])), key
        layers.append(layer_of[key])
    return [layer for layer, _key in layers], (str(stacked.shape).encode(), *(key for _layer, key in layers))


def _arrays(layers: Sequence[_Layer]) -> UnlikeLayers:
    """Return all layers as the kernel reads them: fewer ways of recomputing repeat their last."""
    unlike = {id(layer): layer for layer in layers}
    number_of = {each: number for number, each in enumerate(unlike)}
    ways = max(layer.again_ns.shape[1] for layer in unlike.values())

    def stacked(name: str) -> np.ndarray:
        return np.stack([np.asarray(getattr(layer, name), dtype=np.float64) for layer in unlike.values()])

    def padded(name: str) -> np.ndarray:
        arrays = (getattr(layer, name) for layer in unlike.values())
        return np.stack([np.pad(each, ((0, 0), (0, ways - each.shape[1])), mode="edge") for each in arrays])

    return UnlikeLayers(
        forward=stacked("forward_ns"),
        way=stacked("way_ns"),
        back=stacked("back_ns"),
        work=stacked("work_ns"),
        over=stacked("forward_of_row_ns"),
        backward=stacked("backward_ns"),
        area=stacked("area"),
        area_after=stacked("area_after"),
        again=padded("again_ns"),
        kept=padded("kept_bytes"),
        kind=np.asarray([number_of[id(layer)] for layer in layers]),
    )


_PASSES = 9
"""Number of a table's rows before the rows of the ways of recomputing."""
_MOST = 7
"""The row of the most bytes that are kept."""
_OF_SLICES = [0, 1, 2, 6, 8]
"""The rows of costs of a slice, not of a row of samples."""


def _layer(values: np.ndarray, gradient_bytes: int) -> _Layer:
    forward, backward, way, a_forward, a_backward, stash, workspace, most, back = values[:, :_PASSES].T
    ways = values[:, _PASSES:].reshape(len(values), -1, 2)
    again, kept = _cheapest(ways[..., 0], ways[..., 1])
    after = workspace * a_backward + gradient_bytes * a_backward + stash * backward
    whole = a_forward + a_backward, workspace * a_forward + after
    return _Layer(forward, way, *whole, back, a_forward, a_backward, after, again, kept, float(most.max()))


def _cheapest(again: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ways of recomputing (O, M) that are best at some price of a byte; short rows repeat their last."""
    hulls = [
        _hull(list(zip(times, sizes, strict=True))) for times, sizes in zip(again.tolist(), kept.tolist(), strict=True)
    ]
    most = max(map(len, hulls))
    full = np.asarray([[*hull, *[hull[-1]] * (most - len(hull))] for hull in hulls])
    return full[..., 0], full[..., 1]


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners between the least first and the least second coordinate, in rising order of the first."""
    hull: list[tuple[float, float]] = []
    for point in sorted(set(points)):
        if hull and point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _above(low: tuple[float, float], middle: tuple[float, float], high: tuple[float, float]) -> bool:
    """Return whether the middle point is on or above the line between the others."""
    rise = (high[0] - low[0]) * (middle[1] - low[1])
    return rise >= (middle[0] - low[0]) * (high[1] - low[1])


def _sizes(problem: Problem) -> list[tuple[int, ...]]:
    """Return ranges of sizes of slices as the sizes at which a cost, or a cost of a row, is least in the range.

    Sizes above the largest measured size are left to ``_beyond``.
    """
    measured = {point.rows for points in problem.measured.values() for point in points}
    _least_rows, most_rows = numbers_of(problem)[0].rows(problem.global_batch_size)
    most = min(most_rows, max(measured))
    ranges: list[tuple[int, ...]] = [(size,) for size in range(1, min(SINGLE, most) + 1)]
    low = SINGLE + 1
    while low <= most:
        high = min(most, low + (low - 1) // 2)
        inside = {step for size in measured for step in (size, size + 1) if low < step < high}
        ranges.append((low, *sorted(inside), high) if high > low else (low,))
        low = high + 1
    return ranges


def _table(problem: Problem, kind: str, sizes: Sequence[int]) -> np.ndarray:
    """Return the least costs of slices of a range of sizes, (rows of ``_PASSES`` and two for each way, L).

    They are of a slice: its forward, backward and way. Of a row: forward, backward, stash. Then the workspace, the
    stash again, at the most, and the gradient of a slice's input. Of a row by each way of recomputing: its time and its
    kept bytes.
    """
    slack = 0 if len(sizes) == 1 else ROUNDED_NS
    tables = [_exact(problem, problem.costs(kind, size), size, slack) for size in sizes]
    table = np.min(tables, axis=0)
    table[_MOST] = np.max([each[_MOST] for each in tables], axis=0)
    return np.asarray(table)


def _beyond(problem: Problem, kind: str, largest: int) -> np.ndarray:
    """Return the least costs of slices of more rows than the ``largest`` measured, as ``_table``.

    They are proportional and rounded up, so that a row may cost less than in any measured slice, by the rounding: the
    costs are a row's of a very large slice, and a slice's of one row more.
    """
    source, speed = problem.kind_source[kind]
    many = TIMES * max(point.rows for point in problem.measured[source])
    table = _exact(problem, problem.costs(kind, many), many, 0 if speed == 1 else ROUNDED_NS)
    next_table = _exact(problem, problem.costs(kind, largest + 1), largest + 1, 0)
    table[_OF_SLICES] = next_table[_OF_SLICES]
    table[_MOST] = np.maximum(table[_MOST], next_table[_MOST])
    return table


def _exact(problem: Problem, costs: Costs, size: int, slack: int) -> np.ndarray:
    forward, backward, weight, stash = (
        np.diff(each).astype(np.float64)
        for each in (costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.stash_bytes)
    )
    back = np.maximum(0, backward - weight - 1)
    ways = [(np.zeros_like(forward), stash)]
    if problem.recompute != "never":
        ways.append((forward, np.zeros_like(stash)))
    for modules in problem.module_sets:
        again = costs.again(modules)
        ways.append((np.diff(again.recompute_ns), stash - again.rebuilt_bytes))

    def of_row(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.maximum(0, values - slack) / size)

    rows = [forward, backward, forward + back, of_row(forward), of_row(backward), of_row(stash)]
    rows += [costs.workspace_bytes.astype(np.float64), stash / size, back]
    return np.stack([*rows, *(of_row(each) for way in ways for each in way)])

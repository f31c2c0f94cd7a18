"""Where memory binds: what forwards keep until their backwards takes room, and takes it for a time (BOUNDS section 15).

A slice of many rows is computed quicker, row by row, but its activations wait for the way of as large slices through
all later layers and back. Recomputing frees their room and costs time. All devices together have their bytes for as
long as the step takes: a price on bytes times time says what each row costs at least, over all sizes of its slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.coverage import class_bound, fitting
from penstock.solvers.bounds.first_backward import room_bytes
from penstock.solvers.bounds.one_pipeline.layer_costs import numbers_of
from penstock.solvers.bounds.one_pipeline.slice_times import ROUNDED_NS
from penstock.solvers.model.problem import Costs, Problem
from penstock.solvers.model.result import Bound

OVER_TIME = "memory over time: what forwards keep until their backwards, and how long"
LESS = 1 - 1e-9
"""Covers what rounding adds to the sums."""
SINGLE = 16
"""Sizes of slices up to this are looked at one by one; above, there are two ranges to each doubling."""
MOST = 512
"""The most labels of a layer: more are merged."""
PRICES = 2.0**-10, 4.0
"""The least and the largest price, in all devices' time for all their room."""


def over_time_bound(problem: Problem) -> Bound | None:
    """Return a bound on the plans of a request that fit into memory; None where an update rule has no flush."""
    if not problem.update_rules <= {"synchronous"}:
        return None
    return class_bound(problem, fitting(problem), Prices(problem).bound_ns(), OVER_TIME)


class _Layer(NamedTuple):
    """A layer's least costs by the size of a slice on a kind of device, for O of these; times in ns.

    Of one slice ``forward_ns`` (O,), and ``way_ns``: forward and the gradient of its input. Of one row ``work_ns``
    (O,), ``held``: bytes times ns that it takes whatever is recomputed, and by M ways of recomputing ``again_ns``
    (O, M) and ``kept_bytes`` (O, M), from the forward on. ``stash_bytes``: the most that it keeps.
    """

    forward_ns: np.ndarray
    way_ns: np.ndarray
    work_ns: np.ndarray
    held: np.ndarray
    again_ns: np.ndarray
    kept_bytes: np.ndarray
    stash_bytes: float


class Prices:
    """The bound of every price on bytes times time."""

    def __init__(self, problem: Problem) -> None:
        self._rows, self._devices = problem.global_batch_size, problem.num_devices
        self._update_ns = int(problem.update_ns[-1])
        self._room = max(1, room_bytes(problem))
        self._layers = _layers(problem)
        self._stash = np.cumsum([layer.stash_bytes for layer in self._layers])

    def bound_ns(self) -> int:
        """Return the largest bound found: it rises with the price up to the best one, and falls after it."""
        price, step = 2.0**-5, 2.0
        best = self.at(price)
        while step > 2**0.2:
            for factor in (step, 1 / step):
                while PRICES[0] <= price * factor <= PRICES[1] and (found := self.at(price * factor)) > best:
                    best, price = found, price * factor
            step = step**0.5
        return best

    def at(self, price: float) -> int:
        """Return the bound of a price: the part of all devices' time that all of their room is worth."""
        each = price * self._devices / self._room
        cost_ns = self._rows * self._least_ns(each) + self._update_ns
        return int(LESS * cost_ns / (self._devices * (1 + price)))

    def _least_ns(self, price: float) -> float:
        """Return what a row costs at least, where a byte for one ns costs ``price`` ns of a device.

        A label is a cost of the layers from one on, and the way through them and back that earlier layers wait for.
        """
        cost, way = np.zeros(1), np.zeros(1)
        for number in range(len(self._layers) - 1, -1, -1):
            layer = self._layers[number]
            kept = (
                layer.again_ns[..., None]
                + price * layer.kept_bytes[..., None] * (layer.forward_ns[:, None] + way)[:, None]
            )
            own = kept.min(axis=1) + (layer.work_ns + price * layer.held)[:, None]
            most = price * float(self._stash[number - 1]) if number else 0.0
            cost, way = _undominated((own + cost).ravel(), (layer.way_ns[:, None] + way).ravel(), most)
        return float(cost.min())


def _undominated(cost: np.ndarray, way: np.ndarray, most: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the labels but those than which another one stays cheaper: a way of one ns costs ``most`` at the most."""
    order = np.lexsort((way, cost))
    cost, way = cost[order], way[order]
    kept = _falling(way)
    cost, way = cost[kept], way[kept]
    kept = _falling(cost + most * way)
    cost, way = cost[kept], way[kept]
    if len(cost) <= MOST:
        return cost, way
    ends = np.linspace(0, len(cost), MOST + 1).astype(np.int64)
    return cost[ends[:-1]], way[ends[1:] - 1]  # costs rise and ways fall: the least of both


def _falling(values: np.ndarray) -> np.ndarray:
    """Return which values are below all before them."""
    return np.concatenate(([True], values[1:] < np.minimum.accumulate(values)[:-1]))


def _layers(problem: Problem) -> list[_Layer]:
    """Return all layers, those that are alike as one object."""
    sizes = _sizes(problem)
    kinds = sorted({device.kind for device in problem.devices})
    tables = [_table(problem, kind, each) for kind in kinds for each in sizes]
    stacked = np.stack(tables)
    gradients = np.diff(problem.trainable_bytes) * problem.memory.gradient_factor
    known: dict[bytes, _Layer] = {}
    found = []
    for number in range(problem.num_layers):
        values = stacked[:, :, number]
        key = values.tobytes() + int(gradients[number]).to_bytes(8, "little")
        if key not in known:
            known[key] = _layer(values, int(gradients[number]))
        found.append(known[key])
    return found


_PASSES = 8
"""Rows of a table before those of the ways of recomputing."""


def _layer(values: np.ndarray, gradient_bytes: int) -> _Layer:
    forward, backward, way, a_forward, a_backward, stash, workspace, most = values[:, :_PASSES].T
    ways = values[:, _PASSES:].reshape(len(values), -1, 2)
    again, kept = _cheapest(ways[..., 0], ways[..., 1])
    held = workspace * (a_forward + a_backward) + gradient_bytes * a_backward + stash * backward
    return _Layer(forward, way, a_forward + a_backward, held, again, kept, float(most.max()))


def _cheapest(again: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ways of recomputing (O, M) that are best at some price of a byte; short rows repeat their last."""
    hulls = [
        _hull(list(zip(times, sizes, strict=True))) for times, sizes in zip(again.tolist(), kept.tolist(), strict=True)
    ]
    most = max(map(len, hulls))
    full = np.asarray([[*hull, *[hull[-1]] * (most - len(hull))] for hull in hulls])
    return full[..., 0], full[..., 1]


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners between the least first and the least second coordinate, as the first one rises."""
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
    """Return ranges of sizes of slices as the sizes at which a cost, or a cost of a row, is least in one of them.

    Above the largest measured size costs are proportional, so that larger slices are never cheaper.
    """
    measured = {point.rows for points in problem.measured.values() for point in points}
    _least_rows, most_rows = numbers_of(problem)[0].rows(problem.global_batch_size)
    most = min(most_rows, max(measured))
    found: list[tuple[int, ...]] = [(size,) for size in range(1, min(SINGLE, most) + 1)]
    low = SINGLE + 1
    while low <= most:
        high = min(most, low + (low - 1) // 2)
        inside = {step for size in measured for step in (size, size + 1) if low < step < high}
        found.append((low, *sorted(inside), high) if high > low else (low,))
        low = high + 1
    return found


def _table(problem: Problem, kind: str, sizes: Sequence[int]) -> np.ndarray:
    """Return the least costs of slices of a range of sizes, (rows of ``_PASSES`` and two for each way, L).

    They are, of a slice, its forward, backward and way; of a row, forward, backward and stash; the workspace; the
    stash again, at the most; and of a row by each way of recomputing its time and what is kept.
    """
    slack = 0 if len(sizes) == 1 else ROUNDED_NS
    found = [_exact(problem, problem.costs(kind, size), size, slack) for size in sizes]
    table = np.min(found, axis=0)
    table[_PASSES - 1] = np.max([each[_PASSES - 1] for each in found], axis=0)
    return np.asarray(table)


def _exact(problem: Problem, costs: Costs, size: int, slack: int) -> np.ndarray:
    forward, backward, weight, stash = (
        np.diff(each).astype(np.float64)
        for each in (costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.stash_bytes)
    )
    way = forward + np.maximum(0, backward - weight - 1)
    ways = [(np.zeros_like(forward), stash)]
    if problem.recompute != "never":
        ways.append((forward, np.zeros_like(stash)))
    for modules in problem.module_sets:
        again = costs.again(modules)
        ways.append((np.diff(again.recompute_ns), stash - again.rebuilt_bytes))

    def of_row(values: np.ndarray) -> np.ndarray:
        return np.asarray(np.maximum(0, values - slack) / size)

    rows = [forward, backward, way, of_row(forward), of_row(backward), of_row(stash)]
    rows += [costs.workspace_bytes.astype(np.float64), stash / size]
    return np.stack([*rows, *(of_row(each) for way in ways for each in way)])

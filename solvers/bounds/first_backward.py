"""A bound where memory binds: the work that can be done before the first backward of a flushed step (BOUNDS section
14).

No backward begins before one slice has come forward through all layers. All forwards until then are in memory, or are
computed once more afterwards; all devices together have room, and time, for so much. All other work comes later. If
single modules of a layer can be recomputed, each may be kept or not, and so may the rest of the layer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import partial
from math import inf
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.one_pipeline.load import kinds_of, least_per_sample
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.stage_table import static_sums
from penstock.solvers.model.degrees import WITHIN, Module, Modules, without_parts
from penstock.solvers.model.problem import Measured, Problem

SEARCHED = 40
"""Steps of the search for a price; each takes off a third."""


class Begun(NamedTuple):
    """The time of the forwards of all samples of some layers, in ns of a device, and the time that they save later.

    ``spared_ns``: saved whether kept or not. ``parts``: of each part that can be kept in memory, its bytes and the
    further time that keeping it saves.
    """

    forward_ns: Fraction | float
    spared_ns: Fraction | float
    parts: tuple[tuple[Fraction | float, Fraction | float], ...]

    def worth(self, price: Fraction | float) -> Fraction | float:
        """Return the most that the layers save where a byte costs ``price``, in ns."""
        return self.spared_ns + sum(max(0, work - price * size) for size, work in self.parts)

    @property
    def rounded(self) -> Begun:
        """Return the same beginning with floating-point times and sizes, which a search computes faster with."""
        parts = tuple((float(size), float(work)) for size, work in self.parts)
        return Begun(float(self.forward_ns), float(self.spared_ns), parts)


def first_backward_ns(problem: Problem, slice_ns: int) -> int:
    """Return a bound on flushed plans that fit into memory.

    ``slice_ns``: the time of the quickest slice forward through all layers, before which there is no backward.
    """
    batch, layers = problem.global_batch_size, _per_sample(problem)
    later_ns = int(problem.update_ns[-1]) + batch * sum(layer.whole_ns for layer in layers)
    again = problem.recompute != "never"
    begun = [_begun(layer, number * batch, again=again) for layer, number in Counter(layers).items()]
    spared = _spared_ns(begun, room_bytes(problem), problem.num_devices * slice_ns)
    return slice_ns + max(0, -int(-(later_ns - spared) // problem.num_devices))


class _Layer(NamedTuple):
    """A layer's least time per sample, forward and backward together and each, and the least bytes that it keeps.

    ``modules``: the least time and bytes of each module that can be recomputed by itself; the layer's bytes exclude
    them.
    """

    whole_ns: Fraction
    forward_ns: Fraction
    backward_ns: Fraction
    stash_bytes: Fraction
    modules: tuple[tuple[Fraction, Fraction], ...]


def _per_sample(problem: Problem) -> list[_Layer]:
    kinds = kinds_of(problem)
    modules = problem.modules if problem.recompute != "never" else ()

    def least(value: Callable[[Measured], np.ndarray], *, time: bool = True) -> list[Fraction]:
        of_kinds = [
            [each / Fraction(kind[1] if time else 1.0) for each in least_per_sample(problem, kind, value)]
            for kind in kinds
        ]
        return [min(each) for each in zip(*of_kinds, strict=True)]

    def rest(point: Measured) -> np.ndarray:
        return np.asarray(point.stash_bytes - sum(point.modules[each][1] for each in without_parts(modules)))

    of_modules = [
        zip(
            least(partial(_net, modules, each, 0)),
            least(partial(_net, modules, each, 1), time=False),
            strict=True,
        )
        for each in modules
    ]
    of_layers = zip(*of_modules, strict=True) if modules else [()] * problem.num_layers
    columns = (
        least(lambda point: point.forward_ns + point.backward_ns),
        least(lambda point: point.forward_ns),
        least(lambda point: point.backward_ns),
        least(rest, time=False),
    )
    return [_Layer(*each) for each in zip(*columns, of_layers, strict=True)]


def _net(modules: Modules, module: Module, which: int, point: Measured) -> np.ndarray:
    """Return a module's time (0) or bytes (1) without the modules that are parts of it."""
    parts = (point.modules[each][which] for each in modules if WITHIN.get(each) == module)
    return np.asarray(np.maximum(0, point.modules[module][which] - sum(parts)))


def room_bytes(problem: Problem) -> int:
    """Return the bytes of all devices besides one copy of all parameters and optimizer states."""
    sums = static_sums(problem)
    free = sum(max(0, free_bytes(problem, (device,))) for device in range(problem.num_devices))
    return max(0, free - int(sums.parameters[-1] + sums.optimizer[-1]))


def _begun(layer: _Layer, samples: int, *, again: bool) -> Begun:
    """Return the time that samples of a layer save; ``again``: whether they may be computed once more."""
    if again:
        rest = max(Fraction(0), layer.forward_ns - sum(time for time, _freed in layer.modules))
        parts = [(layer.stash_bytes, rest), *((freed, time) for time, freed in layer.modules)]
        in_one = layer.whole_ns - layer.forward_ns - layer.backward_ns
    else:
        parts, in_one = [(layer.stash_bytes, layer.whole_ns - layer.backward_ns)], Fraction(0)
    kept = tuple((samples * size, samples * work) for size, work in parts if work > 0)
    return Begun(samples * layer.forward_ns, samples * in_one, kept)


def _spared_ns(begun: Sequence[Begun], room: int, before_ns: int) -> Fraction:
    """Return a limit on the work that forwards before the first backward save, in ns of a device.

    ``room``: bytes of all devices; ``before_ns``: their time until then. Every price of a byte gives a limit. The limit
    is convex in the price. It is computed exactly at the end of the search, and at nearby prices at which a part is not
    worth its bytes.
    """
    prices = sorted(
        {Fraction(0), *(Fraction(work) / Fraction(size) for each in begun for size, work in each.parts if size)}
    )
    rounded = [each.rounded for each in begun]
    low, high = 0.0, float(prices[-1])
    for _ in range(SEARCHED):
        inner = low + (high - low) / 3, high - (high - low) / 3
        first, second = (price * room + _most_worth(rounded, price, before_ns) for price in inner)
        low, high = (inner[0], high) if first > second else (low, inner[1])
    near = bisect_left(prices, low)
    tried = (Fraction(low), *prices[max(0, near - 1) : near + 2])
    return min(price * room + Fraction(_most_worth(begun, price, before_ns)) for price in tried)


def _most_worth(begun: Iterable[Begun], price: Fraction | float, before_ns: int) -> Fraction | float:
    """Return the most time saved at a price of a byte: layers that save most for their time come first."""
    left: Fraction | float = before_ns
    total: Fraction | float = 0
    worth = [(each.worth(price), each.forward_ns) for each in begun]
    for spared, forward in sorted(worth, key=lambda each: each[0] / each[1] if each[1] else inf, reverse=True):
        part = min(1, left / forward) if forward else 1
        left -= part * forward
        total += part * spared
    return total

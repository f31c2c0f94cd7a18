"""Where memory binds: what can be computed before the first backward of a flushed step (BOUNDS section 14).

No backward begins before one slice has come forward through all layers. What has been computed forward by then is in
memory, or is computed once more afterwards; all devices together have room for so much. All other work comes later.
Where modules of a layer can be recomputed by themselves, each may be kept or not, and so may the rest of the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.one_pipeline.load import kinds_of, least_per_sample
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.stage_table import static_sums
from penstock.solvers.model.degrees import WITHIN, Module, Modules, without_parts
from penstock.solvers.model.problem import Measured, Problem


class Kept(NamedTuple):
    """What all samples of a layer, or of a part of one, keep until the backward, and the work that it spares later."""

    bytes: Fraction
    work_ns: Fraction


def first_backward_ns(problem: Problem, slice_ns: int) -> int:
    """Return a bound on flushed plans that fit into memory.

    ``slice_ns``: the time of the quickest slice forward through all layers, before which there is no backward.
    """
    batch = problem.global_batch_size
    later_ns, kept = Fraction(int(problem.update_ns[-1])), list[Kept]()
    for layer in _per_sample(problem):
        if problem.recompute == "never":
            later_ns += batch * layer.whole_ns
            kept.append(Kept(batch * layer.stash_bytes, batch * (layer.whole_ns - layer.backward_ns)))
        else:
            later_ns += batch * (layer.backward_ns + layer.forward_ns)
            rest = layer.forward_ns - sum(time for time, _freed in layer.modules)
            kept.append(Kept(batch * layer.stash_bytes, batch * max(Fraction(0), rest)))
            kept += [Kept(batch * freed, batch * time) for time, freed in layer.modules]
    return slice_ns + max(0, -int(-(later_ns - _spared_ns(kept, room_bytes(problem))) // problem.num_devices))


class _Layer(NamedTuple):
    """A layer's least time per sample, forward and backward together and each, and the least bytes that it keeps.

    ``modules``: of each that can be recomputed by itself, the least time and bytes; the layer's bytes are without.
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
            least(partial(_own, modules, each, 0)),
            least(partial(_own, modules, each, 1), time=False),
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


def _own(modules: Modules, module: Module, which: int, point: Measured) -> np.ndarray:
    """Return a module's time (0) or bytes (1) without those of the modules that are parts of it."""
    parts = (point.modules[each][which] for each in modules if WITHIN.get(each) == module)
    return np.asarray(np.maximum(0, point.modules[module][which] - sum(parts)))


def room_bytes(problem: Problem) -> int:
    """Return what all devices have besides one copy of all parameters and optimizer states."""
    held = static_sums(problem)
    free = sum(max(0, free_bytes(problem, (device,))) for device in range(problem.num_devices))
    return max(0, free - int(held.parameters[-1] + held.optimizer[-1]))


def _spared_ns(kept: Iterable[Kept], room: int) -> Fraction:
    """Return the most work that keeping activations spares: those first that spare most per byte."""
    left, spared = Fraction(room), Fraction(0)
    sparing = [each for each in kept if each.work_ns > 0]
    for each in sorted(sparing, key=lambda each: each.bytes / each.work_ns):
        part = min(Fraction(1), left / each.bytes) if each.bytes else Fraction(1)
        left -= part * each.bytes
        spared += part * each.work_ns
    return spared

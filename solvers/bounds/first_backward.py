"""Where memory binds: what can be computed before the first backward of a flushed step (BOUNDS section 14).

No backward begins before one slice has come forward through all layers. What has been computed forward by then is in
memory, or is computed once more afterwards; all devices together have room for so much. All other work comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.one_pipeline.load import kinds_of, least_per_sample
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.stage_table import static_sums
from penstock.solvers.model.problem import Measured, Problem


class Kept(NamedTuple):
    """What all samples of a layer keep from forward to backward, and the work that this spares later."""

    bytes: Fraction
    work_ns: Fraction


def first_backward_ns(problem: Problem, slice_ns: int) -> int:
    """Return a bound on flushed plans that fit into memory.

    ``slice_ns``: the time of the quickest slice forward through all layers, before which there is no backward.
    """
    batch = problem.global_batch_size
    later_ns, kept = Fraction(int(problem.update_ns[-1])), list[Kept]()
    for whole, forward, backward, stash in zip(*_per_sample(problem), strict=True):
        if problem.recompute == "never":
            later_ns += batch * whole
            kept.append(Kept(batch * stash, batch * (whole - backward)))
        else:
            later_ns += batch * (backward + forward)
            kept.append(Kept(batch * stash, batch * forward))
    return slice_ns + max(0, -int(-(later_ns - _spared_ns(kept, _room_bytes(problem))) // problem.num_devices))


def _per_sample(problem: Problem) -> tuple[list[Fraction], ...]:
    """Return each layer's least time, forward and backward together and each, and the least bytes that it keeps."""
    kinds = kinds_of(problem)

    def least(value: Callable[[Measured], np.ndarray], speeds: Iterable[float]) -> list[Fraction]:
        of_kinds = [
            [each / Fraction(speed) for each in least_per_sample(problem, kind, value)]
            for kind, speed in zip(kinds, speeds, strict=True)
        ]
        return [min(each) for each in zip(*of_kinds, strict=True)]

    speeds = [speed for _source, speed in kinds]
    return (
        least(lambda point: point.forward_ns + point.backward_ns, speeds),
        least(lambda point: point.forward_ns, speeds),
        least(lambda point: point.backward_ns, speeds),
        least(lambda point: point.stash_bytes, [1.0] * len(kinds)),
    )


def _room_bytes(problem: Problem) -> int:
    """Return what all devices have besides one copy of all parameters and optimizer states."""
    held = static_sums(problem)
    free = sum(free_bytes(problem, (device,)) for device in range(problem.num_devices))
    return max(0, free - int(held.parameters[-1] + held.optimizer[-1]))


def _spared_ns(kept: Iterable[Kept], room_bytes: int) -> Fraction:
    """Return the most work that keeping activations spares: those first that spare most per byte."""
    left, spared = Fraction(room_bytes), Fraction(0)
    for each in sorted(kept, key=lambda each: each.bytes / each.work_ns if each.work_ns else Fraction(0)):
        part = min(Fraction(1), left / each.bytes) if each.bytes else Fraction(1)
        left -= part * each.bytes
        spared += part * each.work_ns
    return spared

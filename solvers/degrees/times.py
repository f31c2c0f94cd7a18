"""The times of a model on cells: one GPU's times with the exposed time of its collectives."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.degrees.inner_times import STATED, InnerTimes, TimeFactors, scaled
from penstock.solvers.model.degrees import Degrees, Variant
from penstock.solvers.model.problem import Measured, Problem, frozen, per_problem


class CellTimes(NamedTuple):
    """Prefix sums of the time in which a cell sums gradients before it steps, and the measurements by kind."""

    step_collectives_ns: np.ndarray
    measured: dict[str, tuple[Measured, ...]]


def cell_times(problem: Problem, variant: Variant, inner: InnerTimes, times: TimeFactors = STATED) -> CellTimes:
    """Return the times of a variant of the problem of GPUs on the cells of ``inner``."""
    first = variant.measured[next(iter(problem.kind_source.values()))[0]][0]
    step = np.concatenate(([0], np.cumsum(inner.exposed_ns(first, "step"))))
    measured = {kind: _measured(problem, variant, inner, kind, times) for kind in problem.kind_source}
    return CellTimes(frozen(step), measured)


def variant_at(problem: Problem, degrees: Degrees) -> Variant:
    """Return the profile's costs at some degrees. Raises UnsupportedRequest if the profile lacks them."""
    variant = _variants(problem).get(degrees)
    if variant is not None:
        return variant
    profiled = "; ".join(str(each.degrees) for each in problem.variants)
    raise UnsupportedRequest(
        f"the profile has no costs at {degrees}",
        remedy=f"degrees that the profile has: {profiled}" if profiled else "a profile with costs at these degrees",
    )


@per_problem
def _variants(problem: Problem) -> dict[Degrees, Variant]:
    return {variant.degrees: variant for variant in problem.variants}


def _measured(
    problem: Problem, variant: Variant, inner: InnerTimes, kind: str, times: TimeFactors
) -> tuple[Measured, ...]:
    """Return the times of a kind, with the collectives' times, which a faster kind does not shorten."""
    source, speed = problem.kind_source[kind]

    def computed(each: np.ndarray) -> np.ndarray:
        return np.asarray(scaled(_faster(each, speed), times.computation))

    return tuple(
        Measured(
            rows=measurement.rows,
            forward_ns=computed(measurement.forward_ns) + inner.exposed_ns(measurement, "forward", speed),
            backward_ns=computed(measurement.backward_ns) + inner.exposed_ns(measurement, "backward", speed),
            weight_ns=computed(measurement.weight_ns),
            stash_bytes=measurement.stash_bytes,
            workspace_bytes=measurement.workspace_bytes,
            modules={
                name: (computed(each.forward_ns) + inner.exposed_ns(each, "forward", speed), each.freed_bytes)
                for name, each in measurement.modules.items()
            },
        )
        for measurement in variant.measured[source]
    )


def _faster(times_ns: np.ndarray, speed: float) -> np.ndarray:
    return times_ns if speed == 1.0 else np.ceil(times_ns / speed).astype(np.int64)

"""The axes that a request may open besides degrees and sharding: a row each.

A value changes costs of the whole request, before GPUs are grouped into cells: planners, bounds and judge work on an
ordinary problem. Options, refusals, ``why-not`` and tables of answers follow from the row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.problem import Problem

STATES = {"sgd": 0, "momentum": 1, "adam": 2}
"""The number of states that an optimizer keeps of each parameter."""


@dataclass(frozen=True)
class Axis:
    """A row of the table: a choice may have one of its ``values``; without one the request's costs are as they are.

    ``trains_alike``: whether all values make the same updates; else plans at different ones are of different trainings.
    """

    name: str
    values: Mapping[str, Callable[[Problem], Problem]]
    trains_alike: bool = True


def _with_states(problem: Problem, number: int) -> Problem:
    """Return the problem of an optimizer with ``number`` states of each parameter; the step takes as long."""
    return replace(problem, memory=replace(problem.memory, states=number))


AXES = {
    row.name: row
    for row in (
        Axis(
            "optimizer",
            {name: partial(_with_states, number=number) for name, number in STATES.items()},
            trains_alike=False,
        ),
    )
}


def at_values(problem: Problem, values: tuple[tuple[str, str], ...]) -> Problem:
    """Return the problem at a value of each axis that is named, unless it is there already.

    Raises UnsupportedRequest for an axis or a value that no row has.
    """
    for name, value in values:
        if (name, value) in problem.values:
            continue
        axis = AXES.get(name)
        if axis is None:
            raise UnsupportedRequest(f"there is no axis {name!r}", remedy=f"one of {', '.join(AXES)}")
        if value not in axis.values:
            listed = ", ".join(axis.values)
            raise UnsupportedRequest(f"axis {name!r} has no value {value!r}", remedy=f"one of {listed}")
        problem = replace(axis.values[value](problem), values=(*problem.values, (name, value)), _costs={})
    return problem

"""The orders that other trainers run, by the names here (``within``)."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.schedules.catalogue import SCHEDULES

TRAINED = tuple(row.name for row in SCHEDULES.values() if row.trained is not None)
"""The schedules that other trainers run."""
ONE_STAGE = tuple(name for name in TRAINED if SCHEDULES[name].parts in ("any", "line"))
"""The orders with one stage on each rank."""
IN_A_V = tuple(name for name in TRAINED if SCHEDULES[name].parts == "v")
"""The orders with two stages on each rank, stage 2 p - 1 - r on the rank of stage r.

All others have two or more, in a loop.
"""


def order_of(problem: Problem, allocation: Allocation, name: str, group: int | None = None) -> Orders:
    """Return the order that trainers run under one of the names here; 1F1B with S - i forwards, regardless of memory.

    ``group``: micro-batches that ``interleaved`` takes together. Raises UnsupportedRequest where the stages do not
    allow it.
    """
    row = SCHEDULES.get(name)
    if row is None or row.trained is None:
        raise UnsupportedRequest(f"no trainer runs schedule {name!r}", remedy=f"one of {', '.join(TRAINED)}")
    return row.trained(problem, allocation, **({"group": group} if row.grouped else {}))


def chunks_of(name: str, most: int) -> Iterable[int]:
    """Return how many stages an order has on each rank, if there is more than one rank; at most ``most``."""
    if name in ONE_STAGE:
        return (1,)
    return range(2, min(most, 2 if name in IN_A_V else most) + 1)


def ranks_of_stages(name: str, ranks: int, chunks: int) -> list[int]:
    """Return the rank of each stage."""
    down = list(range(ranks))
    return [*down, *down[::-1]] if name in IN_A_V else down * chunks

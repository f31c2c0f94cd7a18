"""The orders that other trainers run, by our names (``within``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.allocation import Allocation
from penstock.solvers.problem import Problem
from penstock.solvers.schedule import Orders
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.gpipe import gpipe
from penstock.solvers.schedules.interleaved import interleaved, looped_bfs, looped_bfs_lifo
from penstock.solvers.schedules.v_shape import zb_v_cut

ONE_STAGE = ("early-backward", "gpipe")
"""Orders with one stage on each rank."""
IN_A_V = ("zb-v",)
"""With two, stage 2 p - 1 - r on the rank of stage r. All others have two or more, in a loop."""
MADE: dict[str, Callable[..., Orders]] = {
    "gpipe": gpipe,
    "interleaved": interleaved,
    "looped-bfs": looped_bfs,
    "looped-bfs-lifo": looped_bfs_lifo,
    "zb-v": zb_v_cut,
}


def order_of(problem: Problem, allocation: Allocation, name: str, group: int | None = None) -> Orders:
    """The order that trainers run under one of our names; 1F1B with S - i forwards first, whatever memory holds.

    ``group``: micro-batches that ``interleaved`` takes together. Raises UnsupportedRequest where the stages do not
    allow it.
    """
    if name == "early-backward":
        count, number = len(allocation.stages), allocation.num_micro_batches
        return early_backward(problem, allocation, warmup=[min(count - s, number) for s in range(count)])
    if name == "interleaved":
        return interleaved(problem, allocation, group)
    if name in MADE:
        return MADE[name](problem, allocation)
    raise UnsupportedRequest(
        f"no trainer runs schedule {name!r}", remedy=f"one of {', '.join(('early-backward', *MADE))}"
    )


def chunks_of(name: str, most: int) -> Iterable[int]:
    """How many stages an order has on each rank, if there is more than one rank; up to ``most``."""
    if name in ONE_STAGE:
        return (1,)
    return range(2, min(most, 2 if name in IN_A_V else most) + 1)


def ranks_of_stages(name: str, ranks: int, chunks: int) -> list[int]:
    """The rank of each stage."""
    down = list(range(ranks))
    return [*down, *down[::-1]] if name in IN_A_V else down * chunks

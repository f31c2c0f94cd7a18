"""Memory limits of a row, in bytes as the judge counts them (ALGORITHMS 1.7, ``simulate``), that no order breaks.

``in_flight_limits`` counts micro-batches, the constraint that CP-SAT propagates best. Where a row could exceed its
memory within that limit, ``rooms`` has the free memory that its stashes and buffers share.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schemas.program import BACKWARD, FORWARD, WEIGHT
from penstock.solvers.costs.infinity import UNLIMITED
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.step_graph import StageMemory
from penstock.solvers.improve.job_shop.shop import Operation, Shop


class Limit(NamedTuple):
    """A limit of ``most`` micro-batches between forward and release of a stage that has the row to itself."""

    row: int
    stage: int
    most: int


def in_flight_limits(shop: Shop) -> list[Limit]:
    """Return a limit for each row with one stage.

    With whole backwards and stages on separate devices, a row holds no more than any row of an earlier stage: every
    micro-batch in flight here is in flight there too. With a split backward the weight gradient may run later here, so
    the limits of earlier stages do not apply.
    """
    limits = []
    for row in range(len(shop.devices)):
        stages = shop.stages_of(row)
        if len(stages) == 1:
            limits.append(Limit(row, stages[0], _most_in_flight(shop, row, stages[0])))
    if not shop.times.stages_apart or any(each.kind == WEIGHT for each in shop.operations):
        return limits
    least = {s: min(limit.most for limit in limits if limit.stage == s) for s in {limit.stage for limit in limits}}
    return [limit._replace(most=min([limit.most, *(least[s] for s in range(limit.stage))])) for limit in limits]


def _most_in_flight(shop: Shop, row: int, s: int) -> int:
    """Return the most micro-batches in flight when a release starts; at least 1.

    When the release after the forward that reaches the maximum starts, memory has all these micro-batches, the gradient
    that the release receives, the stage's gradients, and the release's workspace if the release takes time.
    """
    classes = shop.times.memory[s]
    releases = [shop.release(each) for each in shop.of_row[row] if each.kind == FORWARD]
    free = _capacity(shop, row) - shop.times.static[s].total - min(memory.received_gradient for memory in classes)
    if all(shop.duration_ns(each) > 0 for each in releases):
        inside = all(each.kind == BACKWARD and not shop.apart(each) for each in releases)
        free -= min(memory.workspace + (memory.rebuilt_inside if inside else 0) for memory in classes)
    each = min(memory.stash + memory.received_input for memory in classes)
    return UNLIMITED if each == 0 else max(1, free // each)


def _capacity(shop: Shop, row: int) -> int:
    return free_bytes(shop.problem, shop.devices[row])


class Room(NamedTuple):
    """The memory that a row's stages share after parameters and optimizer states."""

    row: int
    free_bytes: int
    gradient_bytes: tuple[tuple[int, int], ...]

    def memory_of(self, shop: Shop, operation: Operation) -> StageMemory:
        """Return the bytes of the operation's micro-batch on its stage."""
        return shop.times.memory[operation.stage][shop.size_class[operation.micro_batch]]


def rooms(shop: Shop, limits: list[Limit]) -> list[Room]:
    """Return the rows that could exceed their memory although they keep the limits."""
    static = shop.times.static
    counts = {limit.row: limit.most for limit in limits}
    exceeded = []
    for row in range(len(shop.devices)):
        stages = shop.stages_of(row)
        free = _capacity(shop, row) - sum(static[s].parameters + static[s].optimizer for s in stages)
        gradients = tuple((s, static[s].gradients) for s in stages)
        room = Room(row, free, gradients)
        if _most_bytes(shop, room, counts.get(row)) > free:
            exceeded.append(room)
    return exceeded


def _most_bytes(shop: Shop, room: Room, limit: int | None) -> int:
    """Return the bytes of a row when everything that may be in memory is there at once."""
    buffers, kept, working = 0, [], 0
    for each in shop.of_row[room.row]:
        memory = room.memory_of(shop, each)
        working = max(working, memory.workspace + memory.rebuilt_inside)
        if each.kind == FORWARD:
            buffers += memory.received_input + memory.received_gradient + memory.sent_output + memory.sent_gradient
            kept.append(memory.stash + memory.rebuilt_whole)
    kept.sort(reverse=True)
    return sum(size for _s, size in room.gradient_bytes) + buffers + sum(kept[:limit]) + working

"""Memory limits of a row, in bytes as the judge counts them (ALGORITHMS 1.7, ``simulate``), that no order breaks.

``in_flight_limits`` counts micro-batches, a constraint that CP-SAT propagates best; where a row could exceed its memory
within that limit, ``free_bytes`` says how much all its stashes and buffers share.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.schemas.program import BACKWARD, FORWARD, WEIGHT
from penstock.solvers.costs.infinity import UNLIMITED
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.costs.tables.step_graph import StageMemory
from penstock.solvers.improve.job_shop.shop import Operation, Shop


class Limit(NamedTuple):
    """At most ``most`` micro-batches between forward and release of a stage that has the row to itself."""

    row: int
    stage: int
    most: int


def in_flight_limits(shop: Shop) -> list[Limit]:
    """Return a limit for each row with one stage.

    With whole backwards and stages apart a row holds no more than any row of a stage before it, where everything in
    flight here is in flight too. A weight gradient may run later here, so a split backward has only its own limit.
    """
    found = []
    for row in range(len(shop.devices)):
        stages = shop.stages_of(row)
        if len(stages) == 1:
            found.append(Limit(row, stages[0], _most_in_flight(shop, row, stages[0])))
    if not shop.times.stages_apart or any(each.kind == WEIGHT for each in shop.operations):
        return found
    least = {s: min(limit.most for limit in found if limit.stage == s) for s in {limit.stage for limit in found}}
    return [limit._replace(most=min([limit.most, *(least[s] for s in range(limit.stage))])) for limit in found]


def _most_in_flight(shop: Shop, row: int, s: int) -> int:
    """Return the most micro-batches in flight when a release starts; at least 1.

    After the forward that reaches the maximum, memory at the next release has all of them, the gradient that belongs
    to it, the stage's gradients, and its own workspace if it takes time.
    """
    classes = shop.times.memory[s]
    releases = [shop.release(each) for each in shop.of_row[row] if each.kind == FORWARD]
    free = _capacity(shop, row) - shop.times.static[s].total - min(held.received_gradient for held in classes)
    if all(shop.duration_ns(each) > 0 for each in releases):
        inside = all(each.kind == BACKWARD and not shop.apart(each) for each in releases)
        free -= min(held.workspace + (held.rebuilt_inside if inside else 0) for held in classes)
    each = min(held.stash + held.received_input for held in classes)
    return UNLIMITED if each == 0 else max(1, free // each)


def _capacity(shop: Shop, row: int) -> int:
    return free_bytes(shop.problem, shop.devices[row])


class Room(NamedTuple):
    """The memory that a row's stages share after parameters and optimizer states; None where everything fits."""

    row: int
    free_bytes: int
    gradient_bytes: tuple[tuple[int, int], ...]

    def held(self, shop: Shop, operation: Operation) -> StageMemory:
        """Return the bytes of the operation's micro-batch on its stage."""
        return shop.times.memory[operation.stage][shop.size_class[operation.micro_batch]]


def rooms(shop: Shop, limits: list[Limit]) -> list[Room]:
    """Return the rows that could exceed their memory although they keep the limits."""
    static = shop.times.static
    counts = {limit.row: limit.most for limit in limits}
    found = []
    for row in range(len(shop.devices)):
        stages = shop.stages_of(row)
        free = _capacity(shop, row) - sum(static[s].parameters + static[s].optimizer for s in stages)
        gradients = tuple((s, static[s].gradients) for s in stages)
        room = Room(row, free, gradients)
        if _most_bytes(shop, room, counts.get(row)) > free:
            found.append(room)
    return found


def _most_bytes(shop: Shop, room: Room, limit: int | None) -> int:
    """Return the bytes of a row when everything that may be in memory is there at once."""
    buffers, kept, working = 0, [], 0
    for each in shop.of_row[room.row]:
        held = room.held(shop, each)
        working = max(working, held.workspace + held.rebuilt_inside)
        if each.kind == FORWARD:
            buffers += held.received_input + held.received_gradient + held.sent_output + held.sent_gradient
            kept.append(held.stash + held.rebuilt_whole)
    kept.sort(reverse=True)
    return sum(size for _s, size in room.gradient_bytes) + buffers + sum(kept[:limit]) + working

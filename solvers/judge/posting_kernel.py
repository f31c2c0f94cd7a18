"""Times at which lanes post their receives, and up to which messages occupy memory on the sending devices.

A program posts the receive of an operation where decision 6 puts it: before the later of the previous operation of the
same stage and direction and the second operation before the one that reads the message. A lane reaches that place when
the operation before it has ended, or at the beginning of the run; optimizer steps come after receives.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.schemas.program import FORWARD, INPUT, LOOK_AHEAD
from penstock.solvers.compiled.decorators import compiled
from penstock.solvers.compiled.heap import pop, push
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.judge.operation_tables import DURATION, LINES, NOWHERE
from penstock.solvers.judge.operation_tables import INPUT as INPUT_PLACE
from penstock.solvers.model.schedule import STEP

never_negative(__name__)

WITHOUT, STEPS = -1, -2
LATEST = LOOK_AHEAD + 2
"""Number of a lane's latest operations that are remembered: a receive is posted at the end of one of them."""


class Posted(NamedTuple):
    """Bytes of posted receives, and times at which messages have passed.

    ``size`` (N,): bytes of the receives that are posted when an operation has ended; ``first`` (L,): at time 0.
    ``freed``, at the places of the transfers and in order of time within each flow: when a message has passed. That
    takes its transfer's duration, from when the transfer has started and all receiving lanes have posted the receive.
    ``order``: the micro-batches of ``freed``; the same as ``times.order`` where messages pass in the order of sending.
    """

    size: np.ndarray
    first: np.ndarray
    freed: np.ndarray
    order: np.ndarray


@compiled
def post_receives(flows: Any, lanes: Any, times: Any, received: np.ndarray) -> Posted:
    """Return the posted receives; ``received``: bytes that each line of the table reads from messages."""
    size = np.zeros(lanes.row.size, dtype=np.int64)
    first = np.zeros(lanes.lane_start.size - 1, dtype=np.int64)
    when = np.zeros(flows.places, dtype=np.int64)
    ways, previous = _ways(received.size), np.full(2 * lanes.slot_lane.size, -1, dtype=np.int64)
    place, end = np.empty(LATEST, dtype=np.int64), np.empty(LATEST, dtype=np.int64)
    row, batch, table, start = lanes.row, lanes.batch, lanes.table, times.start
    for lane in range(first.size):
        count = 0
        for i in range(lanes.lane_start[lane], lanes.lane_start[lane + 1]):
            line = row[i]
            if ways[line] == STEPS:
                continue
            if ways[line] != WITHOUT:
                before = max(previous[ways[line]], count - LOOK_AHEAD, 0)
                previous[ways[line]] = count
                posted = 0
                if before == 0:
                    first[lane] += received[line]
                else:
                    size[place[(before - 1) % LATEST]] += received[line]
                    posted = end[(before - 1) % LATEST]
                if table[line, INPUT_PLACE] != NOWHERE:
                    k = table[line, INPUT_PLACE] + batch[i]
                    when[k] = max(when[k], posted)
            place[count % LATEST], end[count % LATEST] = i, start[i] + table[line, DURATION]
            count += 1
    freed, order = _freed(flows, times, when)
    return Posted(size, first, freed, order)


@compiled
def _ways(lines: int) -> np.ndarray:
    """Return 2 slot + direction of the message of each line of the lanes' table; WITHOUT a message, or STEPS."""
    ways = np.full(lines, WITHOUT, dtype=np.int64)
    for line in range(lines):
        kind = line // 2 % (STEP + 1)
        if kind == STEP:
            ways[line] = STEPS
        elif kind <= INPUT:
            ways[line] = 2 * (line // LINES) + (0 if kind == FORWARD else 1)
    return ways


@compiled
def _freed(flows: Any, times: Any, when: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute ``Posted.freed`` and ``Posted.order``; ``when``: the last posting for each place of ``arrived``."""
    total = flows.base[flows.base.size - 1]
    freed, order, sent, duration = np.empty_like(times.sent), times.order, times.sent, flows.flow_ns
    as_sent = True
    for flow in range(flows.flow_ns.size):
        low, high = flows.flow_offset[flow], flows.flow_offset[flow + 1]
        direction = flows.flow_direction[flow]
        s = flows.flow_stage[flow]
        receiver = flows.next[s] if direction == 0 else flows.previous[s]
        base = direction * total + flows.base[receiver] - flows.first[receiver]
        sorted_so_far = True
        for k in range(low, high):
            freed[k] = max(sent[k], when[base + order[k]]) + duration[flow]
            sorted_so_far = sorted_so_far and (k == low or freed[k - 1] <= freed[k])
        if not sorted_so_far:
            if as_sent:
                order, as_sent = order.copy(), False
            _sort(freed[low:high], order[low:high])
    return freed, order


@compiled
def _sort(freed: np.ndarray, order: np.ndarray) -> None:
    """Sort messages by ``freed``; messages of one instant stay in the order of sending."""
    time, place, sent = np.empty_like(freed), np.empty_like(freed), order.copy()
    for k in range(freed.size):
        push(time, place, 0, k, freed[k], k)
    for k in range(freed.size):
        freed[k], order[k] = time[0], sent[place[0]]
        pop(time, place, 0, freed.size - k)

"""When each lane posts its receives, and until when messages take room on the devices that send them.

A program posts the receive of an operation where decision 6 puts it: before the later of the previous operation of the
same stage and direction and the second operation before the one that reads the message. A lane gets there when the
operation before has ended, at the beginning of the run where there is none; optimizer steps stand behind receives.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.schemas.program import FORWARD, INPUT, LOOK_AHEAD
from penstock.solvers.compiled.decorators import compiled
from penstock.solvers.judge.indices import never_negative
from penstock.solvers.judge.operation_tables import DURATION, LINES, NOWHERE
from penstock.solvers.judge.operation_tables import INPUT as INPUT_PLACE
from penstock.solvers.model.schedule import STEP

never_negative(__name__)


class Posted(NamedTuple):
    """``size`` (N,): bytes of the receives that are posted when an operation has ended; ``first`` (L,): at time 0.

    ``freed``, at the places of the transfers and in order of time within each flow: when a message has passed, which
    takes its transfer's duration from when the transfer has started and all lanes that receive it have posted that.
    ``order``: the micro-batches of ``freed``.
    """

    size: np.ndarray
    first: np.ndarray
    freed: np.ndarray
    order: np.ndarray


@compiled
def post_receives(flows: Any, lanes: Any, times: Any, received: np.ndarray) -> Posted:
    """``received``: bytes that an operation reads from messages, by its line in the lanes' table."""
    size = np.zeros(lanes.row.size, dtype=np.int64)
    first = np.zeros(lanes.lane_start.size - 1, dtype=np.int64)
    when = np.zeros(flows.places, dtype=np.int64)
    previous = np.full((lanes.slot_lane.size, 2), -1, dtype=np.int64)
    place = np.empty(lanes.row.size, dtype=np.int64)
    for lane in range(first.size):
        count = 0
        for i in range(lanes.lane_start[lane], lanes.lane_start[lane + 1]):
            line = lanes.row[i]
            kind = line // 2 % (STEP + 1)
            if kind == STEP:
                continue
            if kind <= INPUT:
                slot, direction = line // LINES, 0 if kind == FORWARD else 1
                before = max(previous[slot, direction], count - LOOK_AHEAD, 0)
                previous[slot, direction] = count
                posted = 0
                if before == 0:
                    first[lane] += received[line]
                else:
                    j = place[before - 1]
                    size[j] += received[line]
                    posted = times.start[j] + lanes.table[lanes.row[j], DURATION]
                if lanes.table[line, INPUT_PLACE] != NOWHERE:
                    k = lanes.table[line, INPUT_PLACE] + lanes.batch[i]
                    when[k] = max(when[k], posted)
            place[count] = i
            count += 1
    freed, order = _freed(flows, times, when)
    return Posted(size, first, freed, order)


@compiled
def _freed(flows: Any, times: Any, when: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``Posted.freed`` and ``Posted.order``; ``when``: the last posting for each place of ``arrived``."""
    total = flows.base[flows.base.size - 1]
    freed, order = np.empty_like(times.sent), times.order.copy()
    for flow in range(flows.flow_ns.size):
        low, high = flows.flow_offset[flow], flows.flow_offset[flow + 1]
        direction = flows.flow_direction[flow]
        s = flows.flow_stage[flow]
        receiver = flows.next[s] if direction == 0 else flows.previous[s]
        base = direction * total + flows.base[receiver] - flows.first[receiver]
        sorted_so_far = True
        for k in range(low, high):
            freed[k] = max(times.sent[k], when[base + times.order[k]]) + flows.flow_ns[flow]
            sorted_so_far = sorted_so_far and (k == low or freed[k - 1] <= freed[k])
        if not sorted_so_far:
            by_time = np.argsort(freed[low:high], kind="mergesort")
            freed[low:high] = freed[low:high][by_time]
            order[low:high] = order[low:high][by_time]
    return freed, order

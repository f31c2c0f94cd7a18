"""Chains of buckets: when a round's gradients are ready, and what follows a bucket.

The rules are in ``docs/theory/judge.md``, section 5.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.judge.clocks.state import READY, ClockState, free, later, make_fresh, touch_stage
from penstock.solvers.judge.clocks.ties import buckets_over
from penstock.solvers.judge.operation_tables import DURATION
from penstock.solvers.model.schedule import STEP

never_negative(__name__)


@inner
def close(lanes: Any, state: ClockState, slot: int) -> int:
    """Return the number of the round whose last gradient a slot now computes, and look up the next such round."""
    first, stop = lanes.round_start[slot], lanes.round_start[slot + 1]
    closed = state.closing_place[slot]
    place = closed + 1
    while place < stop and lanes.last_gradient[place] < 0:
        place += 1
    state.closing_place[slot] = place
    state.closing[slot] = lanes.last_gradient[place] if place < stop else -1
    return closed - first


@inner
def announce_buckets(chains: Any, state: ClockState, s: int, update_round: int, end: int, column: int) -> None:
    """Record that a lane's last gradient of a round ends at ``end``; after the last lane, schedule the first bucket."""
    for k in range(chains.member_start[s], chains.member_start[s + 1]):
        g = chains.member_group[k]
        low, high = chains.start[g], chains.start[g + 1]
        if low == high or update_round >= chains.rounds[g]:
            continue
        for b in range(low, high):
            lead = chains.lead_ns[4 * (chains.member_lead[k] + b - low) + column]
            state.bucket_ready[b] = max(state.bucket_ready[b], end - lead)
        left = chains.round_start[g] + update_round
        state.lanes_left[left] -= 1
        if state.lanes_left[left] == 0:
            later(state, state.bucket_ready[low], READY, g, 0)


@inner
def end_bucket(flows: Any, chains: Any, ties: Any, lanes: Any, state: ClockState, g: int, t: int) -> None:
    user = flows.flow_ns.size + g
    free(flows, state, user)
    b = state.bucket[g] + 1
    if b < chains.start[g + 1]:
        state.bucket[g] = b
        state.bucket_ready[b] = max(state.bucket_ready[b], t)
        if state.bucket_ready[b] == t:
            make_fresh(state, user)
        else:
            later(state, state.bucket_ready[b], READY, g, 0)
        return
    state.bucket[g] = chains.start[g]
    state.bucket_round[g] += 1
    total = flows.base[flows.base.size - 1]
    if flows.places > 2 * total:
        s = chains.stage[g]
        state.arrived[2 * total + flows.base[s] + state.bucket_round[g] * chains.every[s] - 1] = True
        touch_stage(lanes, state, s)
    buckets_over(chains, ties, lanes, state, g, t)


@loop
def bucket_starts(chains: Any, lanes: Any, start: np.ndarray, bucket_start: np.ndarray) -> None:
    """Fill the starts of a flushed step's buckets on private links: each after the previous one and when ready."""
    for s in range(chains.member_start.size - 1):
        last = lanes.last_gradient[s]
        if last < 0:
            continue
        end = start[last] + lanes.table[lanes.row[last], DURATION]
        column = lead_column(lanes, last)
        for k in range(chains.member_start[s], chains.member_start[s + 1]):
            g = chains.member_group[k]
            for b in range(chains.start[g], chains.start[g + 1]):
                lead = chains.lead_ns[4 * (chains.member_lead[k] + b - chains.start[g]) + column]
                bucket_start[b] = max(bucket_start[b], end - lead)
    for g in range(chains.start.size - 1):
        t = 0
        for b in range(chains.start[g], chains.start[g + 1]):
            t = max(t, bucket_start[b])
            bucket_start[b] = t
            t += chains.bucket_ns[b]


@inner
def lead_column(lanes: Any, operation: int) -> int:
    """Return which of a bucket's four leads applies: after a B or a W, of row class 0 or 1."""
    kind, row_class = lanes.row[operation] // 2 % (STEP + 1), lanes.row[operation] % 2
    return (2 if kind == 3 else 0) + row_class

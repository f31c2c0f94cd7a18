"""Makespans of many plans: chains of stages in early-backward order, private channels. No event heap, no start times.

The same worklist as ``worklist.py``, over the same ``channels``, for plans that are rows of numbers: the next operation
of a stage is not read from a row but follows from its warm-up (``docs/theory/solvers.md``, section D). O(operations),
and a pass over the stages each time that no stage can go on.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import inner, loop, threaded
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.judge.clocks.channels import (
    FULL,
    HALF,
    Channels,
    carry,
    earliest_waiting,
    get,
    goes_first,
    new_channels,
    put,
)

never_negative(__name__)

FORWARD_NS, BACKWARD_NS, UPDATE_NS, AFTER_NS = 0, 2, 4, 5
"""Columns of a piece: forward and backward by row class, the step, and what follows the last backward at least."""
OUT_NS, BACK_NS = 0, 2
"""Columns of a hop, by row class; -1 where nothing travels."""


class Plans(NamedTuple):
    """N plans of at most S stages: how many stages, their pieces, the hops after them, the warm-ups; (N, S) int32."""

    stages: np.ndarray
    pieces: np.ndarray
    hops: np.ndarray
    warmups: np.ndarray


class PlanWalk(NamedTuple):
    """The state of one plan; (S,) or, by micro-batch, (S, M).

    ``time``, forwards ``ahead`` and backwards ``done`` of each stage. ``arrived`` (2, S, M): the times at which
    activations and gradients arrive; ``here``: how many have arrived. ``channels``: their waiting transfers are
    micro-batches. ``visit``: the stages to visit; ``listed``: whether a stage is among them.
    """

    time: np.ndarray
    ahead: np.ndarray
    done: np.ndarray
    arrived: np.ndarray
    here: np.ndarray
    channels: Channels
    visit: np.ndarray
    listed: np.ndarray


class PlanTimes(NamedTuple):
    """One plan: the times of each stage (S, 6) and of each hop (S, 4), warm-ups, M, the first of row class 1."""

    stage: np.ndarray
    hop: np.ndarray
    warmup: np.ndarray
    stages: int
    batches: int
    cut: int
    channel: int


@threaded
def private_makespans(
    pieces: np.ndarray,
    hops: np.ndarray,
    plans: Any,
    batches: int,
    cut: int,
    channel: int,
    makespans: np.ndarray,
    ready: np.ndarray,
) -> None:
    """Write the makespan of each plan, NEVER_NS for one that waits for ever; ``pieces`` (n, 6), ``hops`` (n, 4) int64.

    ``ready`` (N, S): when each stage has run everything but its step.
    """
    most = plans.pieces.shape[1]
    walk = PlanWalk(
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty((2, most, batches), dtype=np.int64),
        np.empty((2, most), dtype=np.int64),
        new_channels(np.arange(most + 1) * batches, channel),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.bool_),
    )
    stage = np.empty((most, 6), dtype=np.int64)
    hop = np.empty((most, 4), dtype=np.int64)
    for n in range(plans.stages.size):
        count = plans.stages[n]
        for s in range(count):
            stage[s] = pieces[plans.pieces[n, s], :6]
            hop[s] = hops[plans.hops[n, s], :4]
        chain = PlanTimes(stage, hop, plans.warmups[n], count, batches, cut, channel)
        makespans[n] = _makespan(chain, walk)
        for s in range(count):
            ready[n, s] = walk.time[s] + stage[s, AFTER_NS] - stage[s, UPDATE_NS]


@loop
def _makespan(chain: PlanTimes, walk: PlanWalk) -> int:
    _begin(chain, walk)
    head, waiting = 0, chain.stages
    while True:
        while waiting > 0:
            s = walk.visit[head]
            head = head + 1 if head + 1 < chain.stages else 0
            waiting -= 1
            walk.listed[s] = False
            woken = _run(chain, walk, s)
            if chain.channel == HALF:
                woken |= _send(chain, walk, s - 1, s) if s > 0 else 0
                woken |= _send(chain, walk, s, s) if s + 1 < chain.stages else 0
            for way in range(3):
                other = s + way - 1
                if woken & (1 << way) and not walk.listed[other]:
                    walk.listed[other] = True
                    tail = head + waiting
                    walk.visit[tail if tail < chain.stages else tail - chain.stages] = other
                    waiting += 1
        earliest = earliest_waiting(walk.channels, chain.stages) if chain.channel == HALF else -1
        if earliest < 0:
            break
        other = _take(chain, walk, earliest & 1, earliest >> 1)
        walk.listed[other] = True
        walk.visit[head] = other
        waiting = 1
    last = 0
    for s in range(chain.stages):
        if walk.done[s] < chain.batches:
            return NEVER_NS
        last = max(last, walk.time[s] + chain.stage[s, AFTER_NS])
    return last


@inner
def _begin(chain: PlanTimes, walk: PlanWalk) -> None:
    for s in range(chain.stages):
        walk.time[s] = walk.ahead[s] = walk.done[s] = 0
        walk.visit[s] = s
        walk.listed[s] = True
        for way in range(2):
            walk.here[way, s] = walk.channels.free[2 * s + way] = 0
            walk.channels.first[2 * s + way] = NEVER_NS
            walk.channels.put[2 * s + way] = walk.channels.got[2 * s + way] = 0
    walk.here[0, 0] = chain.batches
    walk.here[1, chain.stages - 1] = chain.batches


@inner
def _forward_is_next(chain: PlanTimes, walk: PlanWalk, s: int) -> bool:
    return walk.ahead[s] < min(chain.batches, chain.warmup[s] + walk.done[s])


@loop
def _run(chain: PlanTimes, walk: PlanWalk, s: int) -> int:
    """Run a stage until it blocks; bits of the stages that received something: 1 the one before, 4 the next one."""
    woken = 0
    t = walk.time[s]
    last = chain.stages - 1
    while walk.done[s] < chain.batches:
        if _forward_is_next(chain, walk, s):
            m = walk.ahead[s]
            if m >= walk.here[0, s]:
                break
            t = (t if s == 0 else max(t, walk.arrived[0, s, m])) + chain.stage[s, FORWARD_NS + (m >= chain.cut)]
            walk.ahead[s] = m + 1
            if s < last:
                woken |= _pass(chain, walk, 0, s, s + 1, m, t, chain.hop[s, OUT_NS + (m >= chain.cut)])
        else:
            m = walk.done[s]
            if m >= walk.here[1, s]:
                break
            t = (t if s == last else max(t, walk.arrived[1, s, m])) + chain.stage[s, BACKWARD_NS + (m >= chain.cut)]
            walk.done[s] = m + 1
            if s > 0:
                woken |= _pass(chain, walk, 1, s - 1, s - 1, m, t, chain.hop[s - 1, BACK_NS + (m >= chain.cut)])
    walk.time[s] = t
    return woken


@inner
def _pass(chain: PlanTimes, walk: PlanWalk, way: int, edge: int, target: int, m: int, t: int, takes: int) -> int:
    """Send an output that is ready at ``t``: without a transfer, over a one-way channel, or by a shared one's queue."""
    if takes >= 0 and chain.channel == HALF:
        put(walk.channels, 2 * edge + way, t, m)
        return 0
    if takes >= 0:
        t = takes + (carry(walk.channels, 2 * edge + way, t, takes) if chain.channel == FULL else t)
    walk.arrived[way, target, m] = t
    walk.here[way, target] = m + 1
    return 4 if way == 0 else 1


@loop
def _send(chain: PlanTimes, walk: PlanWalk, edge: int, visited: int) -> int:
    """Carry the transfers of an edge that surely come next; return bits as ``_run``, 2 for the visited stage."""
    woken = 0
    while True:
        forward, backward = walk.channels.first[2 * edge], walk.channels.first[2 * edge + 1]
        way = 0 if goes_first(0, forward, backward) else 1
        if way == 0:
            if forward == NEVER_NS:
                return woken
            if backward == NEVER_NS and not goes_first(0, forward, _next_backward(chain, walk, edge + 1)):
                return woken
        elif forward == NEVER_NS and not goes_first(1, backward, _next_forward(chain, walk, edge)):
            return woken
        woken |= 1 << (_take(chain, walk, way, edge) - visited + 1)


@inner
def _take(chain: PlanTimes, walk: PlanWalk, way: int, edge: int) -> int:
    """Carry the transfer that has been waiting longest one way; return the stage that receives it."""
    ready = walk.channels.first[2 * edge + way]
    m = get(walk.channels, 2 * edge + way)
    takes = chain.hop[edge, (BACK_NS if way else OUT_NS) + (m >= chain.cut)]
    target = edge if way else edge + 1
    walk.arrived[way, target, m] = carry(walk.channels, 2 * edge, ready, takes) + takes
    walk.here[way, target] = m + 1
    return target


@inner
def _next_forward(chain: PlanTimes, walk: PlanWalk, s: int) -> int:
    """Return the earliest time of stage s's next activation; NEVER_NS if it waits for a gradient over the channel."""
    m = walk.ahead[s]
    if m == chain.batches or chain.hop[s, OUT_NS] < 0:
        return NEVER_NS
    step = walk.time[s] + chain.stage[s, FORWARD_NS + (m >= chain.cut)]
    if _forward_is_next(chain, walk, s):
        return step
    done = walk.done[s]
    return step + chain.stage[s, BACKWARD_NS + (done >= chain.cut)] if done < walk.here[1, s] else NEVER_NS


@inner
def _next_backward(chain: PlanTimes, walk: PlanWalk, s: int) -> int:
    """Return the earliest time of stage s's next gradient; NEVER_NS if it waits for an activation over the channel."""
    done = walk.done[s]
    if done == chain.batches or chain.hop[s - 1, BACK_NS] < 0:
        return NEVER_NS
    step = walk.time[s] + chain.stage[s, BACKWARD_NS + (done >= chain.cut)]
    if not _forward_is_next(chain, walk, s):
        return step
    m = walk.ahead[s]
    return step + chain.stage[s, FORWARD_NS + (m >= chain.cut)] if m < walk.here[0, s] else NEVER_NS

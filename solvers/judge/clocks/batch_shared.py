"""Makespans of many plans in a shared network: chains of stages in early-backward order, transfers that need links.

The rules are the same as in ``events.py`` (``docs/theory/judge.md``, section 4), for plans that are rows of numbers. A
*user* of links is one stage's transfers in one direction in one row class (4 s + 2 direction + class), or a stage's
all-reduce (4 S + s). Users conflict when they need a link in common. Each has a mask of the users that it conflicts
with, itself among them; a transfer may start when no running user is in its mask.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import inner, loop, threaded
from penstock.solvers.compiled.heap import pop_time, push_time
from penstock.solvers.compiled.indices import never_negative
from penstock.solvers.costs.infinity import NEVER_NS

never_negative(__name__)

SHIFT = 32
EVENTS, WAITING, TOUCHED, CHANGED = 0, 1, 2, 3
UPDATE_NS = 4


class Wants(NamedTuple):
    """The links that pieces and hops use, as concatenated lists.

    ``hop_start`` (4 n + 1,) by hop, direction and row class; ``ring_start`` (n + 1,) by piece. A piece's buckets begin
    at ``bucket_start`` (n + 1,), with their times; ``lead_ns``: how long before the last backward's end each is ready,
    by row class (2 entries). ``links``: the number of links in the network.
    """

    links: int
    hop_start: np.ndarray
    hop_links: np.ndarray
    ring_start: np.ndarray
    ring_links: np.ndarray
    bucket_start: np.ndarray
    bucket_ns: np.ndarray
    lead_ns: np.ndarray


class SharedPlan(NamedTuple):
    """One plan: its pieces and hops by number, their times, its warm-ups, S, M, the first of row class 1."""

    piece: np.ndarray
    hop: np.ndarray
    stage_ns: np.ndarray
    hop_ns: np.ndarray
    warmup: np.ndarray
    stages: int
    batches: int
    cut: int


class SharedState(NamedTuple):
    """The state of a running plan; users and stages as above, masks are (users, words) uint64.

    ``tail`` and ``sent``: for each user, one more than the last micro-batch that is ready to send, and that has
    arrived.
    """

    size: np.ndarray
    event_time: np.ndarray
    event_code: np.ndarray
    time: np.ndarray
    reduced: np.ndarray
    ahead: np.ndarray
    done: np.ndarray
    busy: np.ndarray
    touched: np.ndarray
    is_touched: np.ndarray
    arrived: np.ndarray
    ready: np.ndarray
    tail: np.ndarray
    sent: np.ndarray
    bucket: np.ndarray
    bucket_ready: np.ndarray
    waiting: np.ndarray
    first: np.ndarray
    second: np.ndarray
    mask: np.ndarray
    running: np.ndarray
    seen: np.ndarray
    users: np.ndarray


@threaded
def shared_makespans(
    pieces: np.ndarray,
    hops: np.ndarray,
    wants: Any,
    plans: Any,
    batches: int,
    cut: int,
    makespans: np.ndarray,
    ready: np.ndarray,
) -> None:
    """Write the makespan of each plan, NEVER_NS for one that blocks; ``ready`` as in ``private_makespans``."""
    most = plans.pieces.shape[1]
    users = 5 * most
    words = (users + 63) // 64
    state = SharedState(
        np.zeros(4, dtype=np.int64),
        np.empty(users + 2 * most + 1, dtype=np.int64),
        np.empty(users + 2 * most + 1, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.bool_),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.bool_),
        np.empty((2, most, batches), dtype=np.bool_),
        np.empty((2, most, batches), dtype=np.int64),
        np.empty(users, dtype=np.int64),
        np.empty(users, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(most, dtype=np.int64),
        np.empty(users + 1, dtype=np.int64),
        np.empty(users + 1, dtype=np.int64),
        np.empty(users + 1, dtype=np.int64),
        np.empty((users, words), dtype=np.uint64),
        np.empty(words, dtype=np.uint64),
        np.full(wants.links, -1, dtype=np.int64),
        np.empty((wants.links, words), dtype=np.uint64),
    )
    stage_ns = np.empty((most, 6), dtype=np.int64)
    hop_ns = np.empty((most, 4), dtype=np.int64)
    for n in range(plans.stages.size):
        count = plans.stages[n]
        for s in range(count):
            stage_ns[s] = pieces[plans.pieces[n, s], :6]
            hop_ns[s] = hops[plans.hops[n, s], :4]
        plan = SharedPlan(plans.pieces[n], plans.hops[n], stage_ns, hop_ns, plans.warmups[n], count, batches, cut)
        _conflicts(wants, plan, state, n)
        makespans[n] = _makespan(wants, plan, state)
        for s in range(count):
            ready[n, s] = max(state.time[s], state.reduced[s])


@loop
def _conflicts(wants: Any, plan: SharedPlan, state: SharedState, number: int) -> None:
    """Fill the masks of all users of a plan, from the users of each link."""
    words = state.running.size
    for again in range(2):
        for s in range(plan.stages):
            for k in range(4):
                user = 4 * s + k
                for w in range(words if again else 0):
                    state.mask[user, w] = 0
                if s + 1 < plan.stages:
                    place = 4 * plan.hop[s] + k
                    _visit(
                        state, wants.hop_links, wants.hop_start[place], wants.hop_start[place + 1], user, number, again
                    )
            user = 4 * plan.stages + s
            for w in range(words if again else 0):
                state.mask[user, w] = 0
            p = plan.piece[s]
            if wants.bucket_start[p] < wants.bucket_start[p + 1]:
                _visit(state, wants.ring_links, wants.ring_start[p], wants.ring_start[p + 1], user, number, again)


@inner
def _visit(state: SharedState, links: np.ndarray, low: int, high: int, user: int, number: int, again: int) -> None:
    """Add a user to each of its links; the second time, add all users of its links to its mask."""
    words = state.running.size
    for i in range(low, high):
        link = links[i]
        if again:
            for w in range(words):
                state.mask[user, w] |= state.users[link, w]
            continue
        if state.seen[link] != number:
            state.seen[link] = number
            for w in range(words):
                state.users[link, w] = 0
        state.users[link, user >> 6] |= np.uint64(1) << np.uint64(user & 63)


@loop
def _makespan(wants: Any, plan: SharedPlan, state: SharedState) -> int:
    _begin(wants, plan, state)
    _start_operations(wants, plan, state, 0)
    while state.size[EVENTS] > 0:
        t = state.event_time[0]
        while state.size[EVENTS] > 0 and state.event_time[0] == t:
            code = state.event_code[0]
            pop_time(state.event_time, state.event_code, state.size[EVENTS])
            state.size[EVENTS] -= 1
            if code < plan.stages:
                _end_operation(plan, state, code, t)
            elif code < 6 * plan.stages:
                _end_transfer(wants, plan, state, code - plan.stages, t)
            else:
                s = code - 6 * plan.stages
                _wait(plan, state, 4 * plan.stages + s, state.bucket_ready[s], s)
        if state.size[CHANGED] > 0:
            state.size[CHANGED] = 0
            _start_transfers(wants, plan, state, t)
        _start_operations(wants, plan, state, t)
    last = 0
    for s in range(plan.stages):
        if state.done[s] < plan.batches:
            return NEVER_NS
        last = max(last, max(state.time[s], state.reduced[s]) + plan.stage_ns[s, UPDATE_NS])
    return last


@inner
def _begin(wants: Any, plan: SharedPlan, state: SharedState) -> None:
    for k in range(4):
        state.size[k] = 0
    for w in range(state.running.size):
        state.running[w] = 0
    for user in range(5 * plan.stages):
        state.tail[user] = state.sent[user] = plan.cut if user < 4 * plan.stages and user & 1 else 0
    for s in range(plan.stages):
        state.time[s] = state.reduced[s] = state.ahead[s] = state.done[s] = 0
        state.busy[s] = False
        state.is_touched[s] = False
        state.bucket[s] = wants.bucket_start[plan.piece[s]]
        for m in range(plan.batches):
            state.arrived[0, s, m] = s == 0
            state.arrived[1, s, m] = s == plan.stages - 1
        _touch(state, s)


@inner
def _touch(state: SharedState, s: int) -> None:
    if not state.is_touched[s]:
        state.is_touched[s] = True
        state.touched[state.size[TOUCHED]] = s
        state.size[TOUCHED] += 1


@inner
def _later(state: SharedState, t: int, code: int) -> None:
    push_time(state.event_time, state.event_code, state.size[EVENTS], t, code)
    state.size[EVENTS] += 1


@inner
def _start_operations(wants: Any, plan: SharedPlan, state: SharedState, t: int) -> None:
    for k in range(state.size[TOUCHED]):
        s = state.touched[k]
        state.is_touched[s] = False
        if state.busy[s] or state.done[s] == plan.batches:
            continue
        forward = state.ahead[s] < min(plan.batches, plan.warmup[s] + state.done[s])
        m = state.ahead[s] if forward else state.done[s]
        if not state.arrived[0 if forward else 1, s, m]:
            continue
        end = t + plan.stage_ns[s, (0 if forward else 2) + (m >= plan.cut)]
        state.busy[s] = True
        state.time[s] = end
        _later(state, end, s)
        if not forward and m == plan.batches - 1:
            b = state.bucket[s]
            if b < wants.bucket_start[plan.piece[s] + 1]:
                state.bucket_ready[s] = end - wants.lead_ns[2 * b + (m >= plan.cut)]
                _later(state, state.bucket_ready[s], 6 * plan.stages + s)
    state.size[TOUCHED] = 0


@inner
def _end_operation(plan: SharedPlan, state: SharedState, s: int, t: int) -> None:
    forward = state.ahead[s] < min(plan.batches, plan.warmup[s] + state.done[s])
    m = state.ahead[s] if forward else state.done[s]
    if forward:
        state.ahead[s] += 1
    else:
        state.done[s] += 1
    state.busy[s] = False
    _touch(state, s)
    other = s + 1 if forward else s - 1
    if other < 0 or other == plan.stages:
        return
    edge, way = min(s, other), 0 if forward else 1
    late = 1 if m >= plan.cut else 0
    if plan.hop_ns[edge, 2 * way + late] < 0:
        state.arrived[way, other, m] = True
        _touch(state, other)
        return
    state.ready[way, s, m] = t
    user = 4 * edge + 2 * way + late
    state.tail[user] += 1
    if state.tail[user] == state.sent[user] + 1:
        _wait(plan, state, user, t, m)


@inner
def _wait(plan: SharedPlan, state: SharedState, user: int, ready: int, m: int) -> None:
    """Insert a user's next transfer among the waiting ones: (ready time, stage, direction, micro-batch or chain)."""
    if user >= 4 * plan.stages:
        rank = 4 * (user - 4 * plan.stages) + 2
    else:
        way = (user >> 1) & 1
        rank = 4 * ((user >> 2) + way) + way
    second = (rank << SHIFT) | m
    i = state.size[WAITING]
    while i > 0 and (state.first[i - 1] > ready or (state.first[i - 1] == ready and state.second[i - 1] > second)):
        state.first[i], state.second[i] = state.first[i - 1], state.second[i - 1]
        state.waiting[i] = state.waiting[i - 1]
        i -= 1
    state.first[i], state.second[i], state.waiting[i] = ready, second, user
    state.size[WAITING] += 1
    state.size[CHANGED] = 1


@inner
def _start_transfers(wants: Any, plan: SharedPlan, state: SharedState, t: int) -> None:
    """Start, in order, all waiting transfers whose links are free; a user conflicts with itself."""
    words = state.running.size
    i = 0
    while i < state.size[WAITING]:
        user = state.waiting[i]
        free = True
        for w in range(words):
            if state.mask[user, w] & state.running[w]:
                free = False
        if not free:
            i += 1
            continue
        for k in range(i + 1, state.size[WAITING]):
            state.first[k - 1], state.second[k - 1] = state.first[k], state.second[k]
            state.waiting[k - 1] = state.waiting[k]
        state.size[WAITING] -= 1
        state.running[user >> 6] |= np.uint64(1) << np.uint64(user & 63)
        if user >= 4 * plan.stages:
            takes = wants.bucket_ns[state.bucket[user - 4 * plan.stages]]
        else:
            takes = plan.hop_ns[user >> 2, user & 3]
        _later(state, t + takes, plan.stages + user)


@inner
def _end_transfer(wants: Any, plan: SharedPlan, state: SharedState, user: int, t: int) -> None:
    state.running[user >> 6] ^= np.uint64(1) << np.uint64(user & 63)
    state.size[CHANGED] = 1
    if user >= 4 * plan.stages:
        s = user - 4 * plan.stages
        state.bucket[s] += 1
        b = state.bucket[s]
        state.reduced[s] = t
        if b < wants.bucket_start[plan.piece[s] + 1]:
            late = 1 if plan.batches - 1 >= plan.cut else 0
            ready = max(t, state.time[s] - wants.lead_ns[2 * b + late])
            state.bucket_ready[s] = ready
            _later(state, ready, 6 * plan.stages + s)
        return
    m = state.sent[user]
    state.sent[user] = m + 1
    way = (user >> 1) & 1
    other = (user >> 2) + (0 if way else 1)
    state.arrived[way, other, m] = True
    _touch(state, other)
    if state.tail[user] > m + 1:
        sender = (user >> 2) + way
        _wait(plan, state, user, state.ready[way, sender, m + 1], m + 1)

"""The state of the event kernel, and its smallest steps."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.compiled.heap import push_time
from penstock.solvers.compiled.indices import never_negative

never_negative(__name__)

OPERATION, SENT, READY, REDUCED = 0, 1, 2, 3
EVENTS, FRESH, FREED, CANDIDATES, TOUCHED = 0, 1, 2, 3, 4
NOWHERE, ON_ITS_WAY = -2, -1
SHIFT = 32
MASK = (1 << 32) - 1


@Fields.register
class ClockState(NamedTuple):
    """All arrays that change while events run; ``size`` counts the entries of the lists and heaps.

    Integer arrays that are not results are parts of ``words``, boolean arrays parts of ``flags``. ``lanes.new_state``
    creates it.
    """

    words: np.ndarray
    flags: np.ndarray
    size: np.ndarray
    event_time: np.ndarray
    event_code: np.ndarray
    position: np.ndarray
    time: np.ndarray
    busy: np.ndarray
    start: np.ndarray
    done: np.ndarray
    arrived: np.ndarray
    sent: np.ndarray
    order: np.ndarray
    head: np.ndarray
    tail: np.ndarray
    where: np.ndarray
    in_use: np.ndarray
    watch_first: np.ndarray
    watch_second: np.ndarray
    watch_size: np.ndarray
    fresh: np.ndarray
    freed: np.ndarray
    candidate_first: np.ndarray
    candidate_second: np.ndarray
    touched: np.ndarray
    is_touched: np.ndarray
    bucket: np.ndarray
    bucket_round: np.ndarray
    bucket_ready: np.ndarray
    bucket_start: np.ndarray
    lanes_left: np.ndarray
    closing: np.ndarray
    closing_place: np.ndarray
    halt_left: np.ndarray
    halt_next: np.ndarray
    halt_passed: np.ndarray
    tie_left: np.ndarray
    tie_round: np.ndarray
    tie_ready: np.ndarray
    tie_start: np.ndarray


@loop
def restore(state: ClockState, words: np.ndarray) -> None:
    """Reset the state to the beginning; ``words`` are the words of a new state."""
    for i in range(words.size):
        state.words[i] = words[i]
    for i in range(state.flags.size):
        state.flags[i] = False
    for i in range(state.done.size):
        state.done[i] = 0
    for i in range(state.sent.size):
        state.sent[i] = -1
    for i in range(state.bucket_start.size):
        state.bucket_start[i] = -1
    for i in range(state.tie_start.size):
        state.tie_start[i] = -1


@compiled
def lanes_of_rounds(chains: Any, lanes: Any) -> np.ndarray:
    """Count the lanes that have gradients in each round of each chain."""
    left = np.zeros(chains.round_start[chains.stage.size], dtype=np.int64)
    if chains.bucket_ns.size == 0:
        return left
    for s in range(chains.member_start.size - 1):
        for k in range(chains.member_start[s], chains.member_start[s + 1]):
            g = chains.member_group[k]
            for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
                for update_round in range(chains.rounds[g]):
                    if lanes.last_gradient[lanes.round_start[slot] + update_round] >= 0:
                        left[chains.round_start[g] + update_round] += 1
    return left


@compiled
def waits_of_halts(chains: Any, ties: Any, lanes: Any) -> np.ndarray:
    """Count the events that a halt awaits before its first tie: its row and its buckets; in periodic plans one."""
    left = np.ones(lanes.halt_start.size - 1, dtype=np.int64)
    if ties.periodic:
        return left
    for s in range(chains.member_start.size - 1):
        for k in range(chains.member_start[s], chains.member_start[s + 1]):
            g = chains.member_group[k]
            if chains.start[g] < chains.start[g + 1]:
                for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
                    left[lanes.slot_lane[slot]] += 1
    return left


@inner
def touch(state: ClockState, lane: int) -> None:
    if not state.is_touched[lane]:
        state.is_touched[lane] = True
        state.touched[state.size[TOUCHED]] = lane
        state.size[TOUCHED] += 1


@inner
def touch_stage(lanes: Any, state: ClockState, s: int) -> None:
    for slot in range(lanes.slot_start[s], lanes.slot_start[s + 1]):
        touch(state, lanes.slot_lane[slot])


@inner
def later(state: ClockState, t: int, what: int, subject: int, m: int) -> None:
    code = (what << 60) | (subject << SHIFT) | m
    push_time(state.event_time, state.event_code, state.size[EVENTS], t, code)
    state.size[EVENTS] += 1


@inner
def make_fresh(state: ClockState, user: int) -> None:
    state.where[user] = ON_ITS_WAY
    state.fresh[state.size[FRESH]] = user
    state.size[FRESH] += 1


@inner
def free(flows: Any, state: ClockState, user: int) -> None:
    for k in range(flows.resource_start[user], flows.resource_start[user + 1]):
        resource = flows.resources[k]
        state.in_use[resource] = False
        state.freed[state.size[FREED]] = resource
        state.size[FREED] += 1

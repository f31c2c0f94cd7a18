"""Inner loops of the lowering: where each message goes in a rank's program, and whether all programs come to an end.

Instructions are rows of an int32 array: word (index in ``WORDS``), stage, micro-batch, channel. Stages held by ranks
and the channels of all ranks ("ends") are numbered through. The two ends of an exchange share *slots*, one for each
of its micro-batches.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from penstock.schemas.program import KINDS, WORDS

LOOK_AHEAD = 2
"""A receive is posted at most so many operations before the one that waits for it."""

_F, _B, _I, _W, _R = range(len(KINDS))
_SEND_F, _RECV_F, _SEND_B, _RECV_B, _LOCAL_F, _LOCAL_B, _REDUCE, _WAIT_REDUCE, _STEP = (
    WORDS.index(word)
    for word in ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "LOCAL_F", "LOCAL_B", "REDUCE", "WAIT_REDUCE", "STEP")
)
_SENT, _POSTED = 1, 2

(
    OK,
    STUCK,
    NOT_HELD,
    NOT_OWN,
    TWICE,
    TOO_EARLY,
    BAD_CHANNEL,
    NOT_RECEIVED,
    BAD_BUCKET,
    OUT_OF_ORDER,
    NEVER_POSTED,
    NEVER_USED,
    NEVER_RUN,
    NEVER_STEPPED,
) = range(14)
"""What ``advance`` can find."""


class Wiring(NamedTuple):
    """What does not change: R ranks, S stages, H held stages, E ends, at most two row classes.

    ``held_of`` (R, S): held stage or -1. ``held`` (H, 6): rank, stage, then its own micro-batches as a range (first, stop,
    step) and their number. ``held_first``, ``end_first`` (R + 1): bounds of each rank's held stages and ends. ``ends`` (E, 10): rank, stage, direction (0 forward), 1 if it sends, 1 if within the rank,
    turn, modulus, first slot, rows in class 0, rows in class 1. ``partner`` (E): the other end. ``pair`` (E): number of
    the (sending rank, receiving rank). ``lists`` (4 H + 1): bounds in ``members`` (ends) of what a held stage receives
    forward, sends forward, receives backward, sends backward. ``expected`` (H, 2, 2): messages that a micro-batch
    receives per direction and class. ``buckets`` (H + 1): bounds of the buckets of each held stage.
    """

    held_of: np.ndarray
    held: np.ndarray
    held_first: np.ndarray
    end_first: np.ndarray
    ends: np.ndarray
    partner: np.ndarray
    pair: np.ndarray
    lists: np.ndarray
    members: np.ndarray
    expected: np.ndarray
    buckets: np.ndarray
    num_slots: int
    num_pairs: int
    num_micro_batches: int
    first_class: int


_RANK, _STAGE, _DIRECTION, _SENDS, _WITHIN, _TURN, _MODULUS, _SLOT, _ROWS = range(9)


@njit(cache=True)
def emit(wiring, rank, operations, overlap, out):
    """Write the program of a rank that runs ``operations`` (n, 3); returns how many instructions it has.

    With an empty ``out`` it only counts. ``overlap``: buckets are armed before the last backward, not after it.
    """
    n = len(operations)
    base = wiring.held_first[rank]
    held = wiring.held_first[rank + 1] - base
    post = np.full(n, -1, np.int64)
    previous = np.full((held, 2), -1, np.int64)
    last = np.full(held, -1, np.int64)
    for i in range(n):
        kind, h = operations[i, 0], wiring.held_of[rank, operations[i, 1]] - base
        if kind <= _I:
            direction = 0 if kind == _F else 1
            post[i] = max(previous[h, direction], i - LOOK_AHEAD, 0)
            previous[h, direction] = i
        if kind == _B or kind == _W:
            last[h] = i
    count = 0
    for p in range(n):
        for i in range(p, min(p + LOOK_AHEAD + 1, n)):
            if post[i] == p:
                which = 0 if operations[i, 0] == _F else 2
                count = _messages(wiring, rank, operations[i], which, count, out)
        kind, stage = operations[p, 0], operations[p, 1]
        h = wiring.held_of[rank, stage] - base
        if overlap and last[h] == p:
            count = _buckets(wiring, base + h, _REDUCE, stage, count, out)
        count = _put(kind, stage, operations[p, 2], -1, count, out)
        if kind <= _I:
            count = _messages(wiring, rank, operations[p], 1 if kind == _F else 3, count, out)
        if not overlap and last[h] == p:
            count = _buckets(wiring, base + h, _REDUCE, stage, count, out)
    for h in np.argsort(last):
        stage = wiring.held[base + h, 1]
        count = _buckets(wiring, base + h, _WAIT_REDUCE, stage, count, out)
        count = _put(_STEP, stage, 0, -1, count, out)
    return count


@njit(cache=True)
def _put(word, stage, number, channel, count, out):
    if len(out):
        out[count, 0] = word
        out[count, 1] = stage
        out[count, 2] = number
        out[count, 3] = channel
    return count + 1


@njit(cache=True)
def _buckets(wiring, h, word, stage, count, out):
    for bucket in range(wiring.buckets[h + 1] - wiring.buckets[h]):
        count = _put(word, stage, bucket, -1, count, out)
    return count


@njit(cache=True)
def _messages(wiring, rank, operation, which, count, out):
    """The messages of an operation over list ``which`` of its stage; exchanges within the rank by the sender alone."""
    stage, m = operation[1], operation[2]
    at = 4 * wiring.held_of[rank, stage] + which
    word = (_RECV_F, _SEND_F, _RECV_B, _SEND_B)[which]
    for k in range(wiring.lists[at], wiring.lists[at + 1]):
        end = wiring.members[k]
        if not _carries(wiring, end, m):
            continue
        channel = end - wiring.end_first[rank]
        if wiring.ends[end, _WITHIN] == 0:
            count = _put(word, stage, m, channel, count, out)
        elif which == 1:
            count = _put(_LOCAL_F, stage, m, channel, count, out)
        elif which == 3:
            count = _put(_LOCAL_B, stage, m, channel, count, out)
    return count


@njit(cache=True)
def _carries(wiring, end, m):
    """Whether an end exchanges anything of micro-batch ``m``."""
    rows = wiring.ends[end, _ROWS + (1 if m >= wiring.first_class else 0)]
    return rows > 0 and m % wiring.ends[end, _MODULUS] == wiring.ends[end, _TURN]


class _State(NamedTuple):
    """What changes. ``open_*``: receives posted and not used yet, per rank from ``open_first`` on. ``cursor``: head and
    tail of the queue of ranks that can go on, number of the message out of order."""

    done: np.ndarray
    weights: np.ndarray
    stepped: np.ndarray
    reduced: np.ndarray
    slots: np.ndarray
    sequence: np.ndarray
    sent: np.ndarray
    received: np.ndarray
    waiting: np.ndarray
    open_first: np.ndarray
    open_count: np.ndarray
    open_end: np.ndarray
    open_number: np.ndarray
    queue: np.ndarray
    queued: np.ndarray
    cursor: np.ndarray


@njit(cache=True)
def advance(wiring, codes, starts, rendezvous, ordered, at, waiting):
    """Run all programs: ``codes`` (N, 4), rank r's from ``starts[r]`` on. Returns (finding, rank, detail).

    A receive is posted without waiting; F, B and I wait for the messages of theirs to be sent. Under ``rendezvous`` a
    send waits until its receive is posted. ``ordered``: the n-th message from one rank to another is the n-th receive.
    ``at`` (R) tells where each rank stopped, ``waiting`` (R) for which of its ends, or -1.
    """
    ranks = len(starts) - 1
    state = _new_state(wiring, codes, starts, ordered, waiting)
    for rank in range(ranks):
        at[rank] = starts[rank]
        waiting[rank] = -1
        _wake(state, rank)
    while state.cursor[0] != state.cursor[1]:
        rank = state.queue[state.cursor[0] % ranks]
        state.cursor[0] += 1
        state.queued[rank] = False
        while at[rank] < starts[rank + 1]:
            finding = _run(wiring, state, rank, codes[at[rank]], rendezvous, ordered)
            if finding == STUCK:
                break
            if finding != OK:
                return finding, rank, state.cursor[2] if finding == OUT_OF_ORDER else -1
            at[rank] += 1
    for rank in range(ranks):
        if at[rank] < starts[rank + 1]:
            return STUCK, rank, -1
    return _left_over(wiring, state)


@njit(cache=True)
def _new_state(wiring, codes, starts, ordered, waiting):
    ranks, held = len(starts) - 1, len(wiring.held)
    open_first = np.zeros(ranks + 1, np.int64)
    for rank in range(ranks):
        count = 0
        for i in range(starts[rank], starts[rank + 1]):
            word = codes[i, 0]
            if word == _RECV_F or word == _RECV_B or word == _LOCAL_F or word == _LOCAL_B:
                count += 1
        open_first[rank + 1] = open_first[rank] + count
    return _State(
        np.zeros((held, wiring.num_micro_batches), np.uint8),
        np.zeros(held, np.int64),
        np.zeros(held, np.bool_),
        np.zeros(wiring.buckets[held], np.uint8),
        np.zeros(wiring.num_slots, np.uint8),
        np.zeros(wiring.num_slots if ordered else 0, np.int32),
        np.zeros(wiring.num_pairs, np.int64),
        np.zeros(wiring.num_pairs, np.int64),
        waiting,
        open_first,
        np.zeros(ranks, np.int64),
        np.empty(open_first[ranks], np.int32),
        np.empty(open_first[ranks], np.int32),
        np.empty(ranks, np.int64),
        np.zeros(ranks, np.bool_),
        np.zeros(3, np.int64),
    )


@njit(cache=True)
def _wake(state, rank):
    if not state.queued[rank]:
        state.queued[rank] = True
        state.queue[state.cursor[1] % len(state.queue)] = rank
        state.cursor[1] += 1


@njit(cache=True)
def _run(wiring, state, rank, code, rendezvous, ordered):
    """One instruction: OK, STUCK (it has to wait), or what is wrong with it."""
    word, stage = code[0], code[1]
    if stage >= wiring.held_of.shape[1] or wiring.held_of[rank, stage] < 0:
        return NOT_HELD
    h = wiring.held_of[rank, stage]
    if word <= _R:
        return _compute(wiring, state, rank, h, word, code[2])
    if word == _SEND_F or word == _SEND_B or word == _LOCAL_F or word == _LOCAL_B:
        return _send(wiring, state, rank, h, code, rendezvous, ordered)
    if word == _RECV_F or word == _RECV_B:
        return _receive(wiring, state, rank, h, code, ordered)
    if word == _REDUCE or word == _WAIT_REDUCE or word == _STEP:
        return _update(wiring, state, h, word, code[2])
    return OK


@njit(cache=True)
def _compute(wiring, state, rank, h, kind, m):
    held = wiring.held[h]
    if m < held[2] or m >= held[3] or (m - held[2]) % held[4] != 0:
        return NOT_OWN
    done = state.done[h, m]
    halves = (1 << _B) | (1 << _I)
    if done & (1 << kind) or (kind != _W and done & halves):
        return TWICE
    if (kind != _F and not done & (1 << _F)) or (kind == _W and not done & (1 << _I)):
        return TOO_EARLY
    if kind <= _I:
        finding = _use(wiring, state, rank, h, 0 if kind == _F else 1, m)
        if finding != OK:
            return finding
    state.done[h, m] = done | (1 << kind)
    if kind == _B or kind == _W:
        state.weights[h] += 1
    return OK


@njit(cache=True)
def _use(wiring, state, rank, h, direction, m):
    """Take what was received for a micro-batch, once all of it has been sent."""
    first, stage = state.open_first[rank], wiring.held[h, 1]
    found = 0
    for k in range(first, first + state.open_count[rank]):
        end = state.open_end[k]
        if (
            state.open_number[k] == m
            and wiring.ends[end, _STAGE] == stage
            and wiring.ends[end, _DIRECTION] == direction
        ):
            if not state.slots[_slot(wiring, end, m)] & _SENT:
                state.waiting[rank] = end
                return STUCK
            found += 1
    state.waiting[rank] = -1
    if found != wiring.expected[h, direction, 1 if m >= wiring.first_class else 0]:
        return NOT_RECEIVED
    k = first
    while found > 0:
        end = state.open_end[k]
        if (
            state.open_number[k] == m
            and wiring.ends[end, _STAGE] == stage
            and wiring.ends[end, _DIRECTION] == direction
        ):
            found -= 1
            state.open_count[rank] -= 1
            state.open_end[k] = state.open_end[first + state.open_count[rank]]
            state.open_number[k] = state.open_number[first + state.open_count[rank]]
        else:
            k += 1
    return OK


@njit(cache=True)
def _slot(wiring, end, m):
    return wiring.ends[end, _SLOT] + m // wiring.ends[end, _MODULUS]


@njit(cache=True)
def _end_of(wiring, rank, code, direction, sends, within):
    """The end that a message names, or -1 when it cannot carry it."""
    end = wiring.end_first[rank] + code[3]
    if code[3] < 0 or end >= wiring.end_first[rank + 1] or code[2] >= wiring.num_micro_batches:
        return -1
    found = wiring.ends[end]
    if found[_STAGE] != code[1] or found[_DIRECTION] != direction or found[_SENDS] != sends or found[_WITHIN] != within:
        return -1
    return end if _carries(wiring, end, code[2]) else -1


@njit(cache=True)
def _send(wiring, state, rank, h, code, rendezvous, ordered):
    word, m = code[0], code[2]
    within = word == _LOCAL_F or word == _LOCAL_B
    direction = 0 if word == _SEND_F or word == _LOCAL_F else 1
    end = _end_of(wiring, rank, code, direction, 1, 1 if within else 0)
    if end < 0:
        return BAD_CHANNEL
    slot, other = _slot(wiring, end, m), wiring.partner[end]
    if state.waiting[rank] != end:
        if state.slots[slot] & _SENT:
            return TWICE
        if not state.done[h, m] & ((1 << _F) if direction == 0 else (1 << _B) | (1 << _I)):
            return TOO_EARLY
        state.slots[slot] |= _SENT
        if within:
            state.slots[slot] |= _POSTED
            _open(state, rank, other, m)
            return OK
        peer = wiring.ends[other, _RANK]
        if state.waiting[peer] == other:
            _wake(state, peer)
        if ordered and _breaks_order(state, slot, wiring.pair[end], state.sent, _POSTED):
            return OUT_OF_ORDER
    if rendezvous and not state.slots[slot] & _POSTED:
        state.waiting[rank] = end
        return STUCK
    state.waiting[rank] = -1
    return OK


@njit(cache=True)
def _open(state, rank, end, m):
    k = state.open_first[rank] + state.open_count[rank]
    state.open_end[k] = end
    state.open_number[k] = m
    state.open_count[rank] += 1


@njit(cache=True)
def _breaks_order(state, slot, pair, counts, other_side):
    """Count a message of a pair; whether the other side counted it differently."""
    number = counts[pair]
    counts[pair] += 1
    if not state.slots[slot] & other_side:
        state.sequence[slot] = number
        return False
    state.cursor[2] = min(number, state.sequence[slot])
    return state.sequence[slot] != number


@njit(cache=True)
def _receive(wiring, state, rank, h, code, ordered):
    m = code[2]
    end = _end_of(wiring, rank, code, 0 if code[0] == _RECV_F else 1, 0, 0)
    if end < 0:
        return BAD_CHANNEL
    slot, other = _slot(wiring, end, m), wiring.partner[end]
    if state.slots[slot] & _POSTED:
        return TWICE
    state.slots[slot] |= _POSTED
    _open(state, rank, end, m)
    peer = wiring.ends[other, _RANK]
    if state.waiting[peer] == other:
        _wake(state, peer)
    if ordered and _breaks_order(state, slot, wiring.pair[end], state.received, _SENT):
        return OUT_OF_ORDER
    return OK


@njit(cache=True)
def _update(wiring, state, h, word, bucket):
    first, last = wiring.buckets[h], wiring.buckets[h + 1]
    missing = wiring.held[h, 5] - state.weights[h]
    if word == _STEP:
        if state.stepped[h]:
            return TWICE
        if missing > 0:
            return TOO_EARLY
        state.stepped[h] = True
        for k in range(first, last):
            if state.reduced[k] != 2:
                return BAD_BUCKET
        return OK
    k = first + bucket
    if k >= last:
        return BAD_BUCKET
    if state.reduced[k] != (0 if word == _REDUCE else 1):
        return BAD_BUCKET
    if missing > (1 if word == _REDUCE else 0):
        return TOO_EARLY
    state.reduced[k] += 1
    return OK


@njit(cache=True)
def _left_over(wiring, state):
    """What is missing when all programs have ended."""
    for h in range(len(wiring.held)):
        held = wiring.held[h]
        for m in range(held[2], held[3], held[4]):
            done = state.done[h, m]
            if not done & (1 << _F) or not done & ((1 << _B) | (1 << _W)):
                return NEVER_RUN, h, m
        if not state.stepped[h]:
            return NEVER_STEPPED, h, -1
    for rank in range(len(state.open_count)):
        if state.open_count[rank] > 0:
            return NEVER_USED, rank, state.open_end[state.open_first[rank]]
    for end in range(len(wiring.ends)):
        if wiring.ends[end, _SENDS]:
            for m in range(wiring.ends[end, _TURN], wiring.num_micro_batches, wiring.ends[end, _MODULUS]):
                if state.slots[_slot(wiring, end, m)] == _SENT:
                    return NEVER_POSTED, end, m
    return OK, -1, -1

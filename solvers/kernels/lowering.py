"""Inner loops of the lowering: where each message goes in a rank's program, and whether all programs come to an end.

Instructions are rows of an int32 array: word (index in ``WORDS``), stage, micro-batch, channel. Stages held by ranks
and the channels of all ranks ("ends") are numbered through. The two ends of an exchange share *slots*, one for each
of its micro-batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
_HALVES = (1 << _B) | (1 << _I)

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
    """What does not change: R ranks, S stages, H held stages, E ends, at most two row classes; int64.

    ``held_of`` (R, S): held stage or -1. ``first`` (R + 1, 2): bounds of each rank's held stages, and ends.
    ``held`` (H, 12): rank, stage; own micro-batches as a range (first, stop, step) and their number; how many messages
    one receives forward in class 0 and 1, backward in class 0 and 1; first bucket, number of buckets.
    ``ends`` (E, 12): rank, stage, direction (0 forward), 1 if it sends, 1 if within the rank, turn and modulus (its
    micro-batches m have m mod modulus = turn), first slot, rows in class 0, rows in class 1, the other end, number of
    the pair (sending rank, receiving rank).
    ``lists`` (4 H + 1): bounds in ``members`` (ends) of what a held stage receives forward, sends forward, receives
    backward, sends backward.
    """

    held_of: np.ndarray
    first: np.ndarray
    held: np.ndarray
    ends: np.ndarray
    lists: np.ndarray
    members: np.ndarray
    num_slots: int
    num_pairs: int
    num_micro_batches: int
    first_class: int


HELD_FIRST, HELD_STOP, HELD_STEP_BY, HELD_OWN, HELD_EXPECTED, HELD_BUCKET, HELD_NUM_BUCKETS = 2, 3, 4, 5, 6, 10, 11
END_RANK, END_STAGE, END_DIRECTION, END_SENDS, END_WITHIN, END_TURN, END_MODULUS, END_SLOT, END_ROWS = range(9)
END_PARTNER, END_PAIR = 10, 11
_OPEN_FIRST, _OPEN_COUNT, _QUEUED = range(3)


@njit(cache=True)
def emit(wiring: Wiring, rank: int, operations: Any, overlap: bool, out: Any) -> int:
    """Write the program of a rank that runs ``operations`` (n, 3); returns how many instructions it has.

    With an empty ``out`` it only counts. ``overlap``: buckets are armed before the last backward, not after it.
    """
    held_of, held, ends, lists, members = wiring.held_of[rank], wiring.held, wiring.ends, wiring.lists, wiring.members
    base, channel_0, first_class = wiring.first[rank, 0], wiring.first[rank, 1], wiring.first_class
    post, last = _places(held_of, operations, base, wiring.first[rank + 1, 0] - base)
    n = len(operations)
    count = 0
    for p in range(n):
        for i in range(p, min(p + LOOK_AHEAD + 1, n)):
            if post[i] == p:
                stage, m = operations[i, 1], operations[i, 2]
                at = 4 * held_of[stage] + (0 if operations[i, 0] == _F else 2)
                word = _RECV_F if operations[i, 0] == _F else _RECV_B
                for k in range(lists[at], lists[at + 1]):
                    end = members[k]
                    if ends[end, END_WITHIN] == 0 and _carries(ends, end, m, first_class):
                        count = _put(word, stage, m, end - channel_0, count, out)
        kind, stage, m = operations[p, 0], operations[p, 1], operations[p, 2]
        h = held_of[stage]
        if overlap and last[h - base] == p:
            count = _buckets(_REDUCE, stage, held[h, HELD_NUM_BUCKETS], count, out)
        count = _put(kind, stage, m, -1, count, out)
        if kind <= _I:
            at = 4 * h + (1 if kind == _F else 3)
            for k in range(lists[at], lists[at + 1]):
                end = members[k]
                if _carries(ends, end, m, first_class):
                    within = ends[end, END_WITHIN] == 1
                    word = (_LOCAL_F if within else _SEND_F) if kind == _F else _LOCAL_B if within else _SEND_B
                    count = _put(word, stage, m, end - channel_0, count, out)
        if not overlap and last[h - base] == p:
            count = _buckets(_REDUCE, stage, held[h, HELD_NUM_BUCKETS], count, out)
    for h in np.argsort(last):
        stage = held[base + h, 1]
        count = _buckets(_WAIT_REDUCE, stage, held[base + h, HELD_NUM_BUCKETS], count, out)
        count = _put(_STEP, stage, 0, -1, count, out)
    return count


@njit(cache=True)
def _places(held_of: Any, operations: Any, base: int, num_held: int) -> tuple[Any, Any]:
    """Before which operation each one's receives are posted (-1: it has none); each stage's last backward."""
    n = len(operations)
    post = np.full(n, -1, np.int64)
    previous = np.full((num_held, 2), -1, np.int64)
    last = np.full(num_held, -1, np.int64)
    for i in range(n):
        kind, h = operations[i, 0], held_of[operations[i, 1]] - base
        if kind <= _I:
            direction = 0 if kind == _F else 1
            post[i] = max(previous[h, direction], i - LOOK_AHEAD, 0)
            previous[h, direction] = i
        if kind in (_B, _W):
            last[h] = i
    return post, last


@njit(cache=True, inline="always")
def _put(word: int, stage: int, number: int, channel: int, count: int, out: Any) -> int:
    if len(out):
        out[count, 0] = word
        out[count, 1] = stage
        out[count, 2] = number
        out[count, 3] = channel
    return count + 1


@njit(cache=True)
def _buckets(word: int, stage: int, number: int, count: int, out: Any) -> int:
    for bucket in range(number):
        count = _put(word, stage, bucket, -1, count, out)
    return count


@njit(cache=True, inline="always")
def _carries(ends: Any, end: int, m: int, first_class: int) -> Any:
    """Whether an end exchanges anything of micro-batch ``m``."""
    if ends[end, END_ROWS + (1 if m >= first_class else 0)] == 0:
        return False
    return ends[end, END_MODULUS] == 1 or m % ends[end, END_MODULUS] == ends[end, END_TURN]


@njit(cache=True, inline="always")
def _slot(ends: Any, end: int, m: int) -> Any:
    return ends[end, END_SLOT] + (m if ends[end, END_MODULUS] == 1 else m // ends[end, END_MODULUS])


@njit(cache=True)
def advance(
    wiring: Wiring, codes: Any, starts: Any, rendezvous: bool, ordered: bool, at: Any, waiting: Any
) -> tuple[int, int, int]:
    """Run all programs: ``codes`` (N, 4), rank r's from ``starts[r]`` on. Returns (finding, where, detail).

    A receive is posted without waiting; F, B and I wait for the messages of theirs to be sent. Under ``rendezvous`` a
    send waits until its receive is posted. ``ordered``: the n-th message from one rank to another is the n-th receive.
    ``at`` (R) tells where each rank stopped, ``waiting`` (R) for which of its ends, or -1.
    """
    held_of, held, ends, first_class = wiring.held_of, wiring.held, wiring.ends, wiring.first_class
    ranks, num_stages = held_of.shape
    done = np.zeros((len(held), wiring.num_micro_batches), np.uint8)
    updates = np.zeros((len(held), 2), np.int64)
    reduced = np.zeros(held[-1, HELD_BUCKET] + held[-1, HELD_NUM_BUCKETS], np.uint8)
    slots = np.zeros(wiring.num_slots, np.uint8)
    sequence = np.zeros(wiring.num_slots if ordered else 0, np.int32)
    counts = np.zeros((wiring.num_pairs, 2), np.int64)
    queue, cursor = np.arange(ranks), np.array([0, ranks])
    book = _new_book(codes, starts)
    opened = np.empty((book[ranks, _OPEN_FIRST], 2), np.int32)
    at[:] = starts[:-1]
    waiting[:] = -1
    while cursor[0] != cursor[1]:
        rank = queue[cursor[0] % ranks]
        cursor[0] += 1
        book[rank, _QUEUED] = 0
        channel_0, channels = wiring.first[rank, 1], wiring.first[rank + 1, 1]
        while at[rank] < starts[rank + 1]:
            i = at[rank]
            word, stage, m = codes[i, 0], codes[i, 1], codes[i, 2]
            if stage >= num_stages or held_of[rank, stage] < 0:
                return NOT_HELD, rank, -1
            h = held_of[rank, stage]
            if (word <= _R or word > _LOCAL_B) and codes[i, 3] != -1:
                return BAD_CHANNEL, rank, -1
            if word <= _R:
                finding = _compute(held, done, h, word, m)
                if finding == OK and word <= _I:
                    direction = 0 if word == _F else 1
                    expected = held[h, HELD_EXPECTED + 2 * direction + (1 if m >= first_class else 0)]
                    finding = _use(ends, slots, book, opened, waiting, rank, stage, direction, m, expected)
                if finding == OK:
                    done[h, m] |= 1 << word
                    updates[h, 0] += 1 if word in (_B, _W) else 0
            elif word <= _LOCAL_B:
                end = channel_0 + codes[i, 3]
                inside = channel_0 <= end < channels and m < wiring.num_micro_batches
                if not inside or not _fits(ends, end, word, stage) or not _carries(ends, end, m, first_class):
                    return BAD_CHANNEL, rank, -1
                peer, other = ends[ends[end, END_PARTNER], END_RANK], ends[end, END_PARTNER]
                finding = OK
                if waiting[rank] != end:
                    finding = _exchange(ends, slots, done, book, opened, rank, h, end, m)
                    if finding == OK and peer != rank:
                        if ordered and not _in_order(ends, slots, sequence, counts, end, m):
                            return OUT_OF_ORDER, rank, sequence[_slot(ends, end, m)]
                        if waiting[peer] == other:
                            _wake(queue, cursor, book, peer)
                if finding == OK:
                    waits = rendezvous and ends[end, END_SENDS] == 1 and not slots[_slot(ends, end, m)] & _POSTED
                    waiting[rank] = end if waits else -1
                    finding = STUCK if waits else OK
            elif word <= _STEP:
                finding = _update(held, updates, reduced, h, word, m)
            else:
                finding = OK
            if finding == STUCK:
                break
            if finding != OK:
                return finding, rank, -1
            at[rank] += 1
    for rank in range(ranks):
        if at[rank] < starts[rank + 1]:
            return STUCK, rank, -1
    return _left_over(wiring, done, updates, slots, book, opened)


@njit(cache=True)
def _new_book(codes: Any, starts: Any) -> Any:
    """Per rank: first of its receives that may be open at once, how many are, and whether it is in the queue."""
    ranks = len(starts) - 1
    book = np.zeros((ranks + 1, 3), np.int64)
    for rank in range(ranks):
        count = 0
        for i in range(starts[rank], starts[rank + 1]):
            if codes[i, 0] in (_RECV_F, _RECV_B, _LOCAL_F, _LOCAL_B):
                count += 1
        book[rank + 1, _OPEN_FIRST] = book[rank, _OPEN_FIRST] + count
        book[rank, _QUEUED] = 1
    return book


@njit(cache=True, inline="always")
def _wake(queue: Any, cursor: Any, book: Any, rank: int) -> None:
    if not book[rank, _QUEUED]:
        book[rank, _QUEUED] = 1
        queue[cursor[1] % len(queue)] = rank
        cursor[1] += 1


@njit(cache=True, inline="always")
def _compute(held: Any, done: Any, h: int, kind: int, m: int) -> int:
    """Whether an operation may run on its rank: own micro-batch, once, after what precedes it."""
    first = held[h, HELD_FIRST]
    if m < first or m >= held[h, HELD_STOP] or (m - first) % held[h, HELD_STEP_BY] != 0:
        return NOT_OWN
    before = done[h, m]
    if before & (1 << kind) or (kind != _W and before & _HALVES):
        return TWICE
    if (kind != _F and not before & (1 << _F)) or (kind == _W and not before & (1 << _I)):
        return TOO_EARLY
    return OK


@njit(cache=True)
def _use(
    ends: Any,
    slots: Any,
    book: Any,
    opened: Any,
    waiting: Any,
    rank: int,
    stage: int,
    direction: int,
    m: int,
    expected: int,
) -> int:
    """Take what was received for a micro-batch, once all of it has been sent."""
    first = book[rank, _OPEN_FIRST]
    stop = first + book[rank, _OPEN_COUNT]
    found = 0
    waiting[rank] = -1
    for k in range(first, stop):
        end = opened[k, 0]
        if opened[k, 1] == m and ends[end, END_STAGE] == stage and ends[end, END_DIRECTION] == direction:
            if not slots[_slot(ends, end, m)] & _SENT:
                waiting[rank] = end
                return STUCK
            found += 1
    if found != expected:
        return NOT_RECEIVED
    k = first
    while found > 0:
        end = opened[k, 0]
        if opened[k, 1] == m and ends[end, END_STAGE] == stage and ends[end, END_DIRECTION] == direction:
            found -= 1
            stop -= 1
            opened[k, 0] = opened[stop, 0]
            opened[k, 1] = opened[stop, 1]
        else:
            k += 1
    book[rank, _OPEN_COUNT] = stop - first
    return OK


@njit(cache=True, inline="always")
def _fits(ends: Any, end: int, word: int, stage: int) -> Any:
    """Whether an end is of the stage, direction and side that a word means."""
    within = word in (_LOCAL_F, _LOCAL_B)
    sends = within or word in (_SEND_F, _SEND_B)
    direction = 0 if word in (_SEND_F, _RECV_F, _LOCAL_F) else 1
    return (
        ends[end, END_STAGE] == stage
        and ends[end, END_DIRECTION] == direction
        and ends[end, END_SENDS] == (1 if sends else 0)
        and ends[end, END_WITHIN] == (1 if within else 0)
    )


@njit(cache=True, inline="always")
def _exchange(ends: Any, slots: Any, done: Any, book: Any, opened: Any, rank: int, h: int, end: int, m: int) -> int:
    """Send, or post a receive, or hand over within the rank, which is both at once."""
    slot = _slot(ends, end, m)
    if slots[slot] & (_SENT if ends[end, END_SENDS] else _POSTED):
        return TWICE
    if not ends[end, END_SENDS]:
        slots[slot] |= _POSTED
        _open(book, opened, rank, end, m)
        return OK
    if not done[h, m] & ((1 << _F) if ends[end, END_DIRECTION] == 0 else _HALVES):
        return TOO_EARLY
    slots[slot] |= _SENT
    if ends[end, END_WITHIN]:
        slots[slot] |= _POSTED
        _open(book, opened, rank, ends[end, END_PARTNER], m)
    return OK


@njit(cache=True, inline="always")
def _open(book: Any, opened: Any, rank: int, end: int, m: int) -> None:
    k = book[rank, _OPEN_FIRST] + book[rank, _OPEN_COUNT]
    opened[k, 0] = end
    opened[k, 1] = m
    book[rank, _OPEN_COUNT] += 1


@njit(cache=True, inline="always")
def _in_order(ends: Any, slots: Any, sequence: Any, counts: Any, end: int, m: int) -> Any:
    """Count a message of a pair; whether the other side, if it was first, counted it the same."""
    slot, pair = _slot(ends, end, m), ends[end, END_PAIR]
    side = 0 if ends[end, END_SENDS] else 1
    number = counts[pair, side]
    counts[pair, side] += 1
    if slots[slot] != _SENT | _POSTED:
        sequence[slot] = number
        return True
    same = sequence[slot] == number
    sequence[slot] = min(sequence[slot], number)
    return same


@njit(cache=True)
def _update(held: Any, updates: Any, reduced: Any, h: int, word: int, bucket: int) -> int:
    first, missing = held[h, HELD_BUCKET], held[h, HELD_OWN] - updates[h, 0]
    if word == _STEP:
        if updates[h, 1] or bucket != 0:
            return TWICE if bucket == 0 else BAD_BUCKET
        if missing > 0:
            return TOO_EARLY
        updates[h, 1] = 1
        for k in range(first, first + held[h, HELD_NUM_BUCKETS]):
            if reduced[k] != 2:
                return BAD_BUCKET
        return OK
    if bucket >= held[h, HELD_NUM_BUCKETS] or reduced[first + bucket] != (0 if word == _REDUCE else 1):
        return BAD_BUCKET
    if missing > (1 if word == _REDUCE else 0):
        return TOO_EARLY
    reduced[first + bucket] += 1
    return OK


@njit(cache=True)
def _left_over(wiring: Wiring, done: Any, updates: Any, slots: Any, book: Any, opened: Any) -> tuple[int, int, int]:
    """What is missing when all programs have ended."""
    held, ends = wiring.held, wiring.ends
    for h in range(len(held)):
        for m in range(held[h, HELD_FIRST], held[h, HELD_STOP], held[h, HELD_STEP_BY]):
            if not done[h, m] & (1 << _F) or not done[h, m] & ((1 << _B) | (1 << _W)):
                return NEVER_RUN, h, m
        if not updates[h, 1]:
            return NEVER_STEPPED, h, -1
    for rank in range(len(book) - 1):
        if book[rank, _OPEN_COUNT] > 0:
            return NEVER_USED, rank, opened[book[rank, _OPEN_FIRST], 0]
    for end in range(len(ends)):
        if ends[end, END_SENDS]:
            for m in range(ends[end, END_TURN], wiring.num_micro_batches, ends[end, END_MODULUS]):
                if slots[_slot(ends, end, m)] == _SENT:
                    return NEVER_POSTED, end, m
    return OK, -1, -1

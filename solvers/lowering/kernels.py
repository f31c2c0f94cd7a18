"""Inner loops of the lowering: where each message goes in a rank's program, and whether all programs come to an end.

Instructions are rows of an int32 array: word (index in ``WORDS``), stage, micro-batch, channel. Stages held by ranks,
the channels of all ranks ("ends") and the buckets of all stages are numbered through. The two ends of an exchange
share *slots*, one for each of its micro-batches. A *seat* is one rank's part in what several ranks do together: a
bucket, a tie, or the norm.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from penstock.schemas.program import KINDS, LOOK_AHEAD, WORDS

_F, _B, _I, _W, _R = range(len(KINDS))
_SEND_F, _RECV_F, _SEND_B, _RECV_B, _LOCAL_F, _LOCAL_B = (
    WORDS.index(word) for word in ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "LOCAL_F", "LOCAL_B")
)
_REDUCE, _WAIT_REDUCE, _REDUCE_SHARED, _NORM, _WAIT_NORM, _STEP, _VERSION = (
    WORDS.index(word) for word in ("REDUCE", "WAIT_REDUCE", "REDUCE_SHARED", "NORM", "WAIT_NORM", "STEP", "VERSION")
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
    MIXED,
    BAD_VERSION,
) = range(16)
"""What ``advance`` can find."""


class Wiring(NamedTuple):
    """What does not change: R ranks, S stages, H held stages, E ends, B buckets, T ties, up to two row classes; int64.

    ``held_of`` (R, S): held stage or -1. ``first`` (R + 1, 2): bounds of each rank's held stages, and ends.
    ``held`` (H, 15): rank, stage; own micro-batches as a range (first, stop, step) and their number; how many messages
    one receives forward in class 0 and 1, backward in class 0 and 1; first bucket, number of buckets; the pipeline's
    first micro-batch, micro-batches per step, versions.
    ``ends`` (E, 12): rank, stage, direction (0 forward), 1 if it sends, 1 if within the rank, turn and modulus (its
    micro-batches m have m mod modulus = turn), first slot, rows in class 0, rows in class 1, the other end, number of
    the pair (sending rank, receiving rank).
    ``lists`` (4 H + 1): bounds in ``members`` (ends) of what a held stage receives forward, sends forward, receives
    backward, sends backward.
    ``sources`` (B + 1): bounds in ``source_held`` of the held stages that add to a bucket's gradients.
    ``table`` (B + R T + R): of each seat (buckets; ties of each rank; the norm of each rank) what it is part of, or -1
    where it is not taken. ``bounds``: of each such thing its seats in ``seats``. ``seat_rank``: whose a seat is.
    ``num_micro_batches``: of all global batches, ``per_batch`` of one, ``first_class`` of its first row class.
    """

    held_of: np.ndarray
    first: np.ndarray
    held: np.ndarray
    ends: np.ndarray
    lists: np.ndarray
    members: np.ndarray
    sources: np.ndarray
    source_held: np.ndarray
    table: np.ndarray
    bounds: np.ndarray
    seats: np.ndarray
    seat_rank: np.ndarray
    num_slots: int
    num_pairs: int
    num_micro_batches: int
    per_batch: int
    first_class: int


HELD_FIRST, HELD_STOP, HELD_STEP_BY, HELD_OWN, HELD_EXPECTED, HELD_BUCKET, HELD_NUM_BUCKETS = 2, 3, 4, 5, 6, 10, 11
HELD_BASE, HELD_EVERY, HELD_VERSIONS = 12, 13, 14
HELD_COLUMNS = 15
END_RANK, END_STAGE, END_DIRECTION, END_SENDS, END_WITHIN, END_TURN, END_MODULUS, END_SLOT, END_ROWS = range(9)
END_PARTNER, END_PAIR = 10, 11
_OPEN_FIRST, _OPEN_COUNT, _QUEUED = range(3)
SEAT = -2
"""A rank that waits at seat i has ``SEAT - i`` in ``waiting``."""


@njit(cache=True)
def emit(wiring: Wiring, rank: int, operations: Any, updates: Any, out: Any) -> int:
    """Write the program of a rank that runs ``operations`` (n, 3); returns how many instructions it has.

    ``updates`` (k, 4), by position: word, stage and number of what stands right before the operation at ``position``
    (n: at the end). With an empty ``out`` it only counts.
    """
    held_of, ends, lists, members = wiring.held_of[rank], wiring.ends, wiring.lists, wiring.members
    base, channel_0 = wiring.first[rank, 0], wiring.first[rank, 1]
    per_batch, first_class = wiring.per_batch, wiring.first_class
    post = _posts(held_of, operations, base, wiring.first[rank + 1, 0] - base)
    n = len(operations)
    count, u = 0, 0
    for p in range(n):
        for i in range(p, min(p + LOOK_AHEAD + 1, n)):
            if post[i] == p:
                stage, m = operations[i, 1], operations[i, 2]
                at = 4 * held_of[stage] + (0 if operations[i, 0] == _F else 2)
                word = _RECV_F if operations[i, 0] == _F else _RECV_B
                for k in range(lists[at], lists[at + 1]):
                    end = members[k]
                    if ends[end, END_WITHIN] == 0 and _carries(ends, end, m, per_batch, first_class):
                        count = _put(word, stage, m, end - channel_0, count, out)
        while u < len(updates) and updates[u, 0] <= p:
            count = _put(updates[u, 1], updates[u, 2], updates[u, 3], -1, count, out)
            u += 1
        kind, stage, m = operations[p, 0], operations[p, 1], operations[p, 2]
        count = _put(kind, stage, m, -1, count, out)
        if kind <= _I:
            at = 4 * held_of[stage] + (1 if kind == _F else 3)
            for k in range(lists[at], lists[at + 1]):
                end = members[k]
                if _carries(ends, end, m, per_batch, first_class):
                    within = ends[end, END_WITHIN] == 1
                    word = (_LOCAL_F if within else _SEND_F) if kind == _F else _LOCAL_B if within else _SEND_B
                    count = _put(word, stage, m, end - channel_0, count, out)
    for i in range(u, len(updates)):
        count = _put(updates[i, 1], updates[i, 2], updates[i, 3], -1, count, out)
    return count


@njit(cache=True)
def _posts(held_of: Any, operations: Any, base: int, num_held: int) -> Any:
    """Before which operation each one's receives are posted; -1: it has none."""
    n = len(operations)
    post = np.full(n, -1, np.int64)
    previous = np.full((num_held, 2), -1, np.int64)
    for i in range(n):
        kind, h = operations[i, 0], held_of[operations[i, 1]] - base
        if kind <= _I:
            direction = 0 if kind == _F else 1
            post[i] = max(previous[h, direction], i - LOOK_AHEAD, 0)
            previous[h, direction] = i
    return post


@njit(cache=True, inline="always")
def _put(word: int, stage: int, number: int, channel: int, count: int, out: Any) -> int:
    if len(out):
        out[count, 0] = word
        out[count, 1] = stage
        out[count, 2] = number
        out[count, 3] = channel
    return count + 1


@njit(cache=True, inline="always")
def _carries(ends: Any, end: int, m: int, per_batch: int, first_class: int) -> Any:
    """Whether an end exchanges anything of micro-batch ``m``."""
    if ends[end, END_ROWS + (1 if m % per_batch >= first_class else 0)] == 0:
        return False
    return ends[end, END_MODULUS] == 1 or m % ends[end, END_MODULUS] == ends[end, END_TURN]


@njit(cache=True, inline="always")
def _slot(ends: Any, end: int, m: int) -> Any:
    return ends[end, END_SLOT] + (m if ends[end, END_MODULUS] == 1 else m // ends[end, END_MODULUS])


@njit(cache=True)
def advance(
    wiring: Wiring, codes: Any, starts: Any, rendezvous: bool, ordered: bool, at: Any, waiting: Any, taken: Any
) -> tuple[int, int, int]:
    """Run all programs: ``codes`` (N, 4), rank r's from ``starts[r]`` on. Returns (finding, where, detail).

    A receive is posted without waiting; F, B and I wait for the messages of theirs to be sent. Under ``rendezvous`` a
    send waits until its receive is posted. ``ordered``: the n-th message from one rank to another is the n-th receive.
    ``at`` (R) tells where each rank stopped, ``waiting`` (R) for which of its ends, or at which seat, or -1; ``taken``
    (seats) how often each seat was taken.
    """
    held_of, held, ends = wiring.held_of, wiring.held, wiring.ends
    per_batch, first_class = wiring.per_batch, wiring.first_class
    ranks, num_stages = held_of.shape
    done = np.zeros((len(held), wiring.num_micro_batches), np.uint8)
    made = np.zeros((len(held), 2), np.int64)
    reduced = np.zeros(len(wiring.sources), np.uint8)
    left = np.zeros(len(taken), np.int64)
    slots = np.zeros(wiring.num_slots, np.uint8)
    sequence = np.zeros(wiring.num_slots if ordered else 0, np.int32)
    counts = np.zeros((wiring.num_pairs, 2), np.int64)
    queue, cursor = np.arange(ranks), np.array([0, ranks])
    book = _new_book(codes, starts)
    opened = np.empty((book[ranks, _OPEN_FIRST], 2), np.int32)
    at[:] = starts[:-1]
    waiting[:] = -1
    taken[:] = 0
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
                finding = _compute(held, done, made, h, word, m)
                if finding == OK and word <= _I:
                    direction = 0 if word == _F else 1
                    expected = held[h, HELD_EXPECTED + 2 * direction + (1 if m % per_batch >= first_class else 0)]
                    finding = _use(ends, slots, book, opened, waiting, rank, stage, direction, m, expected)
                if finding == OK:
                    done[h, m] |= 1 << word
                    made[h, 0] += 1 if word in (_B, _W) else 0
            elif word <= _LOCAL_B:
                end = channel_0 + codes[i, 3]
                inside = channel_0 <= end < channels and m < wiring.num_micro_batches
                if (
                    not inside
                    or not _fits(ends, end, word, stage)
                    or not _carries(ends, end, m, per_batch, first_class)
                ):
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
            elif word in (_REDUCE, _WAIT_REDUCE, _STEP, _VERSION):
                finding = _update(wiring, made, reduced, h, word, m)
                if finding == OK and word in (_REDUCE, _WAIT_REDUCE):
                    seat = held[h, HELD_BUCKET] + m
                    finding = _meet(
                        wiring, taken, left, queue, cursor, book, waiting, rank, seat, word == _REDUCE, word != _REDUCE
                    )
                    if finding == OK:
                        reduced[seat] += 1
            elif word in (_REDUCE_SHARED, _NORM, _WAIT_NORM):
                seat = _seat(wiring, rank, word, m)
                if seat < 0:
                    return BAD_BUCKET, rank, -1
                takes = word != _WAIT_NORM and waiting[rank] != SEAT - seat
                finding = _meet(wiring, taken, left, queue, cursor, book, waiting, rank, seat, takes, word != _NORM)
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
    return _left_over(wiring, done, made, slots, book, opened)


@njit(cache=True)
def _seat(wiring: Wiring, rank: int, word: int, number: int) -> int:
    """The rank's seat at a tie or at the norm; -1 where it has none."""
    num_buckets, ranks = len(wiring.sources) - 1, len(wiring.held_of)
    ties = (len(wiring.table) - num_buckets) // ranks - 1
    if word == _REDUCE_SHARED and number >= ties:
        return -1
    seat = num_buckets + (rank * ties + number if word == _REDUCE_SHARED else ranks * ties + rank)
    return seat if wiring.table[seat] >= 0 else -1


@njit(cache=True)
def _meet(
    wiring: Wiring,
    taken: Any,
    left: Any,
    queue: Any,
    cursor: Any,
    book: Any,
    waiting: Any,
    rank: int,
    seat: int,
    takes: bool,
    waits: bool,
) -> int:
    """Take a seat, wait until all seats of the same thing have been taken as often, or both."""
    table, bounds, seats, seat_rank = wiring.table, wiring.bounds, wiring.seats, wiring.seat_rank
    low, high = bounds[table[seat]], bounds[table[seat] + 1]
    if takes:
        taken[seat] += 1
        for k in range(low, high):
            other = seat_rank[seats[k]]
            if waiting[other] == SEAT - seats[k]:
                _wake(queue, cursor, book, other)
    waiting[rank] = -1
    if waits:
        if taken[seat] <= left[seat]:
            return TOO_EARLY
        for k in range(low, high):
            if taken[seats[k]] <= left[seat]:
                waiting[rank] = SEAT - seat
                return STUCK
        left[seat] += 1
    return OK


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
def _compute(held: Any, done: Any, made: Any, h: int, kind: int, m: int) -> int:
    """Whether an operation may run on its rank: own micro-batch, once, after what precedes it, in its round."""
    first = held[h, HELD_FIRST]
    if m < first or m >= held[h, HELD_STOP] or (m - first) % held[h, HELD_STEP_BY] != 0:
        return NOT_OWN
    before = done[h, m]
    if before & (1 << kind) or (kind != _W and before & _HALVES):
        return TWICE
    if (kind != _F and not before & (1 << _F)) or (kind == _W and not before & (1 << _I)):
        return TOO_EARLY
    steps = held[h, HELD_NUM_BUCKETS] > 0
    if steps and kind in (_B, _W) and (m - held[h, HELD_BASE]) // held[h, HELD_EVERY] != made[h, 1]:
        return MIXED
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
def _missing(wiring: Wiring, made: Any, bucket: int, rounds: int) -> int:
    """How many backwards a bucket lacks until it has the gradients of so many rounds."""
    held, missing = wiring.held, 0
    for k in range(wiring.sources[bucket], wiring.sources[bucket + 1]):
        h = wiring.source_held[k]
        own = rounds * held[h, HELD_EVERY] - (held[h, HELD_FIRST] - held[h, HELD_BASE])
        missing += max(0, -(-own // held[h, HELD_STEP_BY]) - made[h, 0])
    return missing


@njit(cache=True)
def _update(wiring: Wiring, made: Any, reduced: Any, h: int, word: int, number: int) -> int:
    """Whether a bucket may be reduced or waited for, a stage step, a version be named; a step is counted."""
    held = wiring.held
    first, stop = held[h, HELD_BUCKET], held[h, HELD_BUCKET] + held[h, HELD_NUM_BUCKETS]
    if word == _VERSION:
        return OK if number < held[h, HELD_VERSIONS] else BAD_VERSION
    if word == _STEP:
        if number != 0 or first == stop:
            return BAD_BUCKET
        if made[h, 1] * held[h, HELD_EVERY] >= held[h, HELD_STOP] - held[h, HELD_BASE]:
            return TWICE
        for k in range(first, stop):
            if _missing(wiring, made, k, made[h, 1] + 1) > 0:
                return TOO_EARLY
        for k in range(first, stop):
            if wiring.table[k] >= 0 and reduced[k] != 2:
                return BAD_BUCKET
            reduced[k] = 0
        made[h, 1] += 1
        return OK
    bucket = first + number
    if bucket >= stop or wiring.table[bucket] < 0 or reduced[bucket] != (0 if word == _REDUCE else 1):
        return BAD_BUCKET
    return TOO_EARLY if _missing(wiring, made, bucket, made[h, 1] + 1) > (1 if word == _REDUCE else 0) else OK


@njit(cache=True)
def _left_over(wiring: Wiring, done: Any, made: Any, slots: Any, book: Any, opened: Any) -> tuple[int, int, int]:
    """What is missing when all programs have ended."""
    held, ends = wiring.held, wiring.ends
    for h in range(len(held)):
        for m in range(held[h, HELD_FIRST], held[h, HELD_STOP], held[h, HELD_STEP_BY]):
            if not done[h, m] & (1 << _F) or not done[h, m] & ((1 << _B) | (1 << _W)):
                return NEVER_RUN, h, m
        lacks = made[h, 1] * held[h, HELD_EVERY] < held[h, HELD_STOP] - held[h, HELD_BASE]
        if lacks and held[h, HELD_NUM_BUCKETS] > 0:
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

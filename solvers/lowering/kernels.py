"""Inner loops of the lowering: where each message goes in a rank's program, and whether all programs come to an end.

Instructions are rows of an int32 array: word (index in ``WORDS``), stage, micro-batch, channel. The *replicas* (one
stage on one rank), the channels of all ranks (*ends*) and the buckets of all stages have consecutive numbers. The two
ends of an exchange share *slots*, one for each of its micro-batches. A *participant* is one rank in one collective: a
bucket, a tie, or the norm.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from penstock.schemas.program import KINDS, LOOK_AHEAD, WORDS
from penstock.solvers.compiled.decorators import compiled, inner, loop

_F, _B, _I, _W, _R = range(len(KINDS))
_SEND_F, _RECV_F, _SEND_B, _RECV_B, _LOCAL_F, _LOCAL_B = (
    WORDS.index(word) for word in ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "LOCAL_F", "LOCAL_B")
)
_REDUCE, _WAIT_REDUCE, _REDUCE_SHARED, _NORM, _WAIT_NORM, _STEP, _VERSION = (
    WORDS.index(word) for word in ("REDUCE", "WAIT_REDUCE", "REDUCE_SHARED", "NORM", "WAIT_NORM", "STEP", "VERSION")
)
_UNSHARD, _RESHARD = WORDS.index("UNSHARD"), WORDS.index("RESHARD")
_SENT, _POSTED = 1, 2
_WHOLE, _FREED = 1, 2
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
    NOT_WHOLE,
) = range(17)
"""Results of ``advance``."""


class Wiring(NamedTuple):
    """The constant arrays, int64: R ranks, S stages, H replicas, E ends, B buckets, T ties, up to two row classes.

    ``held_of`` (R, S): replica or -1. ``first`` (R + 1, 2): bounds of each rank's replicas, and ends.
    ``replicas`` (H, 16) has these columns:

    * rank, stage;
    * its micro-batches as a range (first, stop, step), and their number;
    * the number of messages that a micro-batch receives: forward in class 0 and 1, backward in class 0 and 1;
    * first bucket, number of buckets;
    * the pipeline's first micro-batch, micro-batches per step, versions;
    * the number of buckets with layers of its stage that are gathered once a step.

    ``ends`` (E, 12): rank, stage, direction (0 forward), 1 if it sends, 1 if within the rank, turn and modulus (its
    micro-batches m have m mod modulus = turn), first slot, rows in class 0, rows in class 1, the other end, number of
    the pair (sending rank, receiving rank).
    ``lists`` (4 H + 1): bounds in ``members`` of the ends over which a replica receives forward, sends forward,
    receives backward, sends backward.
    ``sources`` (B + 1): bounds in ``source_held`` of the replicas that add to a bucket's gradients.
    ``table`` (B + R T + R): the collective of each participant (buckets, then each rank's ties, then each rank's norm),
    or -1 where the rank takes no part. ``bounds``: each collective's range in ``participants``.
    ``participant_rank``: the rank of each participant.
    ``num_micro_batches``: in all global batches. ``per_batch``: in one, ``first_class``: in its first row class.
    """

    held_of: np.ndarray
    first: np.ndarray
    replicas: np.ndarray
    ends: np.ndarray
    lists: np.ndarray
    members: np.ndarray
    sources: np.ndarray
    source_held: np.ndarray
    table: np.ndarray
    bounds: np.ndarray
    participants: np.ndarray
    participant_rank: np.ndarray
    num_slots: int
    num_pairs: int
    num_micro_batches: int
    per_batch: int
    first_class: int


HELD_FIRST, HELD_STOP, HELD_STEP_BY, HELD_OWN, HELD_EXPECTED, HELD_BUCKET, HELD_NUM_BUCKETS = 2, 3, 4, 5, 6, 10, 11
HELD_BASE, HELD_EVERY, HELD_VERSIONS, HELD_GATHERED = 12, 13, 14, 15
HELD_COLUMNS = 16
END_RANK, END_STAGE, END_DIRECTION, END_SENDS, END_WITHIN, END_TURN, END_MODULUS, END_SLOT, END_ROWS = range(9)
END_PARTNER, END_PAIR = 10, 11
_OPEN_FIRST, _OPEN_COUNT, _QUEUED = range(3)
PARTICIPANT = -2
"""A rank that waits as participant i has ``PARTICIPANT - i`` in ``waiting``."""


@compiled
def emit(wiring: Wiring, rank: int, operations: Any, updates: Any, out: Any) -> int:
    """Write the program of a rank that runs ``operations`` (n, 3); return how many instructions it has.

    ``updates`` (k, 4), by position: word, stage and number of the instruction right before the operation at
    ``position`` (n: at the end). With an empty ``out`` it only counts.
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


@compiled
def _posts(held_of: Any, operations: Any, base: int, num_held: int) -> Any:
    """Return the operation before which each operation's receives are posted; -1: no receives."""
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


@inner
def _put(word: int, stage: int, number: int, channel: int, count: int, out: Any) -> int:
    if len(out):
        out[count, 0] = word
        out[count, 1] = stage
        out[count, 2] = number
        out[count, 3] = channel
    return count + 1


@inner
def _carries(ends: Any, end: int, m: int, per_batch: int, first_class: int) -> Any:
    """Return whether an end exchanges rows of micro-batch ``m``."""
    if ends[end, END_ROWS + (1 if m % per_batch >= first_class else 0)] == 0:
        return False
    return ends[end, END_MODULUS] == 1 or m % ends[end, END_MODULUS] == ends[end, END_TURN]


@inner
def _slot(ends: Any, end: int, m: int) -> Any:
    return ends[end, END_SLOT] + (m if ends[end, END_MODULUS] == 1 else m // ends[end, END_MODULUS])


class ProgramState(NamedTuple):
    """The state of all programs; R ranks, H replicas, participants as in ``Wiring``.

    ``at`` (R,): the next instruction. ``waiting`` (R,): the end, or the participant, as which a rank waits, or -1.
    ``joined`` and ``left``: how often each participant has joined and left its collective. ``done`` (H, M): a bit for
    each operation that ran. ``progress`` (H, 3): the numbers of backwards, of steps, and of its gathered buckets.
    ``reduced``: 1 if a bucket's reduction has begun, 2 if it is over. ``whole``: 1 if a bucket's parameters are
    gathered, 2 if they are released again. ``slots``: bits for sent and posted. ``sequence``: the number of each
    message in its pair; ``counts`` (pairs, 2): the messages on both sides. ``queue``: ranks, in the range ``cursor``.
    ``book`` (R + 1, 3): first place of a rank's open receives, their number, whether the rank is in the queue;
    ``opened``: the open receives' ends and micro-batches.
    """

    at: np.ndarray
    waiting: np.ndarray
    joined: np.ndarray
    left: np.ndarray
    done: np.ndarray
    progress: np.ndarray
    reduced: np.ndarray
    whole: np.ndarray
    slots: np.ndarray
    sequence: np.ndarray
    counts: np.ndarray
    queue: np.ndarray
    cursor: np.ndarray
    book: np.ndarray
    opened: np.ndarray
    rendezvous: bool
    ordered: bool


@compiled
def advance(
    wiring: Wiring, codes: Any, starts: Any, rendezvous: bool, ordered: bool, at: Any, waiting: Any, joined: Any
) -> tuple[int, int, int]:
    """Run all programs: ``codes`` (N, 4), rank r's from ``starts[r]`` on. Returns (finding, where, detail).

    A receive is posted without waiting; F, B and I wait until their messages are sent. Under ``rendezvous`` a send
    waits until its receive is posted. ``ordered``: the n-th message from one rank to another is the n-th receive.
    On return ``at`` (R) has where each rank stopped, ``waiting`` (R) the end, or the participant, as which it waits, or
    -1, and ``joined`` how often each participant has joined its collective.
    """
    ranks, num_held = len(wiring.held_of), len(wiring.replicas)
    book = _new_book(codes, starts)
    at[:] = starts[:-1]
    waiting[:] = -1
    joined[:] = 0
    run = ProgramState(
        at,
        waiting,
        joined,
        np.zeros(len(joined), np.int64),
        np.zeros((num_held, wiring.num_micro_batches), np.uint8),
        np.zeros((num_held, 3), np.int64),
        np.zeros(len(wiring.sources), np.uint8),
        np.zeros(len(wiring.sources), np.uint8),
        np.zeros(wiring.num_slots, np.uint8),
        np.zeros(wiring.num_slots if ordered else 0, np.int32),
        np.zeros((wiring.num_pairs, 2), np.int64),
        np.arange(ranks),
        np.array([0, ranks]),
        book,
        np.empty((book[ranks, _OPEN_FIRST], 2), np.int32),
        rendezvous,
        ordered,
    )
    return _run(wiring, codes, starts, run)


@loop
def _run(wiring: Wiring, codes: Any, starts: Any, run: ProgramState) -> tuple[int, int, int]:
    """Run instructions, and go on with another rank where one has to wait."""
    ranks = len(wiring.held_of)
    while run.cursor[0] != run.cursor[1]:
        rank = run.queue[run.cursor[0] % ranks]
        run.cursor[0] += 1
        run.book[rank, _QUEUED] = 0
        while run.at[rank] < starts[rank + 1]:
            i = run.at[rank]
            finding = _instruction(wiring, run, rank, codes[i, 0], codes[i, 1], codes[i, 2], codes[i, 3])
            if finding == STUCK:
                break
            if finding == OUT_OF_ORDER:
                end = wiring.first[rank, 1] + codes[i, 3]
                return finding, rank, run.sequence[_slot(wiring.ends, end, codes[i, 2])]
            if finding != OK:
                return finding, rank, -1
            run.at[rank] += 1
    for rank in range(ranks):
        if run.at[rank] < starts[rank + 1]:
            return STUCK, rank, -1
    return _left_over(wiring, run)


@inner
def _instruction(wiring: Wiring, run: ProgramState, rank: int, word: int, stage: int, number: int, channel: int) -> int:
    """Run the next instruction of a rank; return OK, STUCK where it has to wait, or its fault."""
    if stage >= wiring.held_of.shape[1] or wiring.held_of[rank, stage] < 0:
        return NOT_HELD
    h = wiring.held_of[rank, stage]
    if _R < word <= _LOCAL_B:
        return _exchange_word(wiring, run, rank, h, word, stage, number, channel)
    if channel != -1:
        return BAD_CHANNEL
    if word <= _R:
        return _compute_word(wiring, run, rank, h, word, stage, number)
    if word in (_REDUCE, _WAIT_REDUCE):
        return _reduce_word(wiring, run, rank, h, word, number)
    if word in (_UNSHARD, _RESHARD):
        return _shard_word(wiring, run, rank, h, word, number)
    if word in (_REDUCE_SHARED, _NORM, _WAIT_NORM):
        return _collective_word(wiring, run, rank, word, number)
    if word == _STEP:
        return _step_word(wiring, run, h, number)
    if word == _VERSION:
        return OK if number < wiring.replicas[h, HELD_VERSIONS] else BAD_VERSION
    return OK


@inner
def _compute_word(wiring: Wiring, run: ProgramState, rank: int, h: int, kind: int, stage: int, m: int) -> int:
    """Run an operation: of the replica's micro-batch, once, after its predecessors, in its round, with its inputs."""
    replicas = wiring.replicas
    first = replicas[h, HELD_FIRST]
    if m < first or m >= replicas[h, HELD_STOP] or (m - first) % replicas[h, HELD_STEP_BY] != 0:
        return NOT_OWN
    before = run.done[h, m]
    if before & (1 << kind) or (kind != _W and before & _HALVES):
        return TWICE
    if (kind != _F and not before & (1 << _F)) or (kind == _W and not before & (1 << _I)):
        return TOO_EARLY
    if run.progress[h, 2] != replicas[h, HELD_GATHERED]:
        return NOT_WHOLE
    steps = replicas[h, HELD_NUM_BUCKETS] > 0
    if steps and kind in (_B, _W) and (m - replicas[h, HELD_BASE]) // replicas[h, HELD_EVERY] != run.progress[h, 1]:
        return MIXED
    if kind <= _I:
        finding = _use(wiring, run, rank, h, stage, 0 if kind == _F else 1, m)
        if finding != OK:
            return finding
    run.done[h, m] |= 1 << kind
    run.progress[h, 0] += 1 if kind in (_B, _W) else 0
    return OK


@inner
def _use(wiring: Wiring, run: ProgramState, rank: int, h: int, stage: int, direction: int, m: int) -> int:
    """Take the messages of a micro-batch, once all of them have been sent."""
    ends, book, opened = wiring.ends, run.book, run.opened
    row_class = 1 if m % wiring.per_batch >= wiring.first_class else 0
    first = book[rank, _OPEN_FIRST]
    stop = first + book[rank, _OPEN_COUNT]
    count = 0
    run.waiting[rank] = -1
    for k in range(first, stop):
        end = opened[k, 0]
        if opened[k, 1] == m and ends[end, END_STAGE] == stage and ends[end, END_DIRECTION] == direction:
            if not run.slots[_slot(ends, end, m)] & _SENT:
                run.waiting[rank] = end
                return STUCK
            count += 1
    if count != wiring.replicas[h, HELD_EXPECTED + 2 * direction + row_class]:
        return NOT_RECEIVED
    k = first
    while count > 0:
        end = opened[k, 0]
        if opened[k, 1] == m and ends[end, END_STAGE] == stage and ends[end, END_DIRECTION] == direction:
            count -= 1
            stop -= 1
            opened[k, 0] = opened[stop, 0]
            opened[k, 1] = opened[stop, 1]
        else:
            k += 1
    book[rank, _OPEN_COUNT] = stop - first
    return OK


@inner
def _exchange_word(
    wiring: Wiring, run: ProgramState, rank: int, h: int, word: int, stage: int, m: int, channel: int
) -> int:
    """Run a send, which may have to wait for its receive to be posted, or post a receive, or do both within a rank."""
    ends, end = wiring.ends, wiring.first[rank, 1] + channel
    if end < wiring.first[rank, 1] or end >= wiring.first[rank + 1, 1] or m >= wiring.num_micro_batches:
        return BAD_CHANNEL
    if not _fits(ends, end, word, stage) or not _carries(ends, end, m, wiring.per_batch, wiring.first_class):
        return BAD_CHANNEL
    slot, partner = _slot(ends, end, m), ends[end, END_PARTNER]
    if run.waiting[rank] != end:
        finding = _exchange(wiring, run, rank, h, end, m)
        if finding != OK:
            return finding
        peer = ends[partner, END_RANK]
        if peer != rank:
            if run.ordered and not _in_order(wiring, run, end, m):
                return OUT_OF_ORDER
            if run.waiting[peer] == partner:
                _wake(run, peer)
    waits = run.rendezvous and ends[end, END_SENDS] == 1 and not run.slots[slot] & _POSTED
    run.waiting[rank] = end if waits else -1
    return STUCK if waits else OK


@inner
def _reduce_word(wiring: Wiring, run: ProgramState, rank: int, h: int, word: int, number: int) -> int:
    """Begin a bucket's reduction, after all of its backwards but perhaps the last, or wait for it."""
    bucket = wiring.replicas[h, HELD_BUCKET] + number
    begins = word == _REDUCE
    if number >= wiring.replicas[h, HELD_NUM_BUCKETS] or wiring.table[bucket] < 0:
        return BAD_BUCKET
    if run.reduced[bucket] != (0 if begins else 1):
        return BAD_BUCKET
    if begins and wiring.replicas[h, HELD_GATHERED] > 0 and run.whole[bucket] == 0:
        return NOT_WHOLE
    if _missing(wiring, run, bucket, run.progress[h, 1] + 1) > (1 if begins else 0):
        return TOO_EARLY
    finding = _meet(wiring, run, rank, bucket, begins, not begins)
    if finding == OK:
        run.reduced[bucket] += 1
    return finding


@inner
def _shard_word(wiring: Wiring, run: ProgramState, rank: int, h: int, word: int, number: int) -> int:
    """Gather a bucket's parameters, once a round, or release them, after all of its backwards."""
    bucket = wiring.replicas[h, HELD_BUCKET] + number
    if (
        number >= wiring.replicas[h, HELD_NUM_BUCKETS]
        or wiring.table[bucket] < 0
        or not wiring.replicas[h, HELD_GATHERED]
    ):
        return BAD_BUCKET
    begins = word == _UNSHARD
    if run.whole[bucket] != (0 if begins else _WHOLE):
        return BAD_BUCKET
    if begins:
        finding = _meet(wiring, run, rank, bucket, run.waiting[rank] != PARTICIPANT - bucket, True)
        if finding != OK:
            return finding
    elif _missing(wiring, run, bucket, run.progress[h, 1] + 1) > 0:
        return TOO_EARLY
    run.whole[bucket] = _WHOLE if begins else _FREED
    for k in range(wiring.sources[bucket], wiring.sources[bucket + 1]):
        run.progress[wiring.source_held[k], 2] += 1 if begins else -1
    return OK


@inner
def _step_word(wiring: Wiring, run: ProgramState, h: int, number: int) -> int:
    """Run a stage's optimizer step, once a round, after all of its backwards and buckets."""
    replicas = wiring.replicas
    first, stop = replicas[h, HELD_BUCKET], replicas[h, HELD_BUCKET] + replicas[h, HELD_NUM_BUCKETS]
    if number != 0 or first == stop:
        return BAD_BUCKET
    if run.progress[h, 1] * replicas[h, HELD_EVERY] >= replicas[h, HELD_STOP] - replicas[h, HELD_BASE]:
        return TWICE
    for k in range(first, stop):
        if _missing(wiring, run, k, run.progress[h, 1] + 1) > 0:
            return TOO_EARLY
    for k in range(first, stop):
        if wiring.table[k] >= 0 and run.reduced[k] != 2:
            return BAD_BUCKET
        if wiring.table[k] >= 0 and replicas[h, HELD_GATHERED] > 0 and run.whole[k] != _FREED:
            return BAD_BUCKET
        run.reduced[k] = 0
        run.whole[k] = 0
    run.progress[h, 1] += 1
    return OK


@inner
def _collective_word(wiring: Wiring, run: ProgramState, rank: int, word: int, number: int) -> int:
    """Let a rank join the sum of a tie or the norm, or wait for the norm."""
    num_buckets, ranks = len(wiring.sources) - 1, len(wiring.held_of)
    ties = (len(wiring.table) - num_buckets) // ranks - 1
    if word == _REDUCE_SHARED and number >= ties:
        return BAD_BUCKET
    participant = num_buckets + (rank * ties + number if word == _REDUCE_SHARED else ranks * ties + rank)
    if wiring.table[participant] < 0:
        return BAD_BUCKET
    takes = word != _WAIT_NORM and run.waiting[rank] != PARTICIPANT - participant
    return _meet(wiring, run, rank, participant, takes, word != _NORM)


@loop
def _meet(wiring: Wiring, run: ProgramState, rank: int, participant: int, takes: bool, waits: bool) -> int:
    """Join a collective, wait until all its participants have joined it as often, or both."""
    low, high = wiring.bounds[wiring.table[participant]], wiring.bounds[wiring.table[participant] + 1]
    if takes:
        run.joined[participant] += 1
        for k in range(low, high):
            other = wiring.participant_rank[wiring.participants[k]]
            if run.waiting[other] == PARTICIPANT - wiring.participants[k]:
                _wake(run, other)
    run.waiting[rank] = -1
    if waits:
        if run.joined[participant] <= run.left[participant]:
            return TOO_EARLY
        for k in range(low, high):
            if run.joined[wiring.participants[k]] <= run.left[participant]:
                run.waiting[rank] = PARTICIPANT - participant
                return STUCK
        run.left[participant] += 1
    return OK


@compiled
def _new_book(codes: Any, starts: Any) -> Any:
    """Return the initial ``ProgramState.book``: all ranks are in the queue."""
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


@inner
def _wake(run: ProgramState, rank: int) -> None:
    if not run.book[rank, _QUEUED]:
        run.book[rank, _QUEUED] = 1
        run.queue[run.cursor[1] % len(run.queue)] = rank
        run.cursor[1] += 1


@inner
def _fits(ends: Any, end: int, word: int, stage: int) -> Any:
    """Return whether an end has the stage, direction and side that a word needs."""
    within = word in (_LOCAL_F, _LOCAL_B)
    sends = within or word in (_SEND_F, _SEND_B)
    direction = 0 if word in (_SEND_F, _RECV_F, _LOCAL_F) else 1
    return (
        ends[end, END_STAGE] == stage
        and ends[end, END_DIRECTION] == direction
        and ends[end, END_SENDS] == (1 if sends else 0)
        and ends[end, END_WITHIN] == (1 if within else 0)
    )


@inner
def _exchange(wiring: Wiring, run: ProgramState, rank: int, h: int, end: int, m: int) -> int:
    """Send, or post a receive, or do both at once within the rank."""
    ends = wiring.ends
    slot = _slot(ends, end, m)
    if run.slots[slot] & (_SENT if ends[end, END_SENDS] else _POSTED):
        return TWICE
    if not ends[end, END_SENDS]:
        run.slots[slot] |= _POSTED
        _open(run, rank, end, m)
        return OK
    if not run.done[h, m] & ((1 << _F) if ends[end, END_DIRECTION] == 0 else _HALVES):
        return TOO_EARLY
    run.slots[slot] |= _SENT
    if ends[end, END_WITHIN]:
        run.slots[slot] |= _POSTED
        _open(run, rank, ends[end, END_PARTNER], m)
    return OK


@inner
def _open(run: ProgramState, rank: int, end: int, m: int) -> None:
    k = run.book[rank, _OPEN_FIRST] + run.book[rank, _OPEN_COUNT]
    run.opened[k, 0] = end
    run.opened[k, 1] = m
    run.book[rank, _OPEN_COUNT] += 1


@inner
def _in_order(wiring: Wiring, run: ProgramState, end: int, m: int) -> Any:
    """Count a message of a pair; return whether the other side, if it was first, gave it the same number."""
    slot, pair = _slot(wiring.ends, end, m), wiring.ends[end, END_PAIR]
    side = 0 if wiring.ends[end, END_SENDS] else 1
    number = run.counts[pair, side]
    run.counts[pair, side] += 1
    if run.slots[slot] != _SENT | _POSTED:
        run.sequence[slot] = number
        return True
    same = run.sequence[slot] == number
    run.sequence[slot] = min(run.sequence[slot], number)
    return same


@inner
def _missing(wiring: Wiring, run: ProgramState, bucket: int, rounds: int) -> int:
    """Return how many backwards a bucket lacks until it has the gradients of ``rounds`` rounds."""
    replicas, missing = wiring.replicas, 0
    for k in range(wiring.sources[bucket], wiring.sources[bucket + 1]):
        h = wiring.source_held[k]
        span = rounds * replicas[h, HELD_EVERY] - (replicas[h, HELD_FIRST] - replicas[h, HELD_BASE])
        missing += max(0, -(-span // replicas[h, HELD_STEP_BY]) - run.progress[h, 0])
    return missing


@loop
def _left_over(wiring: Wiring, run: ProgramState) -> tuple[int, int, int]:
    """Find an operation, step or receive that is missing when all programs have ended."""
    replicas, ends = wiring.replicas, wiring.ends
    for h in range(len(replicas)):
        for m in range(replicas[h, HELD_FIRST], replicas[h, HELD_STOP], replicas[h, HELD_STEP_BY]):
            if not run.done[h, m] & (1 << _F) or not run.done[h, m] & ((1 << _B) | (1 << _W)):
                return NEVER_RUN, h, m
        lacks = run.progress[h, 1] * replicas[h, HELD_EVERY] < replicas[h, HELD_STOP] - replicas[h, HELD_BASE]
        if lacks and replicas[h, HELD_NUM_BUCKETS] > 0:
            return NEVER_STEPPED, h, -1
    for rank in range(len(run.book) - 1):
        if run.book[rank, _OPEN_COUNT] > 0:
            return NEVER_USED, rank, run.opened[run.book[rank, _OPEN_FIRST], 0]
    for end in range(len(ends)):
        if ends[end, END_SENDS]:
            for m in range(ends[end, END_TURN], wiring.num_micro_batches, ends[end, END_MODULUS]):
                if run.slots[_slot(ends, end, m)] == _SENT:
                    return NEVER_POSTED, end, m
    return OK, -1, -1

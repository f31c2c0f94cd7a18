"""The exact search on a suffix of a pipeline: levels of partial schedules, only undominated ones kept (BOUNDS II, 1.5).

Giffler and Thompson's branching: of all operations that could come next, the one that would end first names the stage
or channel; next on it comes either that operation or another that could start before that end. After equally many
operations, of two states with the same counts one is dropped when none of its times is earlier. A state that cannot end
below the requested value is dropped too. The search is complete unless it runs out of room, and then proves nothing.

In the judge's model, a channel carries first the transfer that is ready first, so its next transfer is given. But a
stage may have to wait for the other kind although one is ready (``_decide``), because an earlier start may delay
something else.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.suffix.state_kernel import (
    BACKWARD_NEXT,
    EITHER,
    FORWARD_NEXT,
    JUDGED,
    SHARED,
    Line,
    Scratch,
    apply,
    ready_backward,
    ready_forward,
    ready_home,
    ready_out,
    settle,
)
from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.infinity import NEVER_NS

NONE, SUCCESS, STOPPED = 0, 1, 2
OUTCOME, VALUE, SPENT, BEST, LEVELS = range(5)


@Fields.register
class States(NamedTuple):
    """Two levels of up to W states, and the origin of every state.

    * ``counts`` (2 W, 5 S) and ``times`` (2 W, 3 S + ring).
    * Of a new level: ``dead``, ``key`` (a hash of the counts) and ``link`` (2 W,) in a table ``head``, ``stamp``.
    * ``parent``, ``action`` (H,) of all states in the order of making; ``begin`` (levels + 1,): where levels begin in
      them.
    """

    counts: np.ndarray
    times: np.ndarray
    key: np.ndarray
    dead: np.ndarray
    link: np.ndarray
    head: np.ndarray
    stamp: np.ndarray
    parent: np.ndarray
    action: np.ndarray
    begin: np.ndarray
    result: np.ndarray


@loop
def search(line: Line, states: States, scratch: Scratch, n: int, below: int, most: int) -> None:
    """Find the least end of n micro-batches on the line, if it is below ``below``; write it to ``states.result``.

    ``most``: how many states may be made. The outcome NONE is a proof that no schedule ends below ``below``.
    """
    stages = line.forward.size
    counts, times, width = states.counts, states.times, states.dead.size // 2
    mask = times.shape[1] - 3 * stages - 1
    states.stamp[:] = -1
    states.begin[0] = 0
    result = states.result
    result[SPENT] = 0
    levels, judged = 2 * n * stages, False
    for e in range(stages - 1):
        judged = judged or line.lane[e] == JUDGED
        if line.lane[e] >= SHARED:
            levels += 2 * n
    result[LEVELS] = levels
    counts[0, :] = 0
    times[0, :] = 0
    states.dead[0] = False
    size = 1
    for level in range(levels):
        old, new = (level % 2) * width, (1 - level % 2) * width
        if judged:
            size = _decide(line, states, scratch, old, size, level, n, below, most)
        number = 0
        states.begin[level + 1] = states.begin[level] + size
        if size == 0:
            result[OUTCOME] = STOPPED
            return
        for r in range(old, old + size):
            if states.dead[r]:
                continue
            chosen, until = _soonest(line, counts, times, r, n, mask)
            if chosen < 0:
                continue
            for other in range(1 if judged else 2):
                action = chosen if other == 0 else _rival(line, chosen)
                start = _start(line, counts, times, r, action, n, mask)
                if other == 1 and (start < 0 or start >= until):
                    break
                child = new + number
                _copy(states, r, child)
                apply(line, counts, times, child, action, start, mask)
                if settle(line, counts, times, child, scratch, n, mask) >= below:
                    continue
                result[SPENT] += 1
                if _dominated(states, child, level, judged):
                    continue
                at = states.begin[level + 1] + number
                if number + 1 >= width or result[SPENT] >= most or at >= states.parent.size:
                    result[OUTCOME] = STOPPED
                    return
                states.parent[at] = states.begin[level] + r - old
                states.action[at] = action
                number += 1
        size = number
        if size == 0:
            result[OUTCOME] = NONE
            return
    _best(line, states, (levels % 2) * width, size)
    if result[VALUE] >= below:
        result[OUTCOME] = NONE


@inner
def _copy(states: States, r: int, child: int) -> None:
    for j in range(states.counts.shape[1]):
        states.counts[child, j] = states.counts[r, j]
    for j in range(states.times.shape[1]):
        states.times[child, j] = states.times[r, j]


@loop
def _decide(
    line: Line, states: States, scratch: Scratch, old: int, size: int, level: int, n: int, below: int, most: int
) -> int:
    """Add beside each state whose next operation is a stage's the state in which that stage waits for its other kind.

    They belong to the same level. Return its size with them, 0 when there is no room.
    """
    counts, times, result = states.counts, states.times, states.result
    stages = line.forward.size
    mask = times.shape[1] - 3 * stages - 1
    begin, r = states.begin[level], old
    while r < old + size:
        chosen, _until = _soonest(line, counts, times, r, n, mask)
        s = chosen % stages
        if not states.dead[r] and 0 <= chosen < 2 * stages and counts[r, 4 * stages + s] == EITHER:
            ahead, done = counts[r, s], counts[r, stages + s]
            if (done < ahead) if chosen < stages else (ahead < n and ahead - done < line.limit[s]):
                child = old + size
                _copy(states, r, child)
                counts[child, 4 * stages + s] = BACKWARD_NEXT if chosen < stages else FORWARD_NEXT
                if settle(line, counts, times, child, scratch, n, mask) < below:
                    result[SPENT] += 1
                    at = begin + size
                    if size + 2 >= states.dead.size // 2 or result[SPENT] >= most or at + 2 >= states.parent.size:
                        return 0
                    states.dead[child] = False
                    states.parent[at] = states.parent[begin + r - old]
                    states.action[at] = states.action[begin + r - old]
                    size += 1
        r += 1
    return size


@inner
def _soonest(line: Line, counts: np.ndarray, times: np.ndarray, r: int, n: int, mask: int) -> tuple[int, int]:
    """Return the operation that would end first, and its end; ties by stage, then forward, backward, transfer."""
    stages = line.forward.size
    chosen, least = -1, NEVER_NS
    for s in range(stages):
        t = ready_forward(line, counts, times, r, s, n, mask)
        if t >= 0 and t + line.forward[s] < least:
            chosen, least = s, t + line.forward[s]
        t = ready_backward(line, counts, times, r, s, n, mask)
        if t >= 0 and t + line.backward[s] < least:
            chosen, least = stages + s, t + line.backward[s]
        if s == stages - 1 or line.lane[s] < SHARED:
            continue
        there, home = ready_out(line, counts, times, r, s, mask), ready_home(line, counts, times, r, s, mask)
        if line.lane[s] == JUDGED and there >= 0 and home >= 0:
            first = times[r, 3 * stages + (counts[r, 2 * stages + s] & mask)]
            second = times[r, 3 * stages + (counts[r, 3 * stages + s] & mask)]
            there, home = (there, -1) if first <= second else (-1, home)
        if there >= 0 and there + line.out[s] < least:
            chosen, least = 2 * stages + s, there + line.out[s]
        if home >= 0 and home + line.home[s] < least:
            chosen, least = 3 * stages + s, home + line.home[s]
    return chosen, least


@inner
def _rival(line: Line, action: int) -> int:
    """Return the other operation of the same stage or channel."""
    stages = line.forward.size
    what, s = action // stages, action % stages
    return (what ^ 1) * stages + s


@inner
def _start(line: Line, counts: np.ndarray, times: np.ndarray, r: int, action: int, n: int, mask: int) -> int:
    stages = line.forward.size
    what, s = action // stages, action % stages
    if what == 0:
        return ready_forward(line, counts, times, r, s, n, mask)
    if what == 1:
        return ready_backward(line, counts, times, r, s, n, mask)
    return ready_out(line, counts, times, r, s, mask) if what == 2 else ready_home(line, counts, times, r, s, mask)


@inner
def _dominated(states: States, child: int, level: int, judged: bool) -> bool:
    """Return whether a state of the level with the child's counts is nowhere later; drop states that are nowhere
    earlier.

    Under the judge's rules only equal states are alike: an earlier transfer may keep a channel from a better one.
    """
    counts, times = states.counts, states.times
    key = np.uint64(0)
    for j in range(counts.shape[1]):
        key += np.uint64(counts[child, j]) * (np.uint64(j + 1) * np.uint64(0x9E3779B97F4A7C15) | np.uint64(1))
    key ^= key >> np.uint64(32)
    states.key[child] = key
    slot = key & np.uint64(states.head.size - 1)
    if states.stamp[slot] != level:
        states.stamp[slot] = level
        states.head[slot] = -1
    other = states.head[slot]
    while other >= 0:
        if not states.dead[other] and states.key[other] == key and _same_counts(counts, other, child):
            earlier, later = False, False
            for j in range(times.shape[1]):
                if times[other, j] < times[child, j]:
                    earlier = True
                    if later:
                        break
                elif times[other, j] > times[child, j]:
                    later = True
                    if earlier:
                        break
            if not later and not (judged and earlier):
                return True
            if not earlier and not judged:
                states.dead[other] = True
        other = states.link[other]
    states.dead[child] = False
    states.link[child] = states.head[slot]
    states.head[slot] = child
    return False


@inner
def _same_counts(counts: np.ndarray, a: int, b: int) -> bool:
    same = True
    for j in range(counts.shape[1]):
        same = same and counts[a, j] == counts[b, j]
    return same


@inner
def _best(line: Line, states: States, old: int, size: int) -> None:
    """Find the state of the last level that ends first, the lowest among equals."""
    result = states.result
    result[OUTCOME], result[VALUE] = SUCCESS, NEVER_NS
    for r in range(old, old + size):
        if states.dead[r]:
            continue
        end = 0
        for s in range(line.forward.size):
            end = max(end, states.times[r, s] + line.after[s])
        if end < result[VALUE]:
            result[VALUE], result[BEST] = end, r - old

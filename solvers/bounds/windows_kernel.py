"""The windows of chains given as arrays, one plan or many (docs/theory/bounds.md, section 2).

The work of a stage (its micro-batches of every size) counts in addition to the windows, in which each micro-batch
counts as a small one.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.infinity import NEVER_NS

SERIAL, APART, FREE = 0, 1, 2
"""Kinds of a channel: its two directions exclude each other, each excludes itself only, nothing excludes anything."""


@Fields.register
class Chains(NamedTuple):
    """N plans with S stages: arrays (N, S) int64, times in ns.

    ``out`` goes from a stage to the next, ``back`` to the one before. ``channel`` is the channel after a stage.
    ``limit`` is how many micro-batches a stage can have in flight. ``work`` is all that it computes in a step.
    """

    forward: np.ndarray
    backward: np.ndarray
    out: np.ndarray
    back: np.ndarray
    channel: np.ndarray
    exposed: np.ndarray
    update: np.ndarray
    limit: np.ndarray
    work: np.ndarray


@loop
def window_bounds(chains: Chains, batches: int, bounds: np.ndarray, around: np.ndarray, limit: np.ndarray) -> None:
    """Write the bound of each plan to ``bounds`` (N,): NEVER_NS where a stage cannot hold a single micro-batch.

    ``around`` and ``limit`` (S,) are scratch.
    """
    stages = chains.forward.shape[1]
    for n in range(bounds.size):
        least = batches
        for s in range(stages):
            least = min(least, chains.limit[n, s])
            limit[s] = least
        if least == 0:
            bounds[n] = NEVER_NS
            continue
        around[stages - 1] = 0
        for s in range(stages - 2, -1, -1):
            inside = chains.forward[n, s + 1] + around[s + 1] + chains.backward[n, s + 1]
            around[s] = chains.out[n, s] + inside + chains.back[n, s + 1]
        bounds[n] = _bound(chains, n, stages, batches, around, limit)


@inner
def _bound(chains: Chains, n: int, stages: int, batches: int, around: np.ndarray, limit: np.ndarray) -> int:
    best, head, through, tail = 0, 0, 0, 0
    for x in range(stages):
        through = max(through, chains.forward[n, x])
        rest = chains.exposed[n, x] + chains.update[n, x]
        tail = max(rest, tail + chains.backward[n, x - 1] + chains.back[n, x]) if x > 0 else rest
        best = max(best, head + chains.work[n, x] + max(chains.update[n, x], tail))
        best = max(best, _end(chains, n, stages, batches, x, head, through, around, limit) + rest)
        head += chains.forward[n, x] + chains.out[n, x]
        if chains.channel[n, x] != FREE:
            through = max(through, chains.out[n, x])
    return best


@inner
def _end(
    chains: Chains,
    n: int,
    stages: int,
    batches: int,
    x: int,
    head: int,
    through: int,
    around: np.ndarray,
    limit: np.ndarray,
) -> int:
    """Return the earliest end of stage x's last backward."""
    start = (batches - 1) * through
    for y in range(x + 1):
        if limit[y] < batches:
            turns, left = (batches - 1) // limit[y], (batches - 1) % limit[y]
            turn = chains.forward[n, y] + around[y] + chains.backward[n, y]
            start = max(start, turns * turn + left * chains.forward[n, y])
    end = head + start + chains.forward[n, x] + around[x] + chains.backward[n, x]
    rest, slowest, longest = 0, 0, through
    before = through
    for q in range(x, stages):
        forward, backward = chains.forward[n, q], chains.backward[n, q]
        longest = max(longest, forward)
        end = max(
            end,
            head + window_span(forward, backward, around[q], limit[q], max(before, forward), slowest, batches) + rest,
        )
        rest += backward
        slowest = max(slowest, backward)
        if q == stages - 1:
            break
        out, back, channel = chains.out[n, q], chains.back[n, q + 1], chains.channel[n, q]
        inside = chains.forward[n, q + 1] + around[q + 1] + chains.backward[n, q + 1]
        if channel == SERIAL:
            span_ns = window_span(out, back, inside, batches, longest, slowest, batches)
        elif channel == APART:
            span_ns = (batches - 1) * max(longest, out, slowest, back) + out + inside + back
        else:
            span_ns = (batches - 1) * max(longest, slowest) + out + inside + back
        end = max(end, head + forward + span_ns + rest)
        rest += back
        if channel != FREE:
            slowest = max(slowest, back)
            longest = max(longest, out)
        before = longest
        head += forward + out
    return end


@inner
def window_span(forward: int, backward: int, around: int, limit: int, ahead: int, slowest: int, batches: int) -> int:
    """Return the time from the first possible start on a resource to the end of its last backward."""
    ahead, slowest = max(ahead, forward), max(slowest, backward)
    before, after = forward + around, around + backward
    turn = forward + around + backward
    span = (batches - 1) * max(ahead, slowest) + turn
    work = batches * (forward + backward)
    first = _idle(before, forward, ahead, limit)
    last = _idle(after, backward, slowest, limit)
    if limit < batches:
        turns, left = (batches - 1) // limit, (batches - 1) % limit
        chain = (turns + 1) * turn + left * forward
        area = (2 * batches * turn // limit + (forward + backward) * (limit - 1)) // 2
        return max(span, work + first + last, chain, area)
    reached = max(span, work + max(first, last))
    return max(reached, work + first + last) if reached >= before + after else reached


@inner
def _idle(window: int, step: int, rate: int, limit: int) -> int:
    """Return the rest of a window if steps can begin in it at distance ``rate``, at most ``limit`` of them."""
    number = min(limit, window // rate + 1) if rate > 0 else limit
    return max(0, window - (number - 1) * step - min(step, max(0, window - (number - 1) * rate)))

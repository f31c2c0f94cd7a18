"""The window bound of one chain in plain text, as docs/theory/bounds.md, section 2, has it: the kernel's reference."""

from __future__ import annotations

from typing import NamedTuple

from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.bounds.stage_windows import channel_kinds, effective_limits
from penstock.solvers.bounds.windows_kernel import APART, FREE, SERIAL


class Step(NamedTuple):
    """A resource's forward and backward time, the round trip after it, and its limit in flight."""

    forward: int
    backward: int
    around: int
    limit: int


def window_bound_ns(times: StageTimes) -> int:
    """Return the largest end over all stages x: last backward, exposed all-reduce and update, in ns."""
    batches = times.allocation.num_micro_batches
    count = len(times.allocation.stages)
    limits = effective_limits(times)
    kinds = channel_kinds(times)
    ahead, through = _rates(times, kinds)
    best = 0
    for x in range(count):
        end = _last_end(times, batches, limits, x, through[x])
        rest, slowest = 0, 0
        for q in range(x, count):
            step = Step(times.forward[q], times.backward[q], times.rounds[q], limits[q])
            end = max(end, times.heads[q] + span_ns(step, ahead[q], slowest, batches) + rest)
            rest += times.backward[q]
            slowest = max(slowest, times.backward[q])
            if q == count - 1:
                break
            end = max(end, _channel_end(times, kinds[q], q, through[q], slowest, batches) + rest)
            rest += times.back[q + 1]
            if kinds[q] != FREE:
                slowest = max(slowest, times.back[q + 1])
        best = max(best, end + times.exposed[x] + times.update_ns[x])
    return best


def _rates(times: StageTimes, kinds: list[int]) -> tuple[list[int], list[int]]:
    """Return the longest forward step before each stage, and including it."""
    ahead, through, longest = [], [], 0
    for s in range(len(times.forward)):
        ahead.append(longest)
        longest = max(longest, times.forward[s])
        through.append(longest)
        if s < len(kinds) and kinds[s] != FREE:
            longest = max(longest, times.out[s])
    return ahead, through


def _last_end(times: StageTimes, batches: int, limits: list[int], x: int, rate: int) -> int:
    """Return the end of stage x's last backward: its last forward waits for rates and limits, then goes round."""
    round_ns = times.forward[x] + times.rounds[x] + times.backward[x]
    start = (batches - 1) * rate
    for y in range(x + 1):
        if limits[y] < batches:
            turns, left = divmod(batches - 1, limits[y])
            around = times.forward[y] + times.rounds[y] + times.backward[y]
            start = max(start, turns * around + left * times.forward[y])
    return times.heads[x] + start + round_ns


def _channel_end(times: StageTimes, kind: int, q: int, rate: int, slowest: int, batches: int) -> int:
    """Return when the channel after stage q has carried everything back."""
    inside = times.forward[q + 1] + times.rounds[q + 1] + times.backward[q + 1]
    out, back = times.out[q], times.back[q + 1]
    start = times.heads[q] + times.forward[q]
    if kind == SERIAL:
        return start + span_ns(Step(out, back, inside, batches), rate, slowest, batches)
    if kind == APART:
        rate, slowest = max(rate, out), max(slowest, back)
    return start + (batches - 1) * max(rate, slowest) + out + inside + back


def span_ns(step: Step, ahead: int, slowest: int, batches: int) -> int:
    """Return the time from the first possible start on a resource to the end of its last backward."""
    forward, backward, around, limit = step
    ahead, slowest = max(ahead, forward), max(slowest, backward)
    before, after = forward + around, around + backward
    span = max((batches - 1) * ahead, (batches - 1) * slowest) + forward + around + backward
    work = batches * (forward + backward)
    first = idle(before, forward, ahead, limit)
    last = idle(after, backward, slowest, limit)
    if limit < batches:
        turns, left = divmod(batches - 1, limit)
        chain = (turns + 1) * (forward + around + backward) + left * forward
        area = (2 * batches * (forward + around + backward) // limit + (forward + backward) * (limit - 1)) // 2
        return max(span, work + first + last, chain, area)
    reached = max(span, work + max(first, last))
    return max(reached, work + first + last) if reached >= before + after else reached


def idle(window: int, step: int, rate: int, limit: int) -> int:
    """Return the rest of a window if steps can begin in it at distance ``rate``, at most ``limit`` of them."""
    number = min(limit, window // rate + 1) if rate > 0 else limit
    return max(0, window - (number - 1) * step - min(step, max(0, window - (number - 1) * rate)))

"""The idle time of a device with split backwards, or with several stages: BOUNDS Part II, section 1.

**Stages apart, split backwards** (``split_bound_ns``). Every micro-batch counts with the quicker row class: a schedule
stays valid when its operations shrink and keep their starts. On a stage of M micro-batches let F, I, W be its times,
``rt`` the round trip after it, K the most micro-batches that it can hold from F to the end of W.

* Let e(0) be its head, and e(j) the larger of e(j-1) + F and e(j-K) + F + rt + I + W. A forward that starts after j
  others, numbered from 0, does not start before e(j): at most K - 1 of those are still held, so j - K + 1 of them have
  been released, one of which has the number j - K or a later one.
* Take any j, the n = M - j micro-batches whose forwards start from there on, and the start t >= e(j) of the first.
  None of them has its I before t + F + rt, and until then only their forwards run for them, at most min(K, n), because
  none is released. So their work ends at t + n (F + I + W) + max(0, F + rt - min(K, n) F) or later, and as the last of
  it is a W, reductions and update follow.
* Their last I ends at some x. At most K of them are held then, so n - K of their W are done, and x is at least
  t + n (F + I) + max(0, n - K) W + max(0, F + rt - min(K, n) F). If x - t is at least F + 2 rt + I, the window in which
  no I runs and the last rt + I before x, in which no forward runs (its I would end after x), are disjoint; in the
  latter at most min(K, n) I run, and only W fill the rest, so max(0, n - K) W is replaced by the larger of itself and
    max(0, rt + I - min(K, n) I). After x comes the way back to every stage before, and the W there.

Deleting the W of a schedule leaves one with backwards as long as I, whose limits in flight hold all the more; so
``windows`` bounds that too.

**Devices with several stages** (``shared_device_ns``). No backward begins there before some stage's head, forward and
round trip; until then only forwards run, with the recomputations after them, and all that they made stays. So memory
limits them, and the rest of the time is idle. Stages without work neither begin nor end anything, as in
``StageTimes.device_ns``, to which this adds. The most that could fit is bounded by filling the memory budget with parts
of the micro-batches that take longest per byte.
"""

from __future__ import annotations

from fractions import Fraction

from penstock.solvers.bounds.stage_times import StageTimes
from penstock.solvers.costs.memory import free_bytes


def split_bound_ns(times: StageTimes) -> int:
    """Return the largest bound over all stages in ns; stages share no devices and have split backwards."""
    stages = range(len(times.forward))
    after: list[int] = []
    for s in stages:
        local = times.weight[s] + times.exposed[s] + times.update_ns[s]
        after.append(local if s == 0 else max(local, times.back[s] + times.backward[s - 1] + after[s - 1]))
    return max(_stage_bound_ns(times, s, after[s]) for s in stages)


def _stage_bound_ns(times: StageTimes, s: int, after: int) -> int:
    """Return the bound of one stage, in ns; ``after``: the time from the end of its last I to the step's end."""
    forward, gradient, weight, around = times.forward[s], times.backward[s], times.weight[s], times.rounds[s]
    batches = times.allocation.num_micro_batches
    most_held = min(times.in_flight(s), batches)
    finish = times.exposed[s] + times.update_ns[s]
    window, way = forward + around, forward + 2 * around + gradient
    earliest: list[int] = []
    best = 0
    for j in range(batches):
        start = times.heads[s] if j == 0 else earliest[j - 1] + forward
        if j >= most_held:
            start = max(start, earliest[j - most_held] + window + gradient + weight)
        earliest.append(start)
        n = batches - j
        inside = min(most_held, n)
        idle = max(0, window - inside * forward)
        best = max(best, start + n * (forward + gradient + weight) + idle + finish)
        done = max(0, n - most_held) * weight
        last = max(window + gradient, n * (forward + gradient) + idle + done)
        if last >= way:
            done = max(done, around + gradient - inside * gradient)
            last = max(last, n * (forward + gradient) + idle + done)
        best = max(best, start + last + after)
    return best


def shared_device_ns(times: StageTimes, device: int) -> int:
    """Return head, idle time until the first backward, work and tail of a device with several stages; 0 for others."""
    stages = [s for s in times.allocation.held_stages[device] if times.stage_work(s, device) > 0]
    if len(stages) < 2:
        return 0
    head = min(times.heads[s] for s in stages)
    first = min(times.heads[s] + times.forward[s] + times.rounds[s] for s in stages)
    return times.device_ns(device) + max(0, first - head - _most_forwards_ns(times, device, stages))


def _most_forwards_ns(times: StageTimes, device: int, stages: list[int]) -> int:
    """Return the longest time of forwards before any release: a knapsack, filled with parts of micro-batches."""
    free = free_bytes(times.problem, (device,))
    free -= sum(times.static[s].parameters + times.static[s].optimizer for s in stages)
    total, weighed = Fraction(0), []
    for s in stages:
        count = sum(times.counts(s, device))
        longest = max(cost.forward_ns + cost.recompute_ns for cost in times.costs[s])
        size = times.forward_bytes(s)
        if size == 0:
            total += count * longest
        else:
            weighed.append((Fraction(longest, size), size, count))
    for value, size, count in sorted(weighed, reverse=True):
        used = min(free, size * count)
        free -= max(0, used)
        total += value * max(0, used)
    return int(total)

"""Reference of the suffix kernels: every order in turn without bounds or branching rule, the table by recursion."""

from __future__ import annotations

from functools import cache
from itertools import product

from penstock.solvers.bounds.suffix.state_kernel import QUEUE, SHARED, Line
from penstock.solvers.bounds.windows_kernel import window_span
from penstock.solvers.compiled.decorators import compiled


@compiled
def _window_span(forward: int, backward: int, around: int, limit: int, ahead: int, slowest: int, batches: int) -> int:
    """Call ``window_span``, which Python reaches only through a kernel."""
    return window_span(forward, backward, around, limit, ahead, slowest, batches)


def plain_optimum(line: Line, batches: int) -> int:
    """Return the least end of n micro-batches over every order: any operation may be next, none is left out."""
    stages = len(line.forward)
    forward, backward, out, home, lane, limit, after = (
        [int(x) for x in column]
        for column in (line.forward, line.backward, line.out, line.home, line.lane, line.limit, line.after)
    )
    start = ((0,) * stages, (0,) * stages, (0,) * stages, (0,) * stages, (0,) * stages, (0,) * (2 * stages), ())
    level = {start}
    # (forwards, backwards, sent, returned, stages' free times, channels' free times, ready times of micro-batches)
    while True:
        following = set()
        for state in level:
            following.update(_next(state, batches, stages, forward, backward, out, home, lane, limit))
        if not following:
            break
        level = set(_undominated(following))
    return min(max(free + extra for free, extra in zip(state[4], after, strict=True)) for state in level)


def _undominated(states):
    """Yield the states that no state with the same counts dominates in every time."""
    groups = {}
    for state in states:
        groups.setdefault(state[:4], []).append(state)
    for group in groups.values():
        kept: list[tuple[tuple[int, ...], object]] = []
        for times, state in sorted((_times(state), state) for state in group):
            if not any(all(a <= b for a, b in zip(other, times, strict=True)) for other, _state in kept):
                kept.append((times, state))
        yield from (state for _times_of, state in kept)


def _times(state):
    return (*state[4], *state[5], *(time for _key, time in state[6]))


def _next(state, batches, stages, forward, backward, out, home, lane, limit):
    ahead, done, sent, returned, free, channel, ready = state
    tokens = dict(ready)
    for s in range(stages):
        m = ahead[s]
        if m < batches and m - done[s] < limit[s] and (s == 0 or sent[s - 1] > m):
            begin = max(free[s], tokens.get((0, s, m), 0))
            yield _moved(state, 0, s, m, begin + forward[s], tokens, stages, out, home, lane)
        m = done[s]
        if m < (ahead[s] if s == stages - 1 else returned[s]):
            begin = max(free[s], tokens.get((1, s, m), 0))
            yield _moved(state, 1, s, m, begin + backward[s], tokens, stages, out, home, lane)
        if s < stages - 1 and lane[s] == SHARED:
            m = sent[s]
            if m < ahead[s]:
                begin = max(channel[s], tokens[2, s, m])
                yield _moved(state, 2, s, m, begin + out[s], tokens, stages, out, home, lane)
            m = returned[s]
            if m < done[s + 1]:
                begin = max(channel[s], tokens[3, s, m])
                yield _moved(state, 3, s, m, begin + home[s], tokens, stages, out, home, lane)


def _moved(state, what, s, m, end, tokens, stages, out, home, lane):
    counts = [list(each) for each in state[:4]]
    free, channel, tokens = list(state[4]), list(state[5]), dict(tokens)
    counts[what][s] += 1
    tokens.pop((what, s, m), None)
    if what < 2:
        free[s] = end
        edge, takes, place = (s, out, s) if what == 0 else (s - 1, home, stages + s - 1)
        if not 0 <= edge < stages - 1:
            if what == 0:
                tokens[1, s, m] = end
        elif lane[edge] == SHARED:
            tokens[2 + what, edge, m] = end
        else:
            if lane[edge] == QUEUE:
                end = max(end, channel[place])
            channel[place] = end = end + takes[edge]
            counts[2 + what][edge] += 1
            tokens[what, edge + 1 - what, m] = end
    else:
        channel[s] = end
        tokens[what - 2, s + 3 - what, m] = end
    return (*map(tuple, counts), tuple(free), tuple(channel), tuple(sorted(tokens.items())))


def plain_table(line: Line) -> list[list[int]]:
    """Build the table of BOUNDS Part II, 1, by its formulas: windows, transfer, step, superadditivity with shift."""
    stages, most = line.phi.shape[0], line.phi.shape[1] - 1

    @cache
    def around(s: int) -> int:
        if s == stages - 1:
            return 0
        inside = line.forward[s + 1] + around(s + 1) + line.backward[s + 1]
        return int(line.out[s] + inside + line.home[s])

    @cache
    def phi(s: int, n: int) -> int:
        if n <= 0:
            return 0
        values = [windows(s, n), phi(s, n - 1) + max(line.forward[s], line.backward[s])]
        if s < stages - 1:
            values.append(line.forward[s] + line.out[s] + phi(s + 1, n) + line.home[s] + line.backward[s])
        for a in range(1, n):
            b = n - a - int(line.limit[s]) + 1
            if b >= 1:
                values.append(phi(s, a) + phi(s, b))
        return int(max(values))

    def windows(s: int, n: int) -> int:
        best = 0
        for q in range(s, stages):
            head = sum(int(line.forward[x] + line.out[x]) for x in range(s, q))
            rest = sum(int(line.backward[x] + line.home[x]) for x in range(s, q))
            queued = [x for x in range(s, q) if line.lane[x] != 0]
            rate = max([int(line.forward[x]) for x in range(s, q)] + [int(line.out[x]) for x in queued], default=0)
            slow = max([int(line.backward[x]) for x in range(s, q)] + [int(line.home[x]) for x in queued], default=0)
            f, b, k = int(line.forward[q]), int(line.backward[q]), min(int(line.limit[q]), n)
            best = max(best, head + _window_span(f, b, around(q), k, max(rate, f), slow, n) + rest)
            if q == stages - 1:
                continue
            rate, slow = max(rate, f), max(slow, b)
            out, home = int(line.out[q]), int(line.home[q])
            inside = int(line.forward[q + 1]) + around(q + 1) + int(line.backward[q + 1])
            if line.lane[q] == SHARED:
                window = _window_span(out, home, inside, n, rate, slow, n)
            else:
                each = (rate, slow, out, home) if line.lane[q] == QUEUE else (rate, slow)
                window = (n - 1) * max(each) + out + inside + home
            best = max(best, head + f + window + rest + b)
        return best

    return [[phi(s, n) for n in range(most + 1)] for s in range(stages)]


def best_period_of_one(
    forward: tuple[int, int], backward: tuple[int, int], out: int, home: int, limits: tuple[int, int]
) -> int:
    """Return the shortest period of two stages when every micro-batch does the same one period later.

    Six operations at offsets in one period on two machines and a channel; brute force over the cyclic orders: in each
    the shortest period is a longest cycle ratio, found by trying periods.
    """
    durations = [forward[0], out, forward[1], backward[1], home, backward[0]]
    pairs = [(0, 5), (1, 4), (2, 3)]
    for period in range(1, 10**4):
        for shifts in product(range(4), repeat=3):
            if _fits(durations, pairs, shifts, limits, period):
                return period
    raise AssertionError("no period")


def _fits(durations, pairs, shifts, limits, period) -> bool:
    """Return whether longest paths exist: each machine's second operation is ``shift`` periods behind its first.

    It ends before the next first operation of the machine.
    """
    arcs = [(i, i + 1, durations[i], 0) for i in range(5)]
    for (a, b), shift in zip(pairs, shifts, strict=True):
        arcs.append((a, b, durations[a], -shift))
        arcs.append((b, a, durations[b], shift + 1))
    arcs.append((5, 0, durations[5], limits[0]))
    arcs.append((3, 2, durations[3], limits[1]))
    start = [0] * 6
    for _ in range(7):
        changed = False
        for a, b, length, behind in arcs:
            if start[a] + length - behind * period > start[b]:
                start[b] = start[a] + length - behind * period
                changed = True
        if not changed:
            return True
    return False

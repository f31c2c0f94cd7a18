"""DAPPLE's memoised search as one compiled loop over occupancies, placements and cuts (formulas 4 and 5)."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import plain
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.costs.tables.routes import Routes
from penstock.solvers.costs.tables.transfer_kernel import transfer_rate
from penstock.solvers.planners.dapple.cost_kernel import NO, PLAIN, devices_between, moved, reduced, stage_times
from penstock.solvers.planners.dapple.kernel_arrays import Layers, Memo, Places, Scratch, SetCosts, Settings
from penstock.solvers.planners.dapple.latency_kernel import C, Label, P, R, X, latency_of, push

NONE = -1
# Columns of a prefix: stages (NONE: no prefix), last transition, parent's key, cut and slot.
STAGES, LAST, PARENT_KEY, PARENT_CUT, PARENT_SLOT = range(5)
# Columns of a recorded plan: latency, key, cut and slot of its prefix, transition, cut after that stage, stages.
VALUE, KEY, CUT, SLOT, STEP, END, LENGTH = range(7)
Hop = tuple[float, int, float, int]


@plain
def run(
    places: Places,
    routes: Routes,
    placed: SetCosts,
    remaining: SetCosts,
    layers: Layers,
    settings: Settings,
    memo: Memo,
    scratch: Scratch,
    best: np.ndarray,
    by_length: np.ndarray,
) -> None:
    """Fill ``best`` (the best plans, ascending) and ``by_length`` (the best plan of each number of stages).

    Rows are seven numbers: see VALUE … LENGTH. A plan whose END is L has no further stage; otherwise one stage on
    all remaining devices follows. States go from the emptiest on, so a prefix is final when it is extended.
    With a ``total`` number of stages, the memo keeps prefixes of different lengths apart.
    """
    for s in places.by_used:
        for t in range(places.first[s], places.first[s + 1]):
            if places.replicas[t] > settings.fed or placed.reduce_ns_per_byte[t] == np.inf:
                continue
            low = places.states[s] + places.take[t]
            free = places.node_size.sum() - places.used[s] - places.replicas[t]
            count = devices_between(places.node_device, places.states[s], low, scratch.source)
            rest = devices_between(places.node_device, low, places.node_size, scratch.target)
            away = (0.0, 0, 0.0, 0)
            if free > 0:
                away = _both_ways(routes, places.node_of, settings, scratch, count, rest)
            width = settings.total + 1
            for entry in range(places.first_key[s] * width, places.first_key[s + 1] * width):
                key = places.keys_of[entry // width] * width + entry % width
                previous = NONE - 1
                into = (0.0, 0, 0.0, 0)
                for j in range(len(layers.cut) - 1):
                    for slot in range(memo.info.shape[2]):
                        if memo.info[key, j, slot, STAGES] == NONE:
                            continue
                        if settings.prune and memo.rank[key, j, slot, 0] >= best[-1, VALUE]:
                            continue
                        last = memo.info[key, j, slot, LAST]
                        if last != previous and last != NONE:
                            into = _into(places, routes, settings, scratch, s, last, count)
                        previous = last
                        if into[0] >= 0 and memo.info[key, j, slot, STAGES] < settings.max_stages:
                            _extend(
                                places, placed, remaining, layers, settings, memo, scratch, best, by_length,
                                (key, j, slot), t, free, into, away,
                            )  # fmt: skip


@plain
def _into(places: Places, routes: Routes, settings: Settings, scratch: Scratch, s: int, last: int, count: int) -> Hop:
    """Return the hop from the set of the prefix's last stage to the new stage, both ways."""
    low = np.empty(len(places.node_size), dtype=np.int64)
    for p in range(len(low)):
        low[p] = places.states[s, p] - places.take[last, places.order[last, p]]
    before = devices_between(places.node_device, low, places.states[s], scratch.target)
    out, out_lag, back, back_lag = _both_ways(routes, places.node_of, settings, scratch, count, before)
    return back, back_lag, out, out_lag


@plain
def _both_ways(routes: Routes, node_of: np.ndarray, settings: Settings, scratch: Scratch, k: int, k2: int) -> Hop:
    """Return the hop from the scratch's sources to its targets, and back; negative rates where there is no path."""
    out, lag = transfer_rate(
        routes, node_of, settings.mode, settings.rows, scratch.source, k, scratch.target, k2, scratch.load,
        scratch.touched,
    )  # fmt: skip
    back, back_lag = transfer_rate(
        routes, node_of, settings.mode, settings.rows, scratch.target, k2, scratch.source, k, scratch.load,
        scratch.touched,
    )  # fmt: skip
    if out < 0 or back < 0:
        return -1.0, 0, -1.0, 0
    return out, lag, back, back_lag


@plain
def _extend(
    places: Places,
    placed: SetCosts,
    remaining: SetCosts,
    layers: Layers,
    settings: Settings,
    memo: Memo,
    scratch: Scratch,
    best: np.ndarray,
    by_length: np.ndarray,
    prefix: tuple[int, int, int],
    t: int,
    free: int,
    into: Hop,
    away: Hop,
) -> None:
    """Extend a prefix by a stage [j, j2) on transition t, for every j2, and by one stage for the rest (formula 4)."""
    key, j, slot = prefix
    stages = memo.info[key, j, slot, STAGES]
    num_layers = len(layers.cut) - 1
    m = places.replicas[t]
    m_share = layers.share_of[m]
    before, count = _base(memo, settings, scratch, key, j, slot)
    f1, b1 = 0, 0
    if stages > 0:
        f1 = moved(into[0], into[1], layers.sent_bytes[j - 1])
        b1 = moved(into[2], into[3], layers.returned_bytes[j - 1])
        before, count = _append(settings, scratch, before, count, f1, b1, 0, True)
    scratch.widest[:] = 0
    pruning = settings.prune
    flying = max(1, min(settings.micro_batches, settings.total - stages))
    for j2 in range(j + 1, num_layers + 1):
        for kind in range(len(scratch.widest)):
            scratch.widest[kind] = max(scratch.widest[kind], layers.workspace_bytes[kind, m_share, j2 - 1])
        if not layers.cut[j2] or (j2 < num_layers and free == 0):
            continue
        if j2 == num_layers and not (settings.unused and free > 0) and not (stages == 0 and free == 0):
            continue
        f, b, fits = stage_times(
            layers, settings, j, j2, m, placed.kinds[t], placed.room_bytes[t], scratch.widest, flying
        )
        if fits == NO:
            continue
        if pruning and fits == PLAIN and before[X] + before[P] + settings.micro_batches * (f + b) >= best[-1, VALUE]:
            break
        size = layers.trained_bytes[j2] - layers.trained_bytes[j]
        a = reduced(placed.reduce_ns_per_byte[t], placed.reduce_fixed_ns[t], size, b, settings.bucket, settings.overlap)
        after, n = _append(settings, scratch, before, count, f, b, a, False)
        if j2 == num_layers:
            v = after[C] if settings.labels else _latency(settings, scratch, n)
            if settings.total in (0, stages + 1):
                _record(best, by_length, v, key, j, slot, t, j2, stages + 1)
            continue
        if layers.least_stages[j2] > min(free, settings.max_stages - stages - 1):
            continue
        if settings.total > 0 and min(free, num_layers - j2) < settings.total - stages - 1:
            continue
        bound = _bound(layers, settings, after, j2, free)
        if pruning and bound >= best[-1, VALUE]:
            continue
        v, whole = _with_rest(layers, settings, scratch, remaining, places.target[t], j2, free, after, n, away)
        if whole and settings.total in (0, stages + 2):
            _record(best, by_length, v, key, j, slot, t, j2, stages + 2)
        rank = bound if settings.labels else v
        into_key = places.key_of[t] * (settings.total + 1) + min(settings.total, stages + 1)
        _remember(memo, settings, into_key, j2, rank, v, stages + 1, after, t, prefix, (f1, b1, f, b, a))


@plain
def _base(memo: Memo, settings: Settings, scratch: Scratch, key: int, j: int, slot: int) -> tuple[Label, int]:
    """Return the state of a prefix: its label, or the number of its times, written to the scratch's line."""
    if settings.labels:
        label = memo.label[key, j, slot]
        return (label[X], label[C], label[R], label[P]), 0
    count = 2 * memo.info[key, j, slot, STAGES] - 1
    place = count - 1
    while memo.info[key, j, slot, STAGES] > 0:
        times = memo.times[key, j, slot]
        _put(scratch, settings, place, times[2], times[3], times[4], False)
        if place > 0:
            _put(scratch, settings, place - 1, times[0], times[1], 0, True)
        place -= 2
        info = memo.info[key, j, slot]
        key, j, slot = info[PARENT_KEY], info[PARENT_CUT], info[PARENT_SLOT]
    return (0, 0, -NEVER_NS, 0), max(0, count)


@plain
def _append(
    settings: Settings,
    scratch: Scratch,
    label: Label,
    count: int,
    forward: int,
    backward: int,
    reduce: int,
    network: bool,
) -> tuple[Label, int]:
    """Append one more stage, to a label or at place ``count`` of the line."""
    if settings.labels:
        load = _load(settings, forward, backward, network)
        return push(label, forward, backward, reduce, load, not network or settings.channel != 2), 0
    _put(scratch, settings, count, forward, backward, reduce, network)
    return label, count + 1


@plain
def _load(settings: Settings, forward: int, backward: int, network: bool) -> int:
    each = max(forward, backward) if network and settings.channel == 1 else forward + backward
    return (settings.micro_batches - 1) * each


@plain
def _put(
    scratch: Scratch, settings: Settings, place: int, forward: int, backward: int, reduce: int, network: bool
) -> None:
    scratch.line[0, place] = forward
    scratch.line[1, place] = backward
    scratch.line[2, place] = reduce
    scratch.line[3, place] = _load(settings, forward, backward, network)
    scratch.legal[place] = not network or settings.channel != 2


@plain
def _latency(settings: Settings, scratch: Scratch, count: int) -> int:
    line = scratch.line
    return latency_of(line[0], line[1], line[2], line[3], scratch.legal, count)


@plain
def _with_rest(
    layers: Layers,
    settings: Settings,
    scratch: Scratch,
    remaining: SetCosts,
    state: int,
    j2: int,
    free: int,
    label: Label,
    count: int,
    away: Hop,
) -> tuple[int, bool]:
    """Return (latency, whether it is a plan) with the layers from j2 on as one stage on all remaining devices."""
    num_layers = len(layers.cut) - 1
    share = layers.share_of[free]
    f, b, fits = stage_times(
        layers, settings, j2, num_layers, free, remaining.kinds[state], remaining.room_bytes[state],
        layers.workspace_from[:, share, j2], 1,
    )  # fmt: skip
    rate = remaining.reduce_ns_per_byte[state]
    size = layers.trained_bytes[num_layers] - layers.trained_bytes[j2]
    whole = fits != NO and free <= settings.fed and rate != np.inf and away[0] >= 0
    a, sent, returned = 0, 0, 0
    if rate != np.inf:
        a = reduced(rate, remaining.reduce_fixed_ns[state], size, b, settings.bucket, settings.overlap)
    if away[0] >= 0:
        sent = moved(away[0], away[1], layers.sent_bytes[j2 - 1])
        returned = moved(away[2], away[3], layers.returned_bytes[j2 - 1])
    label, count = _append(settings, scratch, label, count, sent, returned, 0, True)
    label, count = _append(settings, scratch, label, count, f, b, a, False)
    return (label[C] if settings.labels else _latency(settings, scratch, count)), whole


@plain
def _bound(layers: Layers, settings: Settings, label: Label, j2: int, free: int) -> int:
    """Return a lower bound on the latency of every completion.

    It is C, or X and P plus the remaining work, spread evenly over the free devices. It never falls along a plan. So a
    prefix whose bound reaches a plan's latency, or another prefix of the same key with a larger bound, cannot lead to a
    better plan: pruning changes no value.
    """
    left = (layers.least_work_ns[j2] + free - 1) // free
    return max(label[C], label[X] + label[P] + settings.micro_batches * left)


@plain
def _remember(
    memo: Memo,
    settings: Settings,
    key: int,
    j: int,
    rank: int,
    value: int,
    stages: int,
    label: Label,
    t: int,
    parent: tuple[int, int, int],
    times: tuple[int, int, int, int, int],
) -> None:
    """Store a prefix in the memo of formula (5).

    A key keeps the prefix with the smallest rank, then latency, then number of stages.
    """
    slot = _slot(memo, settings, key, j, rank, value, stages, label, t)
    if slot < 0:
        return
    memo.rank[key, j, slot, 0] = rank
    memo.rank[key, j, slot, 1] = value
    info = memo.info[key, j, slot]
    info[STAGES], info[LAST] = stages, t
    info[PARENT_KEY], info[PARENT_CUT], info[PARENT_SLOT] = parent
    if settings.labels:
        for i in range(4):
            memo.label[key, j, slot, i] = label[i]
    else:
        for i in range(5):
            memo.times[key, j, slot, i] = times[i]


@plain
def _slot(
    memo: Memo, settings: Settings, key: int, j: int, rank: int, value: int, stages: int, label: Label, t: int
) -> int:
    """Return the slot in which to keep a prefix, or NONE if it is not kept.

    With several slots, dominated prefixes are dropped.
    """
    slots = memo.info.shape[2]
    free, worst = NONE, NONE
    for slot in range(slots):
        info = memo.info[key, j, slot]
        if info[STAGES] == NONE:
            free = slot
            continue
        if slots > 1 and settings.labels and info[LAST] == t:
            if info[STAGES] <= stages and _dominates(memo.label[key, j, slot], label):
                return NONE
            if stages <= info[STAGES] and _dominates(label, memo.label[key, j, slot]):
                info[STAGES] = NONE
                free = slot
                continue
        if worst == NONE or _later(memo, key, j, slot, worst):
            worst = slot
    if free != NONE:
        return free
    memo.overflow[0] += 1
    worst_rank = memo.rank[key, j, worst]
    if rank != worst_rank[0]:
        return worst if rank < worst_rank[0] else NONE
    if value != worst_rank[1]:
        return worst if value < worst_rank[1] else NONE
    return worst if stages < memo.info[key, j, worst, STAGES] else NONE


@plain
def _later(memo: Memo, key: int, j: int, a: int, b: int) -> bool:
    """Return whether slot a comes after slot b by rank, then latency."""
    one, other = memo.rank[key, j, a], memo.rank[key, j, b]
    return bool(one[0] > other[0] or (one[0] == other[0] and one[1] > other[1]))


@plain
def _dominates(a: Label, b: Label) -> bool:
    return bool(a[X] <= b[X] and a[C] <= b[C] and a[R] <= b[R] and a[P] <= b[P])


@plain
def _record(
    best: np.ndarray, by_length: np.ndarray, value: int, key: int, j: int, slot: int, t: int, end: int, stages: int
) -> None:
    """Record a plan that is among the best, or the best of its number of stages."""
    if stages < len(by_length) and value < by_length[stages, VALUE]:
        _write(by_length, stages, value, key, j, slot, t, end, stages)
    if value >= best[-1, VALUE]:
        return
    place = len(best) - 1
    while place > 0 and best[place - 1, VALUE] > value:
        best[place] = best[place - 1]
        place -= 1
    _write(best, place, value, key, j, slot, t, end, stages)


@plain
def _write(table: np.ndarray, row: int, value: int, key: int, j: int, slot: int, t: int, end: int, stages: int) -> None:
    table[row, VALUE], table[row, KEY], table[row, CUT], table[row, SLOT] = value, key, j, slot
    table[row, STEP], table[row, END], table[row, LENGTH] = t, end, stages

"""PRM's inner loops: which numbers of stages are possible when nothing may take longer than a threshold.

SPP section IV-B2 and Algorithm 4, for a threshold instead of a minimum, and from the last stage to the first (O-2):
``table[w, i, a, l]`` has bit k of word w set when layers l … L - 1 can run as 64 w + k + 1 stages on devices i … of the
order, the first of them on ``replicas[a]`` devices, with no stage and no channel over the threshold. So the number of
stages after a stage is known, and with it how many micro-batches the stage keeps in flight.

For given devices a stage may begin at l and end at any place up to ``reach``, so its successors are a range, whose
masks are joined by two overlapping powers of two (``spread``). Cuts that no choice of the next replicas makes too slow
take the mask over all of them (``joined``). O(V R L log L) for one word, plus O(V R^2) for each slow cut.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner, loop
from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.infinity import NEVER_NS

WORD = 64
LONGEST_NS = 2**51
"""The largest threshold: a step of 26 days, so that times times devices stay within 64 bits."""


@Fields.register
class ChainArrays(NamedTuple):
    """L layers, V devices in order, R replica counts, C classes of stage devices, K ways to run, G depths.

    - ``stage_of`` (V, R): class of the devices from i on, -1 where too few devices follow.
    - ``spent_ns`` (K, C, L + 1) and ``lag_ns`` (C,): layers [l, x) take ``spent[x] - spent[l] + lag`` a step.
    - ``fits`` (K, G, C, L + 1): the last end that memory allows; ``depth_bits`` (G, words): the stage counts of each
      depth.
    - ``moved`` (L + 1,): bytes that cross before a layer a step, float64.
    - ``rate`` (V, R, R) ns per byte and ``hop_ns`` (V, R, R) ns a step between a stage and the next; ``worst_rate`` and
      ``worst_hop_ns`` (V, R) their largest.
    - ``cut`` (L + 1,): where a stage may begin; ``least_ns`` (L + 1,): the least time of the layers before, in ns times
      devices.
    - ``unused``: devices may be left over at the end.
    """

    replicas: np.ndarray
    stage_of: np.ndarray
    spent_ns: np.ndarray
    lag_ns: np.ndarray
    fits: np.ndarray
    depth_bits: np.ndarray
    moved: np.ndarray
    rate: np.ndarray
    hop_ns: np.ndarray
    worst_rate: np.ndarray
    worst_hop_ns: np.ndarray
    cut: np.ndarray
    least_ns: np.ndarray
    unused: bool


@Fields.register
class Masks(NamedTuple):
    """The arrays that a sweep fills: ``table`` (words, V, R, L + 1), its scratch, and ``reach`` (G, C, L + 1).

    - ``widest`` (C,): the most ends that a stage of the class may choose from.
    - ``power`` (L + 2,): floor(log2) of a size.
    - ``begin`` (V, 2): the first and last layer at which a stage may begin on each device, so that the work before and
      after it has enough time.
    - ``band`` (words, V, 2): the layers that are not zero in the table, as the last sweep left it.
    """

    table: np.ndarray
    carry: np.ndarray
    joined: np.ndarray
    spread: np.ndarray
    reach: np.ndarray
    widest: np.ndarray
    power: np.ndarray
    begin: np.ndarray
    band: np.ndarray


@compiled
def possible(chain: ChainArrays, masks: Masks, most_ns: int) -> int:
    """Fill the table for a threshold; return how many of its words may hold bits."""
    return _possible(chain, masks, most_ns)


@loop
def _possible(chain: ChainArrays, masks: Masks, most_ns: int) -> int:
    _fill_begin(chain.least_ns, masks.begin, most_ns)
    _fill_reach(chain, masks.reach, masks.widest, most_ns)
    for w in range(masks.table.shape[0]):
        if not _sweep(chain, masks, most_ns, w):
            return w + 1
    return masks.table.shape[0]


@loop
def _fill_reach(chain: ChainArrays, reach: np.ndarray, widest: np.ndarray, most_ns: int) -> None:
    """Fill the last end of a stage that begins at each layer.

    The stage is under the threshold and within memory in some way to run.
    """
    ways, classes, places = chain.spent_ns.shape
    widest[:] = 0
    for g in range(reach.shape[0]):
        for c in range(classes):
            for k in range(ways):
                end = places - 1
                for at in range(places - 1, -1, -1):
                    while end > at and chain.spent_ns[k, c, end] - chain.spent_ns[k, c, at] + chain.lag_ns[c] > most_ns:
                        end -= 1
                    mine = min(end, chain.fits[k, g, c, at])
                    reach[g, c, at] = mine if k == 0 else max(reach[g, c, at], mine)
                    widest[c] = max(widest[c], mine - at)


@loop
def _fill_begin(least_ns: np.ndarray, begin: np.ndarray, most_ns: int) -> None:
    devices, layers = begin.shape[0], least_ns.size - 1
    begin[0, 0], begin[0, 1] = 0, 0
    for i in range(1, devices):
        low, high = begin[i - 1, 0], begin[i - 1, 1]
        low = max(low, 1)
        while low < layers and least_ns[layers] - least_ns[low] > most_ns * (devices - i):
            low += 1
        while high < layers - 1 and least_ns[high + 1] <= most_ns * i:
            high += 1
        begin[i, 0], begin[i, 1] = low, high


@loop
def _sweep(chain: ChainArrays, masks: Masks, most_ns: int, w: int) -> bool:
    """Fill one word of the table; return whether a next word is needed.

    A stage has at least one device and one layer.
    """
    devices, counts = chain.stage_of.shape
    layers = chain.least_ns.size - 1
    more = False
    for i in range(max(0, devices - WORD * w), devices):
        _clear(masks.joined[i])
    for i in range(devices - 1 - WORD * w, -1, -1):
        low, high = masks.begin[i, 0], min(masks.begin[i, 1], layers - 1 - WORD * w)
        old_low, old_high = masks.band[w, i]
        masks.band[w, i, 0], masks.band[w, i, 1] = low, high
        _clear(masks.joined[i])
        for a in range(counts):
            _clear(masks.table[w, i, a, old_low : old_high + 1])
            c = chain.stage_of[i, a]
            if c < 0:
                continue
            j = i + chain.replicas[a]
            first, last = layers, -1
            if j < devices:
                first, last = masks.begin[j]
                last = min(last, high + masks.widest[c])
                _successors(chain, masks, most_ns, w, i, a, first, last)
            ends = w == 0 and (chain.unused or j == devices)
            if _stages(chain, masks, w, i, a, low, high, first, last, ends):
                more = True
            for at in range(low, high + 1):
                masks.joined[i, at] |= masks.table[w, i, a, at]
    return more


@inner
def _stages(
    chain: ChainArrays, masks: Masks, w: int, i: int, a: int, low: int, high: int, first: int, last: int, ends: bool
) -> bool:
    """Fill the masks of a first stage on ``replicas[a]`` devices from i; ``ends``: it may be the only stage."""
    c = chain.stage_of[i, a]
    row, carry = masks.table[w, i, a], masks.carry[i, a]
    one = np.uint64(1)
    more = False
    if w > 0:
        for at in range(low, high + 1):
            row[at] = carry[at]
    _clear(carry)
    for g in range(masks.reach.shape[0]):
        allowed = chain.depth_bits[g, w]
        _before(row, masks.reach[g, c], masks.spread, masks.power, low, high, first, last, allowed)
        if w + 1 < masks.table.shape[0] and chain.depth_bits[g, w + 1] & one:
            more = _carry(carry, masks.reach[g, c], masks.spread, masks.power, low, high, first, last)
    if ends and chain.depth_bits[0, 0] & one:
        layers = chain.least_ns.size - 1
        for at in range(low, high + 1):
            if masks.reach[0, c, at] == layers:
                row[at] |= one
    for at in range(low, high + 1):
        if not chain.cut[at]:
            row[at] = 0
    return more


@loop
def _before(
    row: np.ndarray,
    reach: np.ndarray,
    spread: np.ndarray,
    power: np.ndarray,
    low: int,
    high: int,
    first: int,
    last: int,
    allowed: int,
) -> None:
    """Add masks of one more stage than what follows.

    A mask is the union over a stage's ends from ``first`` to its ``reach``, shifted.
    """
    one = np.uint64(1)
    for at in range(low, high + 1):
        begin, end = max(first, at + 1), min(last, reach[at])
        if begin <= end:
            t = power[end - begin + 1]
            row[at] |= ((spread[t, begin] | spread[t, end + 1 - (1 << t)]) << one) & allowed


@loop
def _carry(
    carry: np.ndarray,
    reach: np.ndarray,
    spread: np.ndarray,
    power: np.ndarray,
    low: int,
    high: int,
    first: int,
    last: int,
) -> bool:
    """Fill the bits that ``_before`` shifts out of the word."""
    more = False
    for at in range(low, high + 1):
        begin, end = max(first, at + 1), min(last, reach[at])
        if begin <= end:
            t = power[end - begin + 1]
            carry[at] = (spread[t, begin] | spread[t, end + 1 - (1 << t)]) >> np.uint64(WORD - 1)
            more = more or carry[at] != 0
    return more


@inner
def _successors(chain: ChainArrays, masks: Masks, most_ns: int, w: int, i: int, a: int, first: int, last: int) -> None:
    """Fill row 0 of ``spread`` with the stage counts after each cut in ``first`` … ``last``.

    Row t joins 2^t of them.
    """
    j = i + chain.replicas[a]
    rate, hop_ns = chain.worst_rate[i, a], chain.worst_hop_ns[i, a]
    _join(masks.spread[0, first : last + 1], masks.joined[j, first : last + 1], masks.joined[j, first : last + 1])
    for x in range(first, last + 1):
        if chain.moved[x] > 0.0 and not chain.moved[x] * rate + hop_ns <= most_ns:
            bits = np.uint64(0)
            for q in range(chain.replicas.size):
                if chain.moved[x] * chain.rate[i, a, q] + chain.hop_ns[i, a, q] <= most_ns:
                    bits |= masks.table[w, j, q, x]
            masks.spread[0, x] = bits
    size = min(last - first + 1, masks.widest[chain.stage_of[i, a]])
    for t in range(1, masks.power[max(1, size)] + 1):
        step = 1 << (t - 1)
        end = last + 2 - 2 * step
        _join(
            masks.spread[t, first:end], masks.spread[t - 1, first:end], masks.spread[t - 1, first + step : end + step]
        )


@loop
def _clear(row: np.ndarray) -> None:
    for x in range(row.size):
        row[x] = 0


@loop
def _join(out: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    for x in range(out.size):
        out[x] = left[x] | right[x]


@inner
def channel_ns(chain: ChainArrays, i: int, a: int, q: int, x: int) -> int:
    """Return the time in ns that a step sends over the cut before layer x.

    The cut is between a stage at device i and the next on ``replicas[q]``.
    """
    if chain.moved[x] == 0.0:
        return 0
    spent = chain.moved[x] * chain.rate[i, a, q]
    return NEVER_NS if not spent < NEVER_NS else math.ceil(spent) + chain.hop_ns[i, a, q]


@compiled
def trace(chain: ChainArrays, masks: Masks, most_ns: int, num_stages: int, late: bool, out: np.ndarray) -> int:
    """Read one plan of ``num_stages`` stages out of the table; return the time of its slowest stage or channel.

    ``out`` (num_stages, 4): first layer, end, replica count, way to run. At each stage the fewest replicas, then the
    earliest end (``late``: the latest), then the fewest replicas of the next stage.
    """
    return _trace(chain, masks, most_ns, num_stages, late, out)


@loop
def _trace(chain: ChainArrays, masks: Masks, most_ns: int, num_stages: int, late: bool, out: np.ndarray) -> int:
    layers = chain.least_ns.size - 1
    a, i, at, slowest = 0, 0, 0, 0
    while not _has(masks, 0, a, 0, num_stages):
        a += 1
    for n in range(num_stages):
        after = num_stages - 1 - n
        g = 0
        while not (chain.depth_bits[g, after // WORD] >> np.uint64(after % WORD)) & np.uint64(1):
            g += 1
        c = chain.stage_of[i, a]
        j = i + chain.replicas[a]
        end, next_a = layers, 0
        if after:
            end, next_a = _next(chain, masks, most_ns, i, a, at, masks.reach[g, c, at], after, late)
            slowest = max(slowest, channel_ns(chain, i, a, next_a, end))
        k = 0
        while (
            end > chain.fits[k, g, c, at]
            or chain.spent_ns[k, c, end] - chain.spent_ns[k, c, at] + chain.lag_ns[c] > most_ns
        ):
            k += 1
        slowest = max(slowest, chain.spent_ns[k, c, end] - chain.spent_ns[k, c, at] + chain.lag_ns[c])
        out[n, 0], out[n, 1], out[n, 2], out[n, 3] = at, end, chain.replicas[a], k
        i, a, at = j, next_a, end
    return slowest


@inner
def _has(masks: Masks, i: int, a: int, at: int, stages: int) -> bool:
    bit = stages - 1
    return (masks.table[bit // WORD, i, a, at] >> np.uint64(bit % WORD)) & np.uint64(1) != 0


@inner
def _next(
    chain: ChainArrays, masks: Masks, most_ns: int, i: int, a: int, at: int, reach: int, stages: int, late: bool
) -> tuple[int, int]:
    """Return where the stage from layer ``at`` ends, and the index of the replicas of the next of ``stages`` stages."""
    j = i + chain.replicas[a]
    last = min(reach, chain.least_ns.size - 2)
    for step in range(last - at):
        x = last - step if late else at + 1 + step
        for q in range(chain.replicas.size):
            if _has(masks, j, q, x, stages) and channel_ns(chain, i, a, q, x) <= most_ns:
                return x, q
    return -1, -1

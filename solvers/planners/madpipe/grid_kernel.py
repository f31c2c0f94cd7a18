"""MadPipe-DP on the paper's grid: 101 values of t_P, 11 of m_P, 51 of V (sections 4.2.3 and 5.1), rounded up.

This is the only MadPipe code that decides by floats, as the paper does (``mode: paper``). States go from the last
boundary to the first; only reached states exist. The special processor's memory is the literal sum Mem(k, l, g - 1).

R-19: the first stage opens group 1, and a tolerance of 1e-9 stands in every ceil. R-20: the paper leaves the direction
of rounding open; up is safe. What idle time adds to V may leave the grid's range, which goes on with the same step.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.solvers.compiled.decorators import compiled, inner
from penstock.solvers.planners.madpipe.label_kernel import EXISTS, NONE, SPECIAL, TOO_MANY

LOADS, BYTES, DELAYS = 101, 11, 51
REACH = 4 * (DELAYS - 1) + 1
"""The number of values of V: idle time can more than double the sum of all loads."""
PLACES = LOADS * BYTES * REACH
TOLERANCE = 1e-9


@compiled
def grid(line: Any, target: float, most: float, cap: int) -> tuple[int, float, np.ndarray]:
    """Return (EXISTS, NONE or TOO_MANY states; MadPipe-DP(target) if it is at most ``most``; stages).

    Stages are as in ``special``.
    """
    n = line.load_ns.shape[1] - 1
    normals = line.hop_ns.shape[0] - 1
    variants = line.load_ns.shape[0]
    hop = np.zeros(n + 1, dtype=np.int64)
    for k in range(1, n):
        hop[k] = line.hop_ns[:, k].max()
    delay_step = (line.load_ns[0, n] + hop.sum()) / (DELAYS - 1)
    load_step = line.load_ns[0, n] / (LOADS - 1)
    byte_step = line.available_bytes / (BYTES - 1)
    code = np.zeros(1 << 16, dtype=np.int64)
    value = np.zeros(1 << 16, dtype=np.float64)
    origin = np.zeros((1 << 16, 3), dtype=np.int32)
    begin = np.zeros(n + 2, dtype=np.int64)
    code[0], origin[0, 0], origin[0, 1] = normals * PLACES, -1, n
    begin[n], count = 0, 1
    end = np.zeros(n + 1, dtype=np.int64)
    end[n] = 1
    place_of = np.full((normals + 1) * PLACES, -1, dtype=np.int64)
    for k in range(n - 1, -1, -1):
        begin[k] = end[k] = count
        if hop[k] > most:
            continue
        for j in range(k + 1, n + 1):
            if line.load_ns[0, j] - line.load_ns[0, k] > most:
                break
            for i in range(begin[j], end[j]):
                p, rest = code[i] // PLACES, code[i] % PLACES
                busy = (rest % LOADS) * load_step
                resident = (rest // LOADS % BYTES) * byte_step
                delay = (rest // (LOADS * BYTES)) * delay_step
                for choice in range(2 * variants):
                    is_special, r = choice >= variants, choice % variants
                    if (is_special and p == 0 and k > 0) or (not is_special and p == 0):
                        continue
                    load = float(line.load_ns[r, j] - line.load_ns[r, k])
                    group = max(1.0, np.ceil((delay + load) / target - TOLERANCE))
                    each, always = float(line.kept_bytes[r, k, j]), line.fixed_bytes[k, j] + line.work_bytes[r, k, j]
                    if group > line.most_in_flight:
                        continue
                    worst = max(value[i], float(hop[k]))
                    t, m, left = rest % LOADS, rest // LOADS % BYTES, p
                    if is_special:
                        m = np.int64(np.ceil((resident + always + (group - 1) * each) / byte_step - TOLERANCE))
                        t = min(LOADS - 1, np.int64(np.ceil((busy + load) / max(load_step, TOLERANCE) - TOLERANCE)))
                        if m >= BYTES or busy + load > most:
                            continue
                    else:
                        if always + group * each > line.available_bytes:
                            continue
                        worst, left = max(worst, load), p - 1
                    if worst > most:
                        continue
                    next_delay = _then(_then(delay, load, target), float(hop[k]), target)
                    v = np.int64(np.ceil(next_delay / max(delay_step, TOLERANCE) - TOLERANCE))
                    if v >= REACH:
                        continue
                    key = left * PLACES + (v * BYTES + m) * LOADS + t
                    at = place_of[key]
                    if at >= begin[k]:
                        if value[at] <= worst:
                            continue
                    else:
                        if count == len(code):
                            if 2 * count > cap:
                                return TOO_MANY, np.inf, np.empty((0, 3), dtype=np.int64)
                            code, value, origin = _longer(code, value, origin)
                        at = count
                        place_of[key] = count
                        code[count] = key
                        count += 1
                    value[at] = worst
                    origin[at, 0], origin[at, 1], origin[at, 2] = i, k, r + (SPECIAL if is_special else 0)
        end[k] = count
    best, last = np.inf, -1
    for i in range(begin[0], end[0]):
        reached = max(value[i], (code[i] % LOADS) * load_step)
        if reached < best:
            best, last = reached, i
    if last < 0 or best > most:
        return NONE, np.inf, np.empty((0, 3), dtype=np.int64)
    stages = np.empty((n, 3), dtype=np.int64)
    size = 0
    while origin[last, 0] >= 0:
        parent = origin[last, 0]
        stages[size, 0], stages[size, 1], stages[size, 2] = origin[last, 1], origin[parent, 1], origin[last, 2]
        size += 1
        last = parent
    return EXISTS, best, stages[:size].copy()


@compiled
def _longer(code: np.ndarray, value: np.ndarray, origin: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    count = len(code)
    codes, values = np.empty(2 * count, dtype=np.int64), np.empty(2 * count, dtype=np.float64)
    origins = np.empty((2 * count, 3), dtype=np.int32)
    codes[:count], values[:count], origins[:count] = code, value, origin
    return codes, values, origins


@inner
def _then(delay: float, more: float, target: float) -> float:
    """Compute x (+) y of section 4.2.2 with target period T̂."""
    filled = np.ceil(delay / target - TOLERANCE)
    if filled == np.ceil((delay + more) / target - TOLERANCE):
        return delay + more
    return target * filled + more

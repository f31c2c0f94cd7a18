"""Lower bounds phi[s, n] on the suffix problems of a line, without search (BOUNDS Part II, 1).

First the windows of ``kernels.windows`` for n micro-batches alone on the stages from s on; then, along each row:

* transfer: phi[s, n] >= F + out + phi[s + 1, n] + home + B;
* step: phi[s, n + 1] >= phi[s, n] + max(F, B): leave out the last micro-batch, or backwards in time the first;
* superadditivity with shift: phi[s, a + b + K - 1] >= phi[s, a] + phi[s, b], because forward a - 1 + K starts after
  the end of backward a - 1, and the b micro-batches from there on follow.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.bounds.suffix.state_kernel import DELAY, SHARED, Line
from penstock.solvers.bounds.windows_kernel import window_span
from penstock.solvers.compiled.decorators import inner, loop

EVERY, PARTS = 256, 64
"""Most micro-batches up to which windows are computed for every number of them, and most of the smaller of two parts.
"""


@loop
def fill(line: Line, around: np.ndarray) -> None:
    """Write ``line.phi`` (S, M + 1); ``around`` (S,) is scratch."""
    stages, most = line.forward.size, line.phi.shape[1] - 1
    around[stages - 1] = 0
    for s in range(stages - 2, -1, -1):
        inside = line.forward[s + 1] + around[s + 1] + line.backward[s + 1]
        around[s] = line.out[s] + inside + line.home[s]
    for s in range(stages - 1, -1, -1):
        line.phi[s, 0] = 0
        for n in range(1, most + 1):
            line.phi[s, n] = _windows(line, around, s, n) if n <= EVERY or n == most else 0
        close_row(line, s, 1)


@loop
def close_row(line: Line, s: int, low: int) -> None:
    """Carry the bounds of the row before, and of this row, to all n from ``low`` on."""
    phi, most, limit = line.phi, line.phi.shape[1] - 1, line.limit[s]
    step = max(line.forward[s], line.backward[s])
    for n in range(low, most + 1):
        value = max(phi[s, n], phi[s, n - 1] + step)
        if s < line.forward.size - 1:
            way = line.forward[s] + line.out[s] + line.home[s] + line.backward[s]
            value = max(value, phi[s + 1, n] + way)
        both = n - limit + 1
        for a in range(1, min(both // 2, PARTS) + 1):
            value = max(value, phi[s, a] + phi[s, both - a])
        phi[s, n] = value


@inner
def _windows(line: Line, around: np.ndarray, s: int, n: int) -> int:
    """Return head, windows and rest of every stage and channel from s on, for n micro-batches."""
    stages = line.forward.size
    end, head, rest, slowest = 0, 0, 0, 0
    before = line.forward[s]
    longest = before
    for q in range(s, stages):
        forward, backward = line.forward[q], line.backward[q]
        longest = max(longest, forward)
        span_ns = window_span(forward, backward, around[q], min(line.limit[q], n), max(before, forward), slowest, n)
        end = max(end, head + span_ns + rest)
        rest += backward
        slowest = max(slowest, backward)
        if q == stages - 1:
            break
        out, home = line.out[q], line.home[q]
        inside = line.forward[q + 1] + around[q + 1] + line.backward[q + 1]
        if line.lane[q] >= SHARED:
            span_ns = window_span(out, home, inside, n, longest, slowest, n)
        elif line.lane[q] == DELAY:
            span_ns = (n - 1) * max(longest, slowest) + out + inside + home
        else:
            span_ns = (n - 1) * max(longest, out, slowest, home) + out + inside + home
        end = max(end, head + forward + span_ns + rest)
        rest += home
        if line.lane[q] != DELAY:
            slowest = max(slowest, home)
            longest = max(longest, out)
        before = longest
        head += forward + out
    return end

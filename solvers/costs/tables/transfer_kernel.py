"""The time of ``transfer`` in float64 for kernels that try many pairs of stages: ns per byte, and the latency.

Rates are within the rounding of a double of the exact rates; callers round up their products.
"""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import plain
from penstock.solvers.costs.tables.routes import Routes


@plain
def transfer_rate(
    routes: Routes,
    node_of: np.ndarray,
    mode: int,
    rows: int,
    source: np.ndarray,
    k: int,
    target: np.ndarray,
    k2: int,
    load: np.ndarray,
    touched: np.ndarray,
) -> tuple[float, int]:
    """Return (ns per byte of a sample, latency in ns) of one transfer between two sets; a negative rate without a
    route.

    Mode 0: the row slices of all pairs, each resource carrying all that pass it (mode nic); 1 spp, 2 madpipe, 3 dapple
    (ALGORITHMS 1.5).
    """
    if mode == 0:
        return _rate_by_slices(routes, rows, source, k, target, k2, load, touched)
    least, across = np.inf, np.inf
    outside = 0
    for a in range(k):
        away = node_of[source[a]] != node_of[target[0]]
        if away:
            outside += 1
        for b in range(k2):
            if source[a] != target[b]:
                route = routes.route_of[source[a], target[b]]
                if route < 0:
                    return -1.0, 0
                least = min(least, routes.narrowest[route])
                if away:
                    across = min(across, routes.narrowest[route])
    if mode == 1:
        return 1e9 * rows / (least * k * k2), 0
    if mode == 3:
        one = True
        for b in range(k2):
            one = one and node_of[target[b]] == node_of[target[0]]
        if one and outside > 0:
            return 1e9 * rows * outside / (k * across), 0
    return 1e9 * rows / least, 0


@plain
def _rate_by_slices(
    routes: Routes,
    rows: int,
    source: np.ndarray,
    k: int,
    target: np.ndarray,
    k2: int,
    load: np.ndarray,
    touched: np.ndarray,
) -> tuple[float, int]:
    count = 0
    slowest = 0.0
    lag = 0
    a, b = 0, 0
    low = 0
    while a < k and b < k2:
        end, end2 = rows * (a + 1) // k, rows * (b + 1) // k2
        high = min(end, end2)
        if high > low and source[a] != target[b]:
            route = routes.route_of[source[a], target[b]]
            if route < 0:
                return -1.0, 0
            lag = max(lag, routes.latency_ns[route])
            for i in range(routes.start[route], routes.start[route + 1]):
                r = routes.resource[i]
                if load[r] == 0:
                    touched[count] = r
                    count += 1
                load[r] += high - low
        low = high
        if end == high:
            a += 1
        if end2 == high:
            b += 1
    for i in range(count):
        r = touched[i]
        slowest = max(slowest, load[r] / routes.bandwidth[r])
        load[r] = 0
    return 1e9 * slowest, lag

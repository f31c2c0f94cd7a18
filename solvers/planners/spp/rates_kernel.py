"""Time per byte between neighbouring windows of a device order, for PRM's kernel (SPP's b_{r', r}, Algorithm 4)."""

# mypy: disallow-untyped-decorators=False, disallow-any-generics=False, warn-return-any=False

from __future__ import annotations

import numpy as np

from penstock.solvers.compiled.decorators import compiled
from penstock.solvers.costs.infinity import UNLIMITED
from penstock.solvers.costs.tables.routes import Routes
from penstock.solvers.costs.tables.transfer_kernel import transfer_rate


@compiled
def adjacent_rates(bandwidth: np.ndarray, replicas: np.ndarray, spread: bool, rate: np.ndarray) -> None:
    """Fill in 1e9 over the narrowest bandwidth between neighbouring windows of the order.

    ``spread``: over all k k' links. ``bandwidth`` (V, V) int64 in the order; ``rate`` (V, R, R) float64, infinite where
    it stays untouched. O(V^3).
    """
    devices = bandwidth.shape[0]
    for j in range(1, devices):
        narrowest = np.full(devices - j, UNLIMITED)
        a = 0
        for back in range(1, j + 1):
            running = UNLIMITED
            for v in range(j, devices):
                narrowest[v - j] = min(narrowest[v - j], bandwidth[j - back, v])
            if a < replicas.size and replicas[a] == back:
                q = 0
                for v in range(j, devices):
                    running = min(running, narrowest[v - j])
                    if q < replicas.size and replicas[q] == v - j + 1:
                        if running > 0:
                            links = back * replicas[q] if spread else 1
                            rate[j - back, a, q] = 1e9 / (np.float64(running) * links) * (1.0 + 4.4e-16)
                        q += 1
                a += 1


@compiled
def sliced_rates(
    routes: Routes,
    node_of: np.ndarray,
    order: np.ndarray,
    mode: int,
    rows: int,
    replicas: np.ndarray,
    rate: np.ndarray,
    lag_ns: np.ndarray,
) -> None:
    """Fill in ns per byte and latency between neighbouring windows of the order, as ``transfer_rate`` computes them.

    DAPPLE's rule (mode 3) differs between the two directions: there the rate is the mean of both.
    """
    load = np.zeros(len(routes.bandwidth), dtype=np.int64)
    touched = np.zeros(len(routes.bandwidth), dtype=np.int64)
    devices = len(order)
    for i in range(devices):
        for a in range(replicas.size):
            j = i + replicas[a]
            for q in range(replicas.size):
                if j + replicas[q] > devices:
                    break
                source, target = order[i:j], order[j : j + replicas[q]]
                k, k2 = j - i, replicas[q]
                slowest, lag = transfer_rate(routes, node_of, mode, rows, source, k, target, k2, load, touched)
                if mode == 3 and slowest >= 0.0:
                    back, _lag = transfer_rate(routes, node_of, mode, rows, target, k2, source, k, load, touched)
                    slowest = (slowest + back) / 2
                if slowest >= 0.0:
                    rate[i, a, q] = slowest / rows * (1.0 + 4.4e-16)
                    lag_ns[i, a, q] = lag

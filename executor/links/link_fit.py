"""A link's bandwidth and latency from the times of messages of several sizes: ``t = latency + bytes / bandwidth``."""

from __future__ import annotations

from collections.abc import Mapping

LEAST_NS_PER_BYTE = 1e-6
"""Least time per byte: no link carries a petabyte per second, so shorter times differ by noise alone."""


def fit(one_way_ns: Mapping[int, int]) -> tuple[int, int]:
    """Fit bandwidth (bytes/s) and latency (ns) by least squares of relative errors; ``one_way_ns`` by bytes.

    Each size is weighted by its time, so that small messages determine the latency and large ones the bandwidth. Where
    larger messages took no more time, the result is the largest one's rate, which is a lower bound, and no latency.
    """
    weights = {size: 1 / max(1, t) ** 2 for size, t in one_way_ns.items()}
    total = sum(weights.values())
    mean_size = sum(w * size for size, w in weights.items()) / total
    mean_time = sum(w * one_way_ns[size] for size, w in weights.items()) / total
    spread = sum(w * (size - mean_size) ** 2 for size, w in weights.items())
    common = sum(w * (size - mean_size) * (one_way_ns[size] - mean_time) for size, w in weights.items())
    ns_per_byte = common / spread if spread else 0.0
    if ns_per_byte < LEAST_NS_PER_BYTE:
        largest = max(one_way_ns)
        return max(1, round(largest / max(1, one_way_ns[largest]) * 1e9)), 0
    return max(1, round(1e9 / ns_per_byte)), max(0, round(mean_time - ns_per_byte * mean_size))

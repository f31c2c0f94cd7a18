"""Prices of classes of devices at which the cheapest plan costs the largest share of what all devices cost.

The least cost of a plan is concave in the prices and what all devices cost is linear, so the share has no local maxima;
it has kinks, so that steps in one price at a time may end early. Every price is sound (BOUNDS section 12).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

HIGHEST = 256
"""The highest price of a device: prices are whole numbers."""
STEPS = (2.0, 1.4, 1.15)
"""The factors by which one price rises or falls, until none of them helps."""


def highest(share: Callable[[np.ndarray, float], float], classes: int) -> np.ndarray:
    """Return the prices (classes,) from which no step raises the share, or the first at which it is above 1.

    ``share(prices, known)`` may return any value up to ``known`` where it is no larger than that.
    """
    prices = np.full(classes, HIGHEST)
    best = share(prices, 0.0)
    for step in STEPS:
        raised = True
        while raised and best <= 1:
            raised = False
            for number in range(1, classes):  # prices count in proportion to the first
                for factor in (1 / step, step):
                    tried = _changed(prices, number, factor)
                    found = share(tried, best)
                    if found > best:
                        prices, best, raised = tried, found, True
                        break
    return prices


def _changed(prices: np.ndarray, number: int, factor: float) -> np.ndarray:
    """Return the prices with one of them changed, the largest of them ``HIGHEST``."""
    tried = np.maximum(1.0, prices)
    tried[number] *= factor
    return np.asarray(np.rint(tried * HIGHEST / tried.max()), dtype=prices.dtype)

"""Prices of classes of devices at which the cheapest plan costs the largest share of the price of all devices.

The least cost of a plan is concave in the prices and the cost of all devices is linear, so the share has no local
maxima. It has kinks, so that steps in one price at a time may end early. Every price is sound (BOUNDS section 12).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

HIGHEST = 256
"""The highest price of a device: prices are whole numbers."""
STEPS = (2.0, 1.4, 1.15)
"""The factors by which one price rises or falls, until no factor helps."""


def highest(share: Callable[[np.ndarray, float], float], prices: np.ndarray) -> np.ndarray:
    """Return the prices, starting from ``prices`` (classes,), at which no step raises the share, or the share exceeds
    1.

    ``share(prices, known)`` may return any value up to ``known`` where the share is no larger than ``known``.
    """
    best = share(prices, 0.0)
    for step in STEPS:
        raised = True
        while raised and best <= 1:
            raised = False
            for number in range(1, prices.size):  # only their ratios count
                for factor in (1 / step, step):
                    tried = _changed(prices, number, factor)
                    raised_share = share(tried, best)
                    if raised_share > best:
                        prices, best, raised = tried, raised_share, True
                        break
    return prices


def _changed(prices: np.ndarray, number: int, factor: float) -> np.ndarray:
    """Return the prices with one of them changed, scaled so that the largest is ``HIGHEST``."""
    tried = np.maximum(1.0, prices)
    tried[number] *= factor
    return np.asarray(np.rint(tried * HIGHEST / tried.max()), dtype=prices.dtype)

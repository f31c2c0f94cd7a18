"""Fit the costs of layers to the measured times of stages.

A trace has times of whole stages only. The fitted costs explain all stages and differ least from the profile: least
squares in which a stage that is off by ``NOISE`` weighs as much as one layer that is off by all of
its cost. Within one stage that scales all layers by the same factor; traces of other cuts tell them apart. The profile
is scaled as a whole first, and the fit is repeated from its own result, so that a profile that is far off does no harm.
"""

from __future__ import annotations

import numpy as np

NOISE = 0.01
"""Relative error of a stage's measured time."""
PASSES = 3
_LEAST = 0.1
"""The smallest part of its cost that a layer keeps in one pass, so that no cost becomes zero or negative."""


def fit(parts: np.ndarray, totals_ns: np.ndarray, prior_ns: np.ndarray) -> np.ndarray:
    """Return costs (n,), float64, such that ``parts @ costs`` is close to ``totals_ns``.

    ``parts`` (m, n): how often each cost occurs in each total; ``prior_ns`` (n,): the costs assumed so far. Costs
    in no total follow the others; a total whose costs are all 0 so far is distributed evenly among them.
    """
    costs: np.ndarray = prior_ns.astype(np.float64)
    empty = (parts @ costs == 0) & (totals_ns > 0)
    costs = np.where((costs == 0) & (parts[empty].sum(axis=0) > 0), 1.0, costs)
    explained = parts @ costs
    if not explained.any():
        return costs
    costs = costs * (totals_ns.sum() / explained.sum())
    for _ in range(PASSES):
        costs = np.maximum(_nearest(parts, totals_ns, costs), _LEAST * costs)
    return costs


def _nearest(parts: np.ndarray, totals_ns: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Solve a ridge regression around ``costs``: deviations are counted in units of sqrt(cost × mean cost)."""
    used = costs > 0
    unit = np.sqrt(costs[used] * costs[used].mean())
    scale = 1 / (NOISE * np.maximum(totals_ns, 1.0))
    rows = np.vstack((parts[:, used] * unit * scale[:, None], np.eye(len(unit))))
    wanted = np.concatenate(((totals_ns - parts @ costs) * scale, np.zeros(len(unit))))
    moved, *_ = np.linalg.lstsq(rows, wanted, rcond=None)
    moved_costs = costs.copy()
    moved_costs[used] += unit * moved
    return moved_costs

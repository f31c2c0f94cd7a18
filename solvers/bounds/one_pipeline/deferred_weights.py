"""Weight gradients that wait for the end of a step, at a price: the limit that memory sets to them (BOUNDS section 11).

After its last input gradient, a device of a plan with split backwards may still compute weight gradients, while its
last gradient travels back. All weight gradients that wait then are in its memory, each with the bytes that its
micro-batch keeps of the layer. At a price of a byte, a layer's weight gradients either wait, for these bytes, or are
work like all other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.one_pipeline.held_bytes import SURE, least_kept, static_bytes
from penstock.solvers.bounds.one_pipeline.layer_costs import DeviceRange
from penstock.solvers.bounds.one_pipeline.layer_runs import LOST_NS
from penstock.solvers.bounds.one_pipeline.slice_times import LeastTimes
from penstock.solvers.costs.infinity import FAR_NS
from penstock.solvers.costs.memory import free_bytes
from penstock.solvers.model.problem import Problem, prefix_sums


class DeferredWeights(NamedTuple):
    """The cost of layers when their weight gradients wait.

    * ``before`` [option, L]: ns of a device in a step without weight gradients.
    * ``kept`` (L,): bytes of all samples.
    * ``static`` [option, L]: bytes of parameters, gradients and optimizer states of all holders.
    * ``room`` (devices + 1,): bytes of that number of devices, the largest first.
    * ``price``: ns for a byte, 0 if memory holds everything that waits.
    """

    before: np.ndarray
    kept: np.ndarray
    static: np.ndarray
    room: np.ndarray
    price: float

    def work(self, work: np.ndarray, weight: int) -> np.ndarray:
        """Return [option, L] ns, rounded down: ``weight`` halves of the waiting or completed work, else all of
        ``work``.

        Impossible options stay impossible.
        """
        waits = self.before + np.floor(self.price * self.kept * (1 - SURE)).astype(np.int64)
        static_ns = np.floor(self.price * self.static * (1 - SURE)).astype(np.int64)
        weighted = (weight * (np.minimum(work, waits) + static_ns) + (2 - weight) * work) // 2
        return np.asarray(np.where(work < min(FAR_NS, LOST_NS), weighted, work))

    def most_ns(self, devices: int) -> int:
        """Return the price of all bytes that this number of devices can hold, in ns, rounded up."""
        return int(np.ceil(self.price * float(self.room[devices]) * (1 + SURE))) if self.price > 0 else 0


def deferred_weights(
    problem: Problem, options: list[DeviceRange], times: list[LeastTimes], *, fits: bool
) -> DeferredWeights:
    """Return the weight gradients that may wait.

    ``times``: by option. ``fits``: whether waiting has a price, which holds only for plans that fit into memory.
    """
    static = static_bytes(problem, options, gradients=True)
    free = sorted((max(0, free_bytes(problem, (device,))) for device in range(problem.num_devices)), reverse=True)
    before = np.stack([each.before_weights for each in times])
    weights = np.maximum(0, np.min([each.work for each in times], axis=0) - before.min(axis=0))
    kept = problem.global_batch_size * least_kept(problem)
    room = prefix_sums(free)
    price = _best_price(weights, kept, float(room[-1]) - float(static[0].sum())) if fits else 0.0
    return DeferredWeights(before, kept, static, room, price)


def _best_price(weights: np.ndarray, kept: np.ndarray, room: float) -> float:
    """Return the price at which least may wait: the price of the last layer that fits, the most expensive first."""
    sized = (kept > 0) & (weights > 0)
    price = weights[sized] / kept[sized]
    order = np.argsort(-price, kind="stable")
    full = np.cumsum(kept[sized][order]) > max(0.0, room)
    return float(price[order][np.argmax(full)]) if full.any() else 0.0

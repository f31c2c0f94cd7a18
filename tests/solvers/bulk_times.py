"""Bulk simulation of one allocation."""

from __future__ import annotations

import numpy as np

from penstock.solvers.improve.neighbourhood.batch import Catalogue
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem


def makespans_ns(problem: Problem, allocation: Allocation, warmups: np.ndarray, threads: int = 1) -> np.ndarray:
    """Return (N,) the times of an allocation under each of the warm-ups (N, S); see ``Catalogue.makespans_ns``."""
    catalogue = Catalogue(problem, allocation.num_micro_batches)
    rows = catalogue.rows([allocation.stages])
    return catalogue.makespans_ns(rows.of(np.zeros(len(warmups), dtype=np.int64)), warmups, threads)

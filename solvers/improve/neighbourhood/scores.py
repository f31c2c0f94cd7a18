"""Scores of plans: a proven bound of each, then the judge's time under the usual warm-ups, both in bulk.

Only plans whose bound may be below the best time are simulated, least bounds first. Memory clamps each warm-up twice:
to the micro-batches that surely fit, and to the micro-batches that may fit at best. The judge decides whether they do.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.solvers.bounds.chain_costs import Rows
from penstock.solvers.costs.infinity import NEVER_NS
from penstock.solvers.improve.neighbourhood.batch import Catalogue
from penstock.solvers.improve.neighbourhood.moves import Stages
from penstock.solvers.model.allocation import single_pipeline
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.schedules.support.fitting_orders import judged
from penstock.solvers.schedules.support.recomputed import recomputed

MOST_SIMULATED = 160
"""The most plans of one question that are simulated."""
ATTEMPTS = 12
"""Warm-ups that are judged before a plan counts as one that does not fit."""
CANDIDATE_NS, PAIR_NS, SHARED_NS, PRIVATE_NS, JUDGED_NS = 40_000, 1_000, 35, 12, 500
"""Approximate costs on one core, in ns.

Per plan, per pair of devices of new stages and edges, per operation in a shared network and in a private one, and per
judged operation.
"""

Vector = tuple[int, ...]
Plan = tuple[int, Stages]
"""A number of micro-batches and the stages."""


class Score(NamedTuple):
    """A plan's least time over the warm-ups, if that fits, and its proven bound; ``warmups`` by rising time."""

    value_ns: int
    bound_ns: int
    plan: Plan
    warmups: tuple[tuple[int, Vector], ...]


@dataclass
class Scores:
    """Questions to one request's catalogues. ``spent``: their cost so far, about in ns of one core, but counted."""

    problem: Problem
    spent: int = 0
    _pairs: int = 0
    _catalogues: dict[int, Catalogue] = field(default_factory=dict)
    _seen: set[tuple[int, tuple[int, ...]]] = field(default_factory=set)

    def fresh(self, plans: Iterable[Plan], below_ns: int) -> list[Score]:
        """Return the scores of plans not scored before that may be below ``below_ns``, by rising time."""
        groups: dict[int, list[Stages]] = {}
        count = 0
        for number, stages in plans:
            count += 1
            key = number, tuple(self._catalogue(number).stage(stage) for stage in stages)
            if key not in self._seen and self._legal(number, stages):
                self._seen.add(key)
                groups.setdefault(number, []).append(stages)
        scores = [score for number in sorted(groups) for score in self._scored(number, groups[number], below_ns)]
        pairs = sum(catalogue.pairs for catalogue in self._catalogues.values())
        self.spent += CANDIDATE_NS * count + PAIR_NS * (pairs - self._pairs)
        self._pairs = pairs
        return sorted(scores, key=lambda score: score.value_ns)

    def _scored(self, number: int, plans: Sequence[Stages], below_ns: int) -> list[Score]:
        catalogue = self._catalogue(number)
        rows = catalogue.rows(plans)
        bounds = catalogue.bounds_ns(rows)
        ahead = np.argsort(bounds, kind="stable")[:MOST_SIMULATED]
        chosen = ahead[bounds[ahead] < below_ns]
        if not len(chosen):
            return []
        rows = rows.of(chosen)
        vectors, values = self._simulated(catalogue, rows, usual(catalogue, rows))
        scores = []
        for n, i in enumerate(chosen.tolist()):
            count = int(rows.lengths[n])
            by_time = sorted((int(v), tuple(k[:count].tolist())) for v, k in zip(values[n], vectors[:, n], strict=True))
            timed = tuple(dict.fromkeys(each for each in by_time if each[0] < NEVER_NS))
            if timed and timed[0][0] < below_ns:
                scores.append(Score(timed[0][0], int(bounds[i]), (number, plans[i]), timed))
        return scores

    def _simulated(self, catalogue: Catalogue, rows: Rows, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the vectors (V, N, S) and the times (N, V); vectors that a plan has twice are simulated once."""
        kinds, count = vectors.shape[:2]
        values = np.full((count, kinds), NEVER_NS, dtype=np.int64)
        new = np.ones((kinds, count), dtype=bool)
        for k in range(1, kinds):
            for other in range(k):
                new[k] &= (vectors[k] != vectors[other]).any(axis=1)
        kind, which = np.nonzero(new)
        self._charge(catalogue.num_micro_batches * int(rows.lengths[which].sum()))
        values[which, kind] = catalogue.makespans_ns(rows.of(which), vectors[kind, which])
        return vectors, values

    def fitting(self, score: Score, below_ns: int) -> JudgedPlan | None:
        """Return the plan under the first of its warm-ups that fits, if it takes less than ``below_ns``.

        A warm-up that does not fit is tried again with one micro-batch less on the stage that lacks memory.
        """
        number, stages = score.plan
        plan = single_pipeline(stages, number)
        ahead = list(score.warmups)
        heapq.heapify(ahead)
        tried: set[Vector] = set()
        while ahead and len(tried) < ATTEMPTS:
            value, vector = heapq.heappop(ahead)
            if value >= below_ns:
                return None
            if vector in tried:
                continue
            tried.add(vector)
            self.spent += JUDGED_NS * 4 * number * len(stages)
            trial = judged(self.problem, plan, early_backward(self.problem, plan, warmup=vector), below_ns)
            if trial.plan is not None:
                return self._recomputed(trial.plan)
            if trial.short is not None:
                lacking = plan.held_stages[trial.short.device][0]
                if vector[lacking] > 1:
                    less = (*vector[:lacking], *(min(k, vector[lacking] - 1) for k in vector[lacking:]))
                    heapq.heappush(ahead, (self.times(score.plan, [less])[0], less))
        return None

    def _recomputed(self, trial: JudgedPlan) -> JudgedPlan:
        """Return the plan with recomputations as separate operations, if that is quicker and fits."""
        if not any(stage.recompute for stage in trial.allocation.stages):
            return trial
        apart = recomputed(trial.allocation, trial.orders)
        return judged(self.problem, trial.allocation, apart, trial.value_ns).plan or trial

    def times(self, plan: Plan, vectors: Sequence[Vector]) -> list[int]:
        """Return the times of one plan under some warm-ups."""
        catalogue = self._catalogue(plan[0])
        rows = catalogue.rows([plan[1]]).of(np.zeros(len(vectors), dtype=np.int64))
        self._charge(plan[0] * len(plan[1]) * len(vectors))
        values: list[int] = catalogue.makespans_ns(rows, np.asarray(vectors, dtype=np.int64)).tolist()
        return values

    def _charge(self, passes: int) -> None:
        """Charge for simulating ``passes`` micro-batches of a stage: two operations and two transfers each."""
        self.spent += 4 * passes * (SHARED_NS if self.problem.rules.shared else PRIVATE_NS)

    def _catalogue(self, number: int) -> Catalogue:
        if number not in self._catalogues:
            self._catalogues[number] = Catalogue(self.problem, number)
        return self._catalogues[number]

    def _legal(self, number: int, stages: Stages) -> bool:
        """Return whether every replica has enough samples and pins are kept."""
        problem = self.problem
        least = problem.global_batch_size // number
        if any(stage.replicas * problem.min_slice > least for stage in stages):
            return False
        return not problem.pins or broken_pin(problem, single_pipeline(stages, number)) is None


def usual(catalogue: Catalogue, rows: Rows) -> np.ndarray:
    """Return the usual warm-ups (V, N, S), clamped twice, never growing from a stage to the next.

    They are P_A, P_B, two between them, SPP's PE (ALGORITHMS 3.3), and all micro-batches at once.
    """
    number = catalogue.num_micro_batches
    depth = np.maximum(rows.lengths[:, None] - np.arange(rows.stages.shape[1]), 1)
    whole = np.full_like(depth, number)
    wanted = np.stack(
        [depth, np.minimum(depth + 1, 2 * depth - 1), (3 * depth - 1) // 2, 2 * depth - 1, 4 * depth - 3, whole]
    )
    clamps = (catalogue.room(rows), np.maximum(catalogue.limits(rows), 1))
    clamped = np.concatenate([np.minimum(np.minimum(wanted, number), clamp) for clamp in clamps])
    return np.minimum.accumulate(clamped, axis=2)

"""Parameters tied across stages: their gradients are reduced separately, after the buckets and before the updates.

A parameter that layers of one stage have in common is in that stage's buckets. Where its layers lie in different
stages of a pipeline, every rank with a copy takes part in one all-reduce of its gradient (REDUCE_SHARED). Ranks wait
for it: in a flushed step after all their operations and buckets, in a periodic plan before the step of the rank's
lowest stage that has a copy; several are summed in the order of the profile (``lowering.updates``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from penstock.solvers.compiled.fields import Fields
from penstock.solvers.costs.buckets import bucket_bytes
from penstock.solvers.costs.collectives import all_reduce_ns, ring_resources
from penstock.solvers.costs.memory import owned_of
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.problem import Problem, prefix_sums
from penstock.solvers.model.update_rules import UpdateRule

SUMMING_RULES: frozenset[UpdateRule] = frozenset({"synchronous", "double_buffered"})
"""Update rules under which all stages have one version of a tied parameter; no rank runs such plans of other rules."""


class TiedSum(NamedTuple):
    """One tie's all-reduce: the stages with a copy, in all pipelines, their devices, ascending, and its cost.

    The sums of cells among their GPUs are in the buckets of the first layer that uses the tie.
    """

    name: str
    stages: tuple[int, ...]
    devices: tuple[int, ...]
    bytes: int
    duration_ns: int
    resources: tuple[int, ...]


@Fields.register
class Ties(NamedTuple):
    """Arrays for kernels, by tie: its lowest stage, duration and rounds.

    The rounds of tie k are numbered from ``run_start[k]`` on. ``periodic``: steps are in the rows, and wait there.
    """

    periodic: bool
    stage: np.ndarray
    tie_ns: np.ndarray
    rounds: np.ndarray
    run_start: np.ndarray


def tied_stages(allocation: Allocation, layers: Sequence[int]) -> list[list[int]]:
    """Return the stages of each pipeline that hold any of the layers."""
    users: list[list[int]] = [[] for _ in allocation.pipelines]
    for s, stage in enumerate(allocation.stages):
        if any(stage.first <= layer <= stage.last for layer in layers):
            users[allocation.pipeline_of[s]].append(s)
    return users


def trained_ties(problem: Problem) -> list[tuple[str, tuple[int, ...], int]]:
    """Return name, layers and bytes of the tied parameters that are trainable in the first of their layers."""
    trained = np.diff(problem.trainable_bytes)
    return [tie for tie in problem.shared_parameters if tie[2] > 0 and trained[tie[1][0]] > 0]


@lru_cache(maxsize=64)
def tied_sums(problem: Problem, allocation: Allocation, rule: UpdateRule = "synchronous") -> tuple[TiedSum, ...]:
    """Return the ties that span several stages of a pipeline, in the order of the profile.

    There are none for frozen parameters (``trained_ties``), and under rules that do not sum ties. A sum whose stages
    are all on one device takes no time.
    """
    if rule not in SUMMING_RULES:
        return ()
    sums = []
    for name, layers, size in trained_ties(problem):
        users = tied_stages(allocation, layers)
        if all(len(stages_of) < 2 for stages_of in users):
            continue
        stages = tuple(sorted(s for stages_of in users for s in stages_of))
        devices = tuple(sorted({d for s in stages for d in allocation.stages[s].devices}))
        links = ring_resources(problem, devices) if problem.rules.shared else ()
        owned = owned_of(problem, size)
        sums.append(TiedSum(name, stages, devices, owned, all_reduce_ns(problem, owned, devices), links))
    return tuple(sums)


def tie_arrays(allocation: Allocation, sums: Sequence[TiedSum], every: Sequence[int], periodic: bool) -> Ties:
    """Return the kernels' arrays of the sums; ``every``: micro-batches per round of each stage."""
    stage = [each.stages[0] for each in sums]
    rounds = [allocation.num_micro_batches // every[s] for s in stage]
    return Ties(
        periodic=periodic,
        stage=np.asarray(stage, dtype=np.int64),
        tie_ns=np.asarray([each.duration_ns for each in sums], dtype=np.int64),
        rounds=np.asarray(rounds, dtype=np.int64),
        run_start=prefix_sums(rounds),
    )


def bytes_of_spans(problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return, for stages of layers [i, j), masks (L + 1, L + 1) of stages, each with prefix sums of bucket bytes.

    A tie counts in the first of its layers if the stage has all of them. Every stage is in exactly one mask.
    """
    first, stop = np.ogrid[: problem.num_layers + 1, : problem.num_layers + 1]
    whole: np.ndarray = np.zeros((problem.num_layers + 1, problem.num_layers + 1), dtype=np.int64)
    for _name, layers, _size in problem.shared_parameters:
        parted = (first <= layers[0]) & (layers[0] < stop) & ((min(layers) < first) | (max(layers) >= stop))
        whole = np.unique(whole * 2 + parted, return_inverse=True)[1].reshape(parted.shape).astype(np.int64)
    masks = []
    for number in np.unique(whole).tolist():
        mask = whole == number
        i, j = (int(v) for v in np.argwhere(mask)[0])
        masks.append((mask, bucket_bytes(problem, i, j - 1)))
    return masks

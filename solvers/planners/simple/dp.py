"""Data parallelism with gradient accumulation, with and without all-reduce overlap (ALGORITHMS 7.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.model.allocation import Allocation, Stage, single_pipeline
from penstock.solvers.model.micro_batches import Batch, candidates
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.setting import Setting

OVERLAP = Option(
    "overlap",
    "best",
    "all-reduce buckets leave during the last backward, after it, or whichever is faster",
    choices=("best", "yes", "no"),
)
OPTIONS = (OVERLAP,)


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield every number of accumulation steps, on all devices that the micro-batches feed."""
    problem = setting.problem
    overlaps = {"best": (True, False), "yes": (True,), "no": (False,)}[OVERLAP.of(options)]
    if not problem.rules.overlap_all_reduce and OVERLAP.of(options) == "best":
        overlaps = (False,)
    for batch in candidates(problem, (1, problem.num_devices)):
        yield Proposal(data_parallel(problem, batch), ("early-backward",), "A", overlaps)


def data_parallel(problem: Problem, batch: Batch) -> Allocation:
    """Return one stage on all devices, or on as many as the micro-batches feed."""
    replicas = max(1, min(problem.num_devices, batch.replicas_fed(problem.min_slice)))
    stage = Stage(0, problem.num_layers - 1, tuple(range(replicas)))
    return single_pipeline((stage,), batch.num_micro_batches)

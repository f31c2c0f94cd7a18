"""Data parallelism with gradient accumulation, with and without all-reduce overlap (ALGORITHMS 7.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.simple.data_parallel import data_parallel

OVERLAP = Option(
    "overlap",
    "best",
    "all-reduce buckets leave during the last backward, after it, or whichever is faster",
    choices=("best", "yes", "no"),
)
OPTIONS = (OVERLAP,)


def proposals(problem: Problem, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Every number of accumulation steps, on all devices that the micro-batches feed."""
    overlaps = {"best": (True, False), "yes": (True,), "no": (False,)}[OVERLAP.of(options)]
    if not problem.rules.overlap_all_reduce and OVERLAP.of(options) == "best":
        overlaps = (False,)
    for batch in candidates(problem, (1, problem.num_devices)):
        yield Proposal(data_parallel(problem, batch), ("early-backward",), "A", overlaps)

"""Naive model parallelism: the model spread over the devices, one micro-batch in it at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.allocators.block_partition import By
from penstock.solvers.allocators.model_parallel import model_parallel
from penstock.solvers.allocators.pinned_chunks import kept_or_as_it_is
from penstock.solvers.batches import candidates
from penstock.solvers.planners.gpipe import STAGES, stage_counts
from penstock.solvers.planners.options import Option
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.problem import Problem

BY = Option[By]("by", "parameters", "what the devices share evenly", choices=("time", "layers", "parameters"))
OPTIONS = (BY, STAGES)


def proposals(problem: Problem, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Each number of devices with each number of micro-batches."""
    overlaps = (problem.rules.overlap_all_reduce,)
    for num_stages in stage_counts(problem, options):
        for batch in candidates(problem):
            allocation = kept_or_as_it_is(problem, model_parallel(problem, batch, num_stages, by=BY.of(options)))
            yield Proposal(allocation, ("model-parallel",), "best", overlaps)

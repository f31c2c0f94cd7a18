"""Naive model parallelism: the model spread over the devices, one micro-batch in it at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.block_partition import By
from penstock.solvers.planners.chunked.pinned_cuts import kept_or_as_it_is
from penstock.solvers.planners.proposal import Proposal
from penstock.solvers.planners.simple.device_chain import model_parallel
from penstock.solvers.planners.simple.gpipe import STAGES, stage_counts

BY = Option[By]("by", "parameters", "what the devices share evenly", choices=("time", "layers", "parameters"))
OPTIONS = (BY, STAGES)


def proposals(problem: Problem, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Each number of devices with each number of micro-batches."""
    overlaps = (problem.rules.overlap_all_reduce,)
    for num_stages in stage_counts(problem, options):
        for batch in candidates(problem):
            allocation = kept_or_as_it_is(problem, model_parallel(problem, batch, num_stages, by=BY.of(options)))
            yield Proposal(allocation, ("model-parallel",), "best", overlaps)

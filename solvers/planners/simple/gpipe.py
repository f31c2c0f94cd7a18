"""GPipe: block partition, one device per stage, all forwards before all backwards (ALGORITHMS 7.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.schemas.errors import InvalidDocument
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.block_partition import By, block_partition
from penstock.solvers.planners.chunked.pinned_cuts import kept_or_as_it_is
from penstock.solvers.planners.proposal import Proposal

STAGES = Option("stages", 0, "number of stages; 0 tries each number that the cluster allows", low=0)
BY = Option[By]("by", "time", "what the stages share evenly", choices=("time", "layers", "parameters"))
OPTIONS = (BY, STAGES)
MAX_TRIED = 32


def proposals(problem: Problem, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Each number of stages with each number of micro-batches."""
    overlaps = (problem.rules.overlap_all_reduce,)
    for num_stages in stage_counts(problem, options):
        for batch in candidates(problem):
            allocation = kept_or_as_it_is(problem, block_partition(problem, batch, num_stages, by=BY.of(options)))
            yield Proposal(allocation, ("gpipe",), "best", overlaps)


def stage_counts(problem: Problem, options: Mapping[str, object]) -> list[int]:
    """The numbers of stages to try, the most first; beyond ``MAX_TRIED`` thinned evenly, 1 and all kept."""
    most = min(problem.num_devices, int(problem.cuttable.sum()) + 1)
    asked = STAGES.of(options)
    if asked > most:
        raise InvalidDocument(
            f"option 'stages' asks for {asked} stages, but {problem.num_devices} devices and "
            f"{int(problem.cuttable.sum()) + 1} separable blocks of layers allow {most}",
            remedy=f"stages between 1 and {most}, or 0 for all of them",
        )
    if asked:
        return [asked]
    if most <= MAX_TRIED:
        return list(range(most, 0, -1))
    return sorted({1 + round(i * (most - 1) / (MAX_TRIED - 1)) for i in range(MAX_TRIED)}, reverse=True)

"""A line of single devices: GPipe's block partition, and naive model parallelism (ALGORITHMS 7.2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.grid.block_partition import By, block_partition
from penstock.solvers.grid.pinned_cuts import kept_or_as_it_is
from penstock.solvers.grid.places import check_depth
from penstock.solvers.model.micro_batches import candidates, evenly
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.planners.proposal import Proposal, under
from penstock.solvers.planners.setting import Setting

STAGES = Option("stages", 0, "number of stages; 0 tries each number that the cluster allows", low=0)
SHARED: tuple[By, ...] = ("time", "layers", "parameters")
BY_TIME = Option[By]("by", "time", "what the stages share evenly", choices=SHARED)
BY_PARAMETERS = Option[By]("by", "parameters", "what the devices share evenly", choices=SHARED)
MAX_TRIED = 32


def proposals(schedule: str, by: Option[By], setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield each number of stages with each number of micro-batches, under one schedule."""
    problem = setting.problem
    for num_stages in stage_counts(problem, options):
        for batch in candidates(problem):
            allocation = kept_or_as_it_is(problem, block_partition(problem, batch, num_stages, by=by.of(options)))
            yield under(problem, allocation, (schedule,))


def stage_counts(problem: Problem, options: Mapping[str, object]) -> list[int]:
    """Return the numbers of stages to try, the most first; above ``MAX_TRIED`` numbers, evenly thinned."""
    most = min(problem.num_devices, problem.num_blocks)
    number = STAGES.of(options)
    check_depth(problem, "stages", number, most)
    return [number] if number else evenly(range(1, most + 1), MAX_TRIED)[::-1]

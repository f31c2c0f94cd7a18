"""AvgPipe: parallel pipelines on the same devices, averaged elastically (ALGORITHMS 6).

The partition is PipeDream's, the order advance forward propagation. Every setting of the numbers of micro-batches and
of pipelines is judged, which takes the judge seconds and the paper hours. ``paper`` takes the setting that the paper's
predictor finds from one profile, with its formulas as printed, and the forwards in advance that its algorithm 1 finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.judge.shared_processor import disconnected, parallel_pipelines
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.options import PAPER, Option
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.avgpipe.partition import partitions
from penstock.solvers.planners.avgpipe.tuning import Tuner, best_partitions
from penstock.solvers.planners.proposal import Proposal, in_order
from penstock.solvers.planners.setting import Setting
from penstock.solvers.schedules.advance_forward import advance_forward, climb, deltas

STAGES = Option("stages", 0, "number of stages; 0: the partitioner's, and the most that the cluster allows", low=0)
PIPELINES = Option("pipelines", 8, "most parallel pipelines", low=1, high=64)
OPTIONS = (PAPER, STAGES, PIPELINES)
MOST_OPERATIONS = 2_000_000
"""Operations to simulate over all proposals with one partition: a few seconds."""


def proposals(setting: Setting, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Yield each setting of the tuning with each number of forwards in advance, the most promising settings first."""
    problem = setting.problem
    batches = candidates(problem)
    if not batches or "elastic_averaging" not in problem.update_rules:
        return
    paper = PAPER.of(options)
    candidate_stages = partitions(problem, batches, STAGES.of(options))
    joined = [stages for stages in candidate_stages if disconnected(problem, parallel_pipelines(stages, 1, 1)) is None]
    if not joined:
        allocation = parallel_pipelines(candidate_stages[0], 1, batches[-1].num_micro_batches)
        yield in_order(problem, allocation, advance_forward(problem, allocation), "elastic_averaging")
        return
    ranked, before = best_partitions(problem, batches, joined)
    for stages in ranked[:1] if paper else ranked:
        tuner = Tuner(problem, batches, stages, PIPELINES.of(options), "paper" if paper else "wall", before)
        yield from _settings(tuner, paper)
        before = tuner.simulations


def _settings(tuner: Tuner, paper: bool) -> Iterator[Proposal]:
    operations = 0
    simulated = tuner.problem.pipeline_run is None
    name = ("profile by simulation" if simulated else "profile") if paper else "traverse"
    for number, degrees in enumerate([tuner.predicted()] if paper else tuner.settings(), start=1):
        allocation = tuner.allocation(degrees)
        for orders in [_by_algorithm_1(tuner, allocation)] if paper else orders_of(tuner, allocation):
            operations += sum(len(row.operations) for row in orders.rows)
            note = f"tuning {name}: {_count(number, 'setting')}, {_count(tuner.simulations, 'simulation')}"
            yield in_order(tuner.problem, allocation, orders, "elastic_averaging", note)
        if operations > MOST_OPERATIONS:
            break


def _by_algorithm_1(tuner: Tuner, allocation: Allocation) -> Orders:
    """Return the orders that the paper's algorithm 1 ends with."""
    problem = tuner.problem
    delta, _judged = climb(lambda d: tuner.time_ns(allocation, advance_forward(problem, allocation, delta=d)))
    return advance_forward(problem, allocation, delta=delta)


def orders_of(tuner: Tuner, allocation: Allocation) -> Iterator[Orders]:
    """Yield the orders to judge, each once: with ever more forwards in advance, then with all forwards first."""
    problem = tuner.problem
    seen = set()
    for delta in deltas(len(tuner.stages)):
        orders = advance_forward(problem, allocation, delta=delta)
        if orders.warmup not in seen:
            seen.add(orders.warmup)
            yield orders
    yield advance_forward(problem, allocation, afab=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

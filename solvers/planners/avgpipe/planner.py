"""AvgPipe: parallel pipelines on the same devices, averaged elastically (ALGORITHMS 6).

The partition is PipeDream's, the order advance forward propagation, the numbers of micro-batches and of pipelines come
from one of the paper's tunings. By default every setting is judged, which takes the judge seconds and the paper hours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.solvers.judge.shared_processor import disconnected, parallel_pipelines
from penstock.solvers.model.allocation import Allocation
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.options import Option
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.schedule import Orders
from penstock.solvers.planners.avgpipe.partition import partitions
from penstock.solvers.planners.avgpipe.predictor import Mode
from penstock.solvers.planners.avgpipe.tuning import Tuner, Tuning, best_partitions
from penstock.solvers.planners.proposal import Proposal, in_order
from penstock.solvers.schedules.advance_forward import Advance, advance_forward, climb, deltas

STAGES = Option("stages", 0, "number of stages; 0: the partitioner's, and the most that the cluster allows", low=0)
PIPELINES = Option("pipelines", 8, "most parallel pipelines", low=1, high=64)
TUNING = Option[Tuning](
    "tuning",
    "traverse",
    "how micro-batches and pipelines are set: all judged, from one profile, or by a guideline",
    choices=("traverse", "profile", "max_num", "max_size"),
)
MODE = Option[Mode](
    "mode", "wall", "the predictor's formulas: consistent ones, or as printed", choices=("wall", "paper")
)
ADVANCE = Option[Advance](
    "advance",
    "best",
    "forwards in advance: the best of all, by the paper's algorithm 1, none, or all forwards first",
    choices=("best", "climb", "1f1b", "afab"),
)
OPTIONS = (STAGES, PIPELINES, TUNING, MODE, ADVANCE)
MOST_OPERATIONS = 2_000_000
"""Judged at most, over all proposals with one partition: a few seconds."""


def proposals(problem: Problem, options: Mapping[str, object]) -> Iterator[Proposal]:
    """Each setting of the tuning with each number of forwards in advance, the most promising settings first."""
    batches = candidates(problem)
    if not batches or "elastic_averaging" not in problem.update_rules:
        return
    tuning, mode, advance = TUNING.of(options), MODE.of(options), ADVANCE.of(options)
    found = partitions(problem, batches, STAGES.of(options))
    joined = [stages for stages in found if disconnected(problem, parallel_pipelines(stages, 1, 1)) is None]
    if not joined:
        allocation = parallel_pipelines(found[0], 1, batches[-1].num_micro_batches)
        yield in_order(problem, allocation, advance_forward(problem, allocation), "elastic_averaging")
        return
    ranked, before = best_partitions(problem, batches, joined)
    for stages in ranked if tuning == "traverse" else ranked[:1]:
        tuner = Tuner(problem, batches, stages, PIPELINES.of(options), mode, before)
        yield from _settings(tuner, tuning, advance)
        before = tuner.simulations


def _settings(tuner: Tuner, tuning: Tuning, advance: Advance) -> Iterator[Proposal]:
    operations = 0
    simulated = tuning == "profile" and tuner.problem.pipeline_run is None
    name = f"{tuning} by simulation" if simulated else tuning
    for number, degrees in enumerate(tuner.settings(tuning), start=1):
        allocation = tuner.allocation(degrees)
        for orders in orders_of(tuner, allocation, advance):
            operations += sum(len(row.operations) for row in orders.rows)
            note = f"tuning {name}: {_count(number, 'setting')}, {_count(tuner.simulations, 'simulation')}"
            yield in_order(tuner.problem, allocation, orders, "elastic_averaging", note)
        if operations > MOST_OPERATIONS:
            break


def orders_of(tuner: Tuner, allocation: Allocation, advance: Advance) -> Iterator[Orders]:
    """The orders to judge, each once; by algorithm 1 the one that it ends with."""
    problem = tuner.problem
    if advance == "climb":
        delta, _judged = climb(lambda d: tuner.time_ns(allocation, advance_forward(problem, allocation, delta=d)))
        yield advance_forward(problem, allocation, delta=delta)
        return
    seen = set()
    for delta in deltas(len(tuner.stages)) if advance == "best" else [0] if advance == "1f1b" else []:
        orders = advance_forward(problem, allocation, delta=delta)
        if orders.warmup not in seen:
            seen.add(orders.warmup)
            yield orders
    if advance in ("best", "afab"):
        yield advance_forward(problem, allocation, afab=True)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

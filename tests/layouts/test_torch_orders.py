"""The orders that torchtitan names, against PyTorch's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from problems import make_problem
from test_trainers import GPT
from torch.distributed.pipelining import schedules

from penstock.convert.trainers import within_of
from penstock.layouts.limits import order_name
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT
from penstock.solvers.model.allocation import Stage, single_pipeline
from penstock.solvers.schedules.trainer_orders import order_of, ranks_of_stages

KINDS = {"FORWARD": FORWARD, "FULL_BACKWARD": BACKWARD, "BACKWARD_INPUT": INPUT, "BACKWARD_WEIGHT": WEIGHT}
CLASSES: dict[str, Any] = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "looped-bfs-lifo": schedules.ScheduleLoopedBFS,
    "zb-v": schedules.ScheduleZBVZeroBubble,
}


def pytorchs(name: str, ranks: int, chunks: int, number: int, rank: int) -> list[list[int]]:
    """Return [kind, stage, micro-batch] of PyTorch's operations on a rank."""
    rounds = max(1, number // ranks)
    schedule = SimpleNamespace(
        pp_group_size=ranks,
        n_local_stages=chunks,
        num_stages=ranks * chunks,
        microbatches_per_round=number // rounds,
        _n_microbatches=number,
        _stages=[None] * chunks,
    )
    actions = CLASSES[name]._calculate_single_rank_operations(schedule, rank)
    return [[KINDS[each.computation_type.name], each.stage_index, each.microbatch_index] for each in actions if each]


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "number"),
    [
        ("interleaved", 2, 3, 4),
        ("interleaved", 4, 2, 3),
        ("interleaved", 4, 2, 6),
        ("interleaved", 3, 2, 8),
        ("looped-bfs-lifo", 3, 2, 4),
        ("zb-v", 2, 2, 2),
        ("zb-v", 3, 2, 5),
        ("zb-v", 4, 2, 9),
    ],
)
def test_orders_are_those_of_pytorch(name: str, ranks: int, chunks: int, number: int) -> None:
    layers = ranks * chunks
    problem = make_problem([2] * layers, nodes=(ranks,), global_batch_size=number, micro_batch_sizes=())
    rank_of = ranks_of_stages(name, ranks, chunks)
    allocation = single_pipeline(tuple(Stage(s, s, (rank,)) for s, rank in enumerate(rank_of)), number)
    within = within_of("torchtitan", GPT)
    group = within.group(ranks, number)
    orders = order_of(problem, allocation, name, group)
    for row in orders.rows:
        assert row.operations.tolist() == pytorchs(name, ranks, chunks, number, row.devices[0])
    order = order_name(allocation, orders, within)
    assert order is not None
    assert order.name == name

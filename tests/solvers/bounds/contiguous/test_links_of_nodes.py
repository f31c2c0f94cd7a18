"""Load of a node's link in the label search: by the devices of runs in the node, and of a stage across nodes there."""

from __future__ import annotations

import random
from itertools import chain, combinations

import numpy as np
import pytest
from least_of_plans import least_of_all, proven_ns
from problems import make_problem

from penstock.solvers.bounds.chain_costs import BACK, OUT, ChainCosts
from penstock.solvers.bounds.contiguous.label_pool import ALONE, JOINED, SPANNING
from penstock.solvers.bounds.contiguous.label_search import LabelledStage, chains_of, hop
from penstock.solvers.bounds.contiguous.label_steps import Pieces
from penstock.solvers.bounds.contiguous.links import Links
from penstock.solvers.bounds.contiguous.stage_costs import make_pieces
from penstock.solvers.bounds.windows_kernel import FREE
from penstock.solvers.grid.enumeration import Space
from penstock.solvers.model.allocation import Stage
from penstock.solvers.model.micro_batches import candidates
from penstock.solvers.model.problem import Problem

HIGHER = 49, 98, 134
"""Requests whose bound is higher with the limits of nodes."""


def crowded_request(seed: int) -> Problem:
    """Draw three or four layers on nodes of one to three devices, whose links are slow for the traffic."""
    rng = random.Random(seed)
    count, size = rng.randint(3, 4), rng.choice([2, 4, 6])
    return make_problem(
        [rng.randint(5, 40) for _ in range(count)],
        [rng.randint(5, 60) for _ in range(count)],
        [rng.randint(10, 60) for _ in range(count - 1)],
        [rng.choice([0, 10, 200, 400]) for _ in range(count)],
        backward_bytes=[rng.randint(10, 60) for _ in range(count - 1)],
        nodes=rng.choice([(2, 2), (3, 1), (3, 2), (1, 1, 1, 1)]),
        between_bytes_per_s=rng.choice([10**9, 5 * 10**8]),
        latency_ns=rng.choice([0, 3]),
        form=rng.choice(["pairs", "ports", "bus"]),
        full_duplex=rng.random() < 0.5,
        global_batch_size=size,
        micro_batch_sizes=(rng.randint(2, size),),
        shared=rng.random() < 0.7,
        transfer="nic",
        all_reduce=rng.choice(["flat", "hierarchical"]),
        overlap_all_reduce=rng.random() < 0.7,
    )


@pytest.mark.tier("ci")
@pytest.mark.parametrize("block", range(3))
def test_never_above_any_plan(block: int) -> None:
    """Every plan is tried on every choice of devices."""
    for seed in (*range(10 * block, 10 * block + 10), HIGHER[block]):
        space = Space.of(crowded_request(seed))
        assert proven_ns(space.problem, space)[0] <= least_of_all(space), seed


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", HIGHER)
def test_what_a_node_holds_raises_bounds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these limits a stage across nodes is as near to every other stage as possible."""
    spread_rates = Links.spread_rates

    def near(links: Links, rates: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
        all_rates = spread_rates(links, rates, rows)
        return np.broadcast_to(all_rates.min(axis=0), all_rates.shape).copy()

    space = Space.of(crowded_request(seed))
    bound, _some = proven_ns(space.problem, space)
    monkeypatch.setattr(Links, "spread_rates", near)
    assert proven_ns(space.problem, space)[0] < bound


@pytest.mark.parametrize("nodes", [(1,) * 5, (2, 3), (3, 2), (2, 2, 1)])
def test_transfers_take_no_longer_than_on_any_devices(nodes: tuple[int, ...]) -> None:
    """Each pair of stages on all choices of five devices; with one device on each node they take just as long."""
    problem = make_problem(
        [10, 10],
        boundary_bytes=[7],
        backward_bytes=[11],
        nodes=nodes,
        between_bytes_per_s=3 * 10**8,
        global_batch_size=6,
        micro_batch_sizes=(6,),
        shared=True,
        transfer="nic",
    )
    (batch,) = candidates(problem)
    pieces, costs = make_pieces(problem, batch, Links(problem)), ChainCosts(problem, batch.num_micro_batches)
    sets = list(chain.from_iterable(combinations(range(5), number) for number in range(1, 5)))
    equal = compared = 0
    for first in sets:
        for second in (each for each in sets if not set(each) & set(first)):
            row = costs.edge(Stage(0, 0, first), Stage(1, 1, second))
            real = costs.edge_columns[row]
            out, back, channel = _hop(problem, pieces, first, second)
            assert channel != FREE
            assert out <= real[OUT]
            assert back <= real[BACK]
            compared += 1
            equal += (out, back) == (real[OUT], real[BACK])
    assert equal == compared if len(nodes) == 5 else equal > compared // 3


def _hop(problem: Problem, pieces: Pieces, first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the transfer of the label search between stages on these devices, if no other stage is in their nodes."""
    nodes = [sorted(problem.network.nodes_of(devices)) for devices in (first, second)]
    spanning = [len(places) > 1 for places in nodes]
    joined = nodes[0] == nodes[1] and not any(spanning)
    parts = [
        LabelledStage(s, s + 1, len(devices), SPANNING if across else JOINED if joined and s == 0 else ALONE, 0)
        for s, (devices, across) in enumerate(zip((first, second), spanning, strict=True))
    ]
    if spanning[0] == spanning[1]:
        return hop(pieces, *parts)
    (home,), across = (nodes[1], first) if spanning[0] else (nodes[0], second)
    there = sum(problem.network.node_of[device] == home for device in across)
    return hop(pieces, *parts, pieces.node_size - there)


def test_a_full_node_has_no_room_for_a_stage_across_nodes() -> None:
    """Nodes of two at 0.1 GB/s between them: behind two stages that fill one, both replicas receive over the link."""
    problem = make_problem(
        [10] * 3,
        boundary_bytes=[5, 6],
        nodes=(2, 2, 2),
        between_bytes_per_s=10**8,
        global_batch_size=2,
        micro_batch_sizes=(2,),
        shared=True,
        transfer="nic",
    )
    (batch,) = candidates(problem)
    pieces = make_pieces(problem, batch, Links(problem))
    last = LabelledStage(2, 3, 2, SPANNING, 0)
    full = chains_of(pieces, (LabelledStage(0, 1, 1, JOINED, 0), LabelledStage(1, 2, 1, ALONE, 0), last))
    half = chains_of(pieces, (LabelledStage(0, 1, 1, ALONE, 0), LabelledStage(1, 2, 1, ALONE, 0), last))
    assert full.out.tolist() == [[2 * 5, 2 * 60, 0]]
    assert half.out.tolist() == [[2 * 50, 60, 0]]

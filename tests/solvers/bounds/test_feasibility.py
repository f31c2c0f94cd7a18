"""``infeasible`` comes with a proof only: proofs by hand, and both answers against every plan of tiny requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from brute_plans import RULES, drawn, has_plan
from problems import OF_ANY_TRAINER, make_problem

from penstock.schemas.errors import UnsupportedRequest
from penstock.solvers.bounds.feasibility import connected, proof_of_infeasibility
from penstock.solvers.model.pins import broken_pin
from penstock.solvers.model.problem import Pin, Problem
from penstock.solvers.model.result import Result, Status
from penstock.solvers.solve.driver import solve


def one_layer(memory: int, **changes: Any) -> Problem:
    """Build 100 bytes of parameters, as many of gradients, 200 of states, a stash of 30, a workspace of 7: 437."""
    settings: dict[str, Any] = {
        "parameter_bytes": 100,
        "stash_bytes": 30,
        "workspace_bytes": 7,
        "state_factor": 2,
        "nodes": (2,),
        "global_batch_size": 4,
    }
    return make_problem([10], memory_bytes=memory, **(settings | changes))


@pytest.mark.parametrize(
    ("changes", "least"),
    [
        ({}, 437),
        ({"context_bytes": 50}, 487),
        ({"headroom_bytes": 50}, 487),
        ({"recompute": "always"}, 437),
        ({"shard_states": True, "micro_batch_sizes": (2,)}, 337),
        ({"micro_batch_sizes": (4,)}, 474),
        ({"micro_batch_sizes": (4,), "min_slice": 4}, 548),
        ({"backward_ns": [0], "weight_ns": [0]}, 300),
    ],
)
def test_a_layer_needs_so_many_bytes(changes: dict[str, Any], least: int) -> None:
    """Exactly this memory allows no proof, one byte less is too little, and the message states the shortage.

    States shared by two replicas are 100 bytes on each. Slices of 4 samples are 2 on each of two replicas, unless
    ``min_slice`` forbids that. Where the backward takes no time, nothing but weights and states is surely there.
    """
    assert proof_of_infeasibility(one_layer(least, **changes)) is None
    proof = proof_of_infeasibility(one_layer(least - 1, **changes))
    assert proof is not None
    assert proof.shortage is not None
    headroom = changes.get("headroom_bytes", 0)
    assert (proof.shortage.needed_bytes, proof.shortage.missing_bytes) == (least - headroom, 1)
    assert f"at least {least - headroom} bytes" in proof.sentence


@pytest.mark.parametrize(("recompute", "least"), [("never", 270), ("auto", 250), ("always", 250)])
def test_layers_that_cannot_be_cut_are_held_together(recompute: Any, least: int) -> None:
    """100 bytes each with gradients, stashes of 50 and 20: both, or the larger one where segments may be rebuilt."""
    for memory, proven in ((least, False), (least - 1, True)):
        problem = make_problem(
            [10, 10],
            parameter_bytes=50,
            stash_bytes=[50, 20],
            cuttable=[False],
            nodes=(3,),
            memory_bytes=memory,
            recompute=recompute,
        )
        assert (proof_of_infeasibility(problem) is not None) == proven


@pytest.mark.parametrize(
    ("rule", "least"),
    [("synchronous", 400), ("elastic_averaging", 400), ("weight_stashing", 300), ("double_buffered", 500)],
)
def test_two_layers_on_one_device(rule: Any, least: int) -> None:
    """Without a flush a stage may step before the other one's first backward; two versions are always there."""
    for memory, proven in ((least, False), (least - 1, True)):
        problem = make_problem([10, 10], parameter_bytes=100, nodes=(1,), memory_bytes=memory)
        proof = proof_of_infeasibility(replace(problem, update_rules=frozenset({rule})))
        assert (proof is not None) == proven
    problem = make_problem([10, 10], parameter_bytes=100, nodes=(1,), memory_bytes=399)
    assert proof_of_infeasibility(replace(problem, update_rules=frozenset({"synchronous", "weight_stashing"}))) is None


def test_three_layers_do_not_go_into_two_devices() -> None:
    """200 bytes each: 700 bytes are enough together, but two of them do not fit into 350; pins leave less."""
    problem = make_problem([10] * 3, parameter_bytes=100, nodes=(2,), memory_bytes=350)
    proof = proof_of_infeasibility(problem)
    assert proof is not None
    assert "however" in proof.sentence
    roomy = make_problem([10] * 3, parameter_bytes=100, nodes=(2,), memory_bytes=400)
    assert proof_of_infeasibility(roomy) is None
    assert proof_of_infeasibility(replace(roomy, pins=(Pin(0, 1, frozenset({1})),))) is None
    assert proof_of_infeasibility(replace(roomy, pins=(Pin(0, 2, frozenset({1})),))) is not None
    small = make_problem([10] * 3, parameter_bytes=100, nodes=(2,), memory_bytes=299)
    assert "all devices together have 598" in getattr(proof_of_infeasibility(small), "sentence", "")


def test_the_connected_parts_are_refuted_one_by_one() -> None:
    """Two nodes of 400 bytes with nothing between them hold 300 bytes of layers each, but not 600 together."""
    problem = make_problem([10] * 3, parameter_bytes=100, nodes=(1, 1), memory_bytes=400, boundary_bytes=1)
    assert proof_of_infeasibility(problem) is None
    apart = replace(problem, network=replace(problem.network, cables=(), resources=[], _ids={}, _routes={}, _paths={}))
    assert connected(apart) == [[0], [1]]
    proof = proof_of_infeasibility(apart)
    assert proof is not None
    assert proof.sentence.startswith("the network has 2 parts")
    silent = replace(apart, forward_bytes=np.zeros(2, np.int64), backward_bytes=np.zeros(2, np.int64))
    assert proof_of_infeasibility(silent) is None
    one = replace(apart, devices=(replace(apart.devices[0], memory_bytes=600), apart.devices[1]))
    assert proof_of_infeasibility(one) is None


def answer(planner: str, problem: Problem, **options: object) -> Result | None:
    """Solve a request; None where the planner refuses it."""
    try:
        return solve(problem, planner, options=options, workers=1)
    except UnsupportedRequest:
        return None


@pytest.mark.cases(1)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("rule", range(len(RULES)))
def test_auto_finds_a_plan_wherever_there_is_one(rule: int) -> None:
    """Without ``exact``, which lists plans itself: a plan if the list has one, ``infeasible`` only if it is empty."""
    met: Counter[tuple[bool, str]] = Counter()
    for seed in range(200 + rule, 240, len(RULES)):
        problem = drawn(seed)
        result, possible = answer("auto", problem, exclude="exact,polish,closing"), has_plan(problem)
        if result is None:
            assert not possible, seed
            continue
        met[possible, result.status.value] += 1
        assert result.status is not Status.INFEASIBLE or not possible, (seed, result.sentence)
        assert result.best is not None or not possible, (seed, result.sentence)
        if result.best is not None:
            assert broken_pin(problem, result.best.allocation) is None
            assert proof_of_infeasibility(problem) is None
    assert sum(count for (possible, _), count in met.items() if possible) >= (1 if rule == 4 else 4)
    assert met[False, "infeasible"] >= 1


@pytest.mark.tier("nightly")
def test_no_planner_says_infeasible_of_a_request_with_a_plan() -> None:
    """A planner alone may find none; planners of lines of stages find a plan of every update rule that they support."""
    met: Counter[str] = Counter()
    none: Counter[str] = Counter()
    for seed in range(241, 265):
        problem = drawn(seed)
        if not has_plan(problem):
            continue
        for name, planner in OF_ANY_TRAINER.items():
            result = answer(name, problem) if planner.supports & problem.update_rules else None
            if result is not None:
                met[name] += 1
                none[name] += result.best is None
                assert result.status is not Status.INFEASIBLE, (seed, name, result.sentence)
    assert sum(met.values()) > 50
    assert min(met[name] for name in ("relax", "pipedream", "pipedream-2bw", "wpipe", "avgpipe")) >= 1
    for name in ("auto", "relax", "pipedream", "pipedream-2bw", "wpipe", "avgpipe"):
        assert none[name] == 0, name


@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(12))
def test_relax_places_stages_by_memory(seed: int) -> None:
    """Two large and two small devices in any order, large and small layers: the only possible match is the result."""
    draw = np.random.default_rng(seed)
    sizes, rooms = draw.permutation([100, 100, 300, 300]), draw.permutation([210, 210, 610, 610])
    problem = make_problem(
        [10] * 4, parameter_bytes=sizes.tolist(), nodes=(2, 2), memory_bytes=rooms.tolist(), boundary_bytes=1
    )
    result = solve(problem, "relax")
    assert result.best is not None
    assert result.bounds[0].bound_ns <= result.best.value_ns


@pytest.mark.tier("ci")
@pytest.mark.parametrize("planner", ["auto", "relax", "gpipe", "pipedream"])
@pytest.mark.parametrize(
    ("limits", "status"), [({"max_plans": 0}, Status.NONE_FOUND), ({"time_limit_ns": 0}, Status.TIME_LIMIT)]
)
def test_a_limit_does_not_hide_a_proof(planner: str, limits: dict[str, int], status: Status) -> None:
    """If a limit ends the search before any plan, the answer is ``infeasible`` if proven, else it names the limit."""
    for memory, proven in ((299, True), (400, False)):
        problem = make_problem([10] * 3, parameter_bytes=100, nodes=(2,), memory_bytes=memory)
        result = solve(problem, planner, workers=1, **limits)
        assert result.best is None
        assert result.status is (Status.INFEASIBLE if proven else status)
        assert ("all devices together have 598" in result.sentence) == proven
        assert ("came before" in result.sentence) == (not proven)

"""Plans that encode tensors: the simulator's costs, the planners' choice of edges, and the bounds that still hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations
from typing import Any

import pytest

from penstock.convert import to_problem
from penstock.planning.judge import judge
from penstock.planning.programs.lower import programs
from penstock.questions.solve import solve
from penstock.schemas.errors import InvalidDocument, InvalidPlan
from penstock.schemas.plan import PlanFile
from penstock.schemas.request import PlanRequest
from penstock.solvers.costs.codecs import best_codecs, codable_edges, with_codecs
from penstock.solvers.costs.stage import conversion_ns, stage_costs
from penstock.solvers.costs.transfer import message_bytes, transfer
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.schedules.early_backward import early_backward
from penstock.solvers.verify.codecs import check_codecs
from penstock.solvers.verify.verifier import verify

BYTES = (4_000, 400_000, 40)
"""Bytes of a sample in fp32, behind each layer but the last."""


def request(bandwidth: int = 10**8, **more: Any) -> PlanRequest:
    """Return a request of four layers on four devices in a row.

    A sample takes 1 ms forwards and 2 ms back; conversion runs at 1 and 2 GB/s.
    """
    measured = {"forward_ns": 1_000_000, "backward_ns": 2_000_000, "stash_bytes": 100}
    profile = {
        "name": "codecs",
        "layers": [{"name": f"layer{i}", "parameter_bytes": 4_000} for i in range(4)],
        "boundaries": [
            [
                {"name": "x", "bytes_per_sample": size, "gradient_bytes_per_sample": size},
                {"name": "mask", "bytes_per_sample": 8, "gradient_bytes_per_sample": 0},
            ]
            for size in BYTES
        ],
        "measurements": [{"device_kind": "cpu", "micro_batch_size": 1, "layers": [measured] * 4}],
        "codec_speeds": [{"device_kind": "cpu", "encode_bytes_per_s": 10**9, "decode_bytes_per_s": 2 * 10**9}],
        "source": {"method": "analytic", "expected_error": 0.1},
    }
    cluster = {
        "nodes": 4,
        "devices_per_node": 1,
        "kind": "cpu",
        "memory_bytes": 2**30,
        "nic": {"bandwidth_bytes_per_s": bandwidth},
    }
    topology = {"name": "row", "uniform": cluster}
    base = {"profile": profile, "topology": topology, "global_batch_size": 8, "micro_batch_sizes": [2]}
    return PlanRequest.parse(base | {"codec": "auto", "recompute": "never", "planner": "gpipe"} | more)


def line(problem: Problem) -> Any:
    """Return an allocation of a layer per device, and DAPPLE's order."""
    allocation = single_pipeline(tuple(Stage(i, i, (i,)) for i in range(4)), 4)
    return allocation, early_backward(problem, allocation)


def test_an_encoded_message_has_half_the_bytes_and_a_header() -> None:
    problem = to_problem(request())
    assert message_bytes(problem, 0, 2, 0, coded=False) == 2 * (4_000 + 8)
    assert message_bytes(problem, 0, 2, 0, coded=True) == 4_000 + 5 + 2 * 8
    assert message_bytes(problem, 0, 2, 1, coded=True) == 4_000 + 5
    allocation = with_codecs(line(problem)[0], frozenset({0}))
    sent, back = transfer(problem, allocation, 0, 2, 0), transfer(problem, allocation, 1, 2, 1)
    assert sent is not None
    assert back is not None
    assert (sent.bytes, sent.duration_ns) == (4_021, 40_210)
    assert (back.bytes, back.duration_ns) == (4_005, 40_050)


@pytest.mark.parametrize("edge", [0, 2])
def test_edges_are_numbered_through_all_pipelines(edge: int) -> None:
    """Two pipelines of two stages: edge 0 is the first's only one, edge 2 the second's."""
    pipelines = tuple(
        Pipeline((Stage(0, 1, (2 * p,)), Stage(2, 3, (2 * p + 1,))), (2 * p, 2 * p + 1)) for p in range(2)
    )
    coded = with_codecs(Allocation(pipelines, 4), frozenset({edge}))
    expected = [(False, False)] * 4
    expected[edge : edge + 2] = [(False, True), (True, False)]
    assert [stage.coded for stage in coded.stages] == expected


def test_conversion_counts_on_both_processors() -> None:
    """By hand: 8,000 bytes at 1 GB/s are 8 us, at 2 GB/s 4 us."""
    problem = to_problem(request())
    plain, _ = line(problem)
    coded = with_codecs(plain, frozenset({0}))
    assert conversion_ns(problem, coded.stages[0], "cpu", 2) == (8_000, 4_000)
    assert conversion_ns(problem, coded.stages[1], "cpu", 2) == (4_000, 8_000)
    for s, (forward, backward) in enumerate([(8_000, 4_000), (4_000, 8_000), (0, 0), (0, 0)]):
        without, having = (stage_costs(problem, one.stages[s], 2) for one in (plain, coded))
        assert having.forward_ns - without.forward_ns == forward
        assert having.backward_ns - without.backward_ns == backward
        assert having.weight_ns == without.weight_ns


@pytest.mark.parametrize("edges", [(), (0,), (1,), (0, 1, 2)])
@pytest.mark.parametrize("sharing", ["shared", "private"])
def test_the_verifier_finds_the_same_times_and_bytes(edges: tuple[int, ...], sharing: str) -> None:
    problem = to_problem(request(network=sharing))
    allocation, orders = line(problem)
    coded = with_codecs(allocation, frozenset(edges))
    timeline = simulate(problem, coded, orders)
    assert verify(problem, coded, orders, timeline) == []
    if edges:
        wrong = verify(problem, allocation, orders, timeline)
        assert any("takes" in fault or "ns" in fault for fault in wrong), "the codec makes a difference"


def test_a_receiver_has_room_for_the_message_and_what_it_decodes_to() -> None:
    problem = to_problem(request())
    allocation, orders = line(problem)
    plain = simulate(problem, allocation, orders).uses[2].memory.buffers
    coded = simulate(problem, with_codecs(allocation, frozenset({1})), orders).uses[2].memory.buffers
    assert coded >= plain + message_bytes(problem, 1, 2, 0, coded=True)


def test_the_choice_is_the_best_of_all_subsets() -> None:
    problem = to_problem(request())
    allocation, orders = line(problem)

    def judge(one: Any) -> int:
        return simulate(problem, one, orders).time_per_global_batch_ns

    edges = codable_edges(problem, allocation)
    assert edges == (0, 1, 2)
    every = chain.from_iterable(combinations(edges, k) for k in range(4))
    best = min(judge(with_codecs(allocation, frozenset(one))) for one in every)
    chosen = best_codecs(problem, allocation, judge(allocation), judge)
    assert judge(with_codecs(allocation, chosen)) == best
    assert 1 in chosen


@pytest.mark.tier("ci")
def test_a_planner_encodes_only_where_it_saves_time() -> None:
    slow, plain = (solve(request(codec=codec)) for codec in ("auto", None))
    assert slow.plan is not None
    assert plain.plan is not None
    codecs = slow.plan.pipelines[0].codecs
    assert codecs is not None
    assert "fp16s" in codecs
    assert slow.plan.prediction is not None
    assert plain.plan.prediction is not None
    assert slow.plan.prediction.time_per_global_batch_ns < plain.plan.prediction.time_per_global_batch_ns
    assert "fp16s after stages" in slow.sentence
    assert plain.plan.pipelines[0].codecs is None
    fast = solve(request(10**13)).plan
    assert fast is not None
    assert fast.pipelines[0].codecs is None, "conversion takes longer than the transfer"


@pytest.mark.tier("ci")
@pytest.mark.parametrize("planner", ["dp", "dapple", "spp", "interleaved", "zero-bubble", "chimera"])
def test_every_planners_certificates_stay_below_its_plan(planner: str) -> None:
    result = solve(request(planner=planner))
    assert result.plan is not None
    assert result.plan.prediction is not None
    value = result.plan.prediction.time_per_global_batch_ns
    assert all(one.bound_ns <= value and one.gap >= 0 for one in result.plan.certificates)
    document = request(planner=planner)
    judged = judge(PlanFile(plan=result.plan, request=document))
    assert judged.faults == ()


@pytest.mark.tier("ci")
@pytest.mark.parametrize(
    ("rule", "planner"),
    [("weight_stashing", "pipedream"), ("double_buffered", "pipedream-2bw"), ("double_grouped", "wpipe")],
)
def test_periodic_plans_encode_too(rule: str, planner: str) -> None:
    result = solve(request(planner=planner, update_rules=[rule]))
    assert result.plan is not None
    assert judge(PlanFile(plan=result.plan, request=request(planner=planner, update_rules=[rule]))).faults == ()


@pytest.mark.tier("ci")
def test_programs_name_the_codec_on_its_channels() -> None:
    document = request()
    plan = solve(document).plan
    assert plan is not None
    codecs = plan.pipelines[0].codecs
    assert codecs is not None
    for program in programs(PlanFile(plan=plan, request=document)):
        for channel in program.channels:
            assert channel.codec == codecs[min(channel.stage, channel.peer_stage)]


def test_what_is_wrong_with_codecs_is_said() -> None:
    problem = to_problem(request())
    allocation, _ = line(problem)
    coded = with_codecs(allocation, frozenset({1}))
    assert [stage.coded for stage in coded.stages] == [(False, False), (False, True), (True, False), (False, False)]
    assert list(check_codecs(problem, coded, "synchronous")) == []
    assert "average" in next(check_codecs(problem, coded, "elastic_averaging"))
    strange = replace(problem, codec_speeds={})
    assert "'cpu' converts is not in the profile" in next(check_codecs(strange, coded, "synchronous"))
    half = replace(problem, encodable=((0, 0),) * 3)
    assert "nothing crosses it" in next(check_codecs(half, coded, "synchronous"))
    one_side = single_pipeline((replace(coded.stages[0], coded=(False, True)), *coded.stages[1:]), 4)
    assert any("do not agree" in fault for fault in check_codecs(problem, one_side, "synchronous"))


@pytest.mark.tier("ci")
def test_codecs_have_to_be_asked_for() -> None:
    document = request()
    plan = solve(document).plan
    assert plan is not None
    plain = request(codec=None)
    file = PlanFile(plan=plan.model_copy(update={"request_hash": plain.content_hash()}), request=plain)
    assert any("does not allow codecs" in fault for fault in judge(file).faults)
    with pytest.raises(InvalidPlan):
        programs(file)


@pytest.mark.parametrize(("dtype", "encodable"), [("fp32", (4_000, 1)), ("bf16", (0, 0)), ("fp16", (0, 0))])
def test_only_numbers_of_32_bits_are_encoded(dtype: str, encodable: tuple[int, int]) -> None:
    document = request()
    profile = document.profile.model_copy(update={"parameter_dtype": dtype})  # type: ignore[union-attr]
    assert to_problem(document.model_copy(update={"profile": profile})).encodable[0] == encodable


def test_an_unknown_speed_of_conversion_is_refused() -> None:
    document = request()
    without = document.model_copy(update={"profile": document.profile.model_copy(update={"codec_speeds": None})})  # type: ignore[union-attr]
    with pytest.raises(InvalidDocument, match="conversion speed"):
        to_problem(without)

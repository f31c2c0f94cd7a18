"""``compare`` and ``sweep`` where degrees are a choice: what they ask, what rows say, and layouts of one's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

import penstock
from penstock.cli.main import main
from penstock.cli.plan.request_options import request_of
from penstock.errors import InvalidDocument, UnsupportedRequest
from penstock.examples import catalogue
from penstock.layouts.plain import written_layout
from penstock.planning.inputs import with_open_degrees, with_quick_planner
from penstock.planning.sweep import with_front
from penstock.schemas.api.jobs import PlanComparison
from penstock.schemas.api.sweep import SweepRequest, SweepRow
from penstock.schemas.api.words import choice_words
from penstock.schemas.request import PlanRequest
from penstock.schemas.transformers.degrees import Degrees

pytestmark = pytest.mark.tier("quick")

QUESTION = ("--example", "llama-3-8b", "--cluster", "1x4xH100", "-b", "8")


def request(**more: Any) -> PlanRequest:
    profile, topology = catalogue.profile("llama-3-8b"), catalogue.cluster("1x4xH100")
    return PlanRequest(profile=profile, topology=topology, global_batch_size=8, **more)


# ---- compare ---------------------------------------------------------------------------------------------------------


@pytest.mark.tier("nightly")
def test_compare_leaves_degrees_open_and_shows_them(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ("--layout", "tensor=4,micro-batch=1", "--layout", "pipeline=4,replicas=1")
    assert main(["compare", *QUESTION, "--planner", "even", "--schedule", "early-backward", *layouts, "--json"]) == 0
    rows = [PlanComparison.model_validate(each) for each in json.loads(capsys.readouterr().out)]
    first, second, best = rows
    answer = penstock.plan(
        "llama-3-8b", "1x4xH100", global_batch_size=8, planner="even", schedule="early-backward"
    ).file.plan
    assert answer.prediction is not None
    assert best.iteration_ns == answer.prediction.time_per_global_batch_ns
    assert (best.degrees, best.sharding) == (answer.degrees, answer.sharding)
    assert best.stages == len(answer.pipelines[0].stages)
    layout = penstock.even_layout(request(), tensor=4).file.plan.prediction
    assert layout is not None
    assert (first.planner, first.layout) == ("yours", "TP4 PP1 DP1, micro-batch 1")
    assert (first.iteration_ns, first.stages, first.degrees) == (layout.time_per_global_batch_ns, 1, Degrees(tensor=4))
    assert (second.layout, second.stages) == ("TP1 PP4 DP1, micro-batch 1", 4)
    assert second.status == ("feasible" if penstock.even_layout(request(), pipeline=4).fits else "infeasible")


@pytest.mark.tier("ci")
def test_compare_prints_the_own_layout_and_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    layouts = ("--layout", "tensor=4", "--layout", "tensor=2,micro-batch=4")
    assert main(["compare", *QUESTION, "--planner", "even", "--schedule", "early-backward", *layouts]) == 0
    output = capsys.readouterr().out
    assert "TP 4 × 1 stage" in output
    assert "yours: TP4 PP1 DP1, micro-batch 1: " in output
    assert "; best " in output
    assert "yours: TP2 PP1 DP2, micro-batch 4: does not fit: a GPU lacks " in output


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("tensor=8", UnsupportedRequest, "tensor 8 needs 8 GPUs in one node, but the largest node has 4"),
        ("tensor=3", UnsupportedRequest, "tensor 3 does not divide 32 attention heads"),
        ("tensor=2,replicas=3", InvalidDocument, "has 3 replicas; the cluster has GPUs for 2"),
        ("tensor", InvalidDocument, "'tensor' is not a valid NAME=VALUE of a layout"),
        ("tensor=two", InvalidDocument, "'tensor=two' is not a valid NAME=VALUE of a layout"),
        ("tensor=2,tensor=4", InvalidDocument, "'tensor=4' is not a valid NAME=VALUE of a layout"),
        ("recompute=some", InvalidDocument, "'recompute=some' is not a valid NAME=VALUE of a layout"),
        ("tensor=0", InvalidDocument, "its numbers have to be at least 1"),
        (
            "micro-batch=16",
            UnsupportedRequest,
            "micro-batch size 16 × 4 replicas = 64 does not divide",
        ),
    ],
)
def test_what_is_no_layout_is_refused(text: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        written_layout(request(), text)
    assert words in str(caught.value)


def test_every_part_of_a_layout_counts() -> None:
    words = "tensor=2,pipeline=2,replicas=1,micro-batch=2,chunks=2,sharding=optimizer,recompute=full"
    result = written_layout(request(), words)
    same = penstock.even_layout(
        request(), tensor=2, pipeline=2, micro_batch_size=2, virtual_stages=2, sharding="optimizer", recompute="full"
    )
    assert result.layout == same
    assert result.words == "TP2 PP2 DP1, VP2, micro-batch 2, optimizer sharded, recomputed"


# ---- sweep -----------------------------------------------------------------------------------------------------------


@pytest.mark.tier("nightly")
def test_sweep_asks_a_quick_planner_at_open_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("sweep", "--example", "llama-3-8b", "--framework", "megatron", "--cluster", "1x4xH100", "-b", "8")
    lengths = ("--sequence-length", "2048", "--sequence-length", "4096")
    assert main([*arguments, *lengths, "--executor", "local:1", "--json"]) == 0
    rows = [SweepRow.model_validate(each) for each in json.loads(capsys.readouterr().out)["rows"]]
    assert [row.sequence_length for row in rows] == [2048, 4096]
    for row in rows:
        assert (row.state, row.planner, row.profile) == ("succeeded", "even", "llama-3-8b")
        assert row.degrees is not None
        assert row.stages is not None
        assert row.pareto  # the only one of its length
    times = [row.time_per_global_batch_ns for row in rows]
    assert times[0] is not None
    assert times[1] is not None
    assert times[0] < times[1]


@pytest.mark.parametrize(
    "more",
    [
        {"planner": "dapple"},
        {"schedule": "gpipe"},
        {"termination": {"max_plans": 3}},
        {"termination": {"time_limit_ns": 10**9}},
        {"update_rules": ("weight_stashing",)},
    ],
    ids=str,
)
def test_what_was_asked_for_stays(more: dict[str, Any]) -> None:
    plan_request = with_open_degrees(PlanRequest.parse(request().model_dump() | more))
    assert with_quick_planner(plan_request) is plan_request
    assert with_quick_planner(request()).planner == "auto"
    assert with_quick_planner(with_open_degrees(request())).planner == "even"


@pytest.mark.tier("ci")
def test_a_front_is_of_one_sequence_length() -> None:
    def row(length: int, speed: float) -> SweepRow:
        figures = {"samples_per_s": speed, "peak_memory_bytes": 1, "devices": 1, "sequence_length": length}
        case = {"topology": "t", "global_batch_size": 8, "planner": "p", "schedule": "auto", "update_rules": ()}
        return SweepRow.model_validate({**case, "state": "succeeded", **figures})

    rows = (row(4096, 2.0), row(8192, 0.5), row(4096, 1.0), row(8192, 1.0))
    assert [each.pareto for each in with_front(rows)] == [True, False, False, True]


def test_profiles_are_an_axis_and_old_requests_keep_their_address() -> None:
    plain = SweepRequest.parse({"request": request().model_dump(), "over": {}})
    assert b"profiles" not in plain.canonical_json()


# ---- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.tier("ci")
def test_documents_that_say_nothing_stay_at_degrees_of_one() -> None:
    (row,) = penstock.compare(request(), planners=("even",), schedules=("early-backward",))
    assert (row.degrees, row.sharding) == (None, None)
    assert row.stages is None or row.stages >= 1


def test_choices_in_words() -> None:
    row = SweepRow.model_construct

    def words(degrees: Degrees | None, sharding: str | None, stages: int | None, **chosen: str) -> str:
        return choice_words(row(degrees=degrees, sharding=sharding, stages=stages, chosen=chosen or None))

    assert words(Degrees(tensor=8), "optimizer", 4) == "TP 8 × 4 stages, optimizer sharded"
    assert words(None, "parameters_kept", 1) == "1 stage, parameters sharded"
    assert words(Degrees(tensor=2, context=2), None, 1) == "TP 2 × CP 2 × 1 stage"
    assert words(None, "none", 3, optimizer="sgd") == "3 stages, optimizer sgd"
    assert words(None, None, None) == "–"


def test_open_degrees_are_those_of_plan() -> None:
    options = dict.fromkeys(
        ("profile", "topology", "network", "optimizer", "time_limit", "gap", "max_plans", "hf", "tensor")
    )
    all_options = {**options, "example": "llama-3-8b", "cluster": "1x4xH100", "global_batch_size": 8}
    assert with_open_degrees(request_of(all_options)) == with_open_degrees(request())

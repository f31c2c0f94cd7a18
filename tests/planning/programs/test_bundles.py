"""Job bundles: made of plans of every kind, read again, and refused by reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.examples.tiny import tiny_request
from penstock.planning.programs.bundles import make_bundle
from penstock.planning.programs.lower import programs
from penstock.questions.solve import solve
from penstock.schemas.api.run_options import RunOptions
from penstock.schemas.errors import InvalidDocument, UnsupportedRequest
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.program import Program
from penstock.schemas.ranks.bundle import JobBundle
from penstock.schemas.request import PlanRequest


def planned(**more: Any) -> PlanFile:
    """Return a plan of the tiny request."""
    request = PlanRequest.parse(tiny_request() | more)
    result = solve(request)
    assert result.plan is not None
    return PlanFile(plan=result.plan, request=request)


@pytest.fixture(scope="module")
def flushed() -> PlanFile:
    return planned(planner="gpipe")


@pytest.fixture(scope="module")
def periodic() -> PlanFile:
    return planned(planner="pipedream", update_rules=["weight_stashing"])


def test_a_bundle_survives_its_file(flushed: PlanFile) -> None:
    bundle = make_bundle(flushed, seed=7)
    read = JobBundle.parse_json(bundle.canonical_json())
    assert read == bundle
    assert (read.seed, read.plan_hash, read.programs_are) == (7, flushed.plan.content_hash(), "whole")
    assert [Program.from_json(part.programs[0]) for part in read.ranks] == programs(flushed, transport="nccl")
    for part in read.ranks:
        part.refuse_damage()


def test_programs_for_nccl_are_made_where_devices_are_no_cpus(flushed: PlanFile) -> None:
    assert make_bundle(flushed).lowered_for == "nccl"
    assert make_bundle(flushed, transport="gloo").lowered_for == "gloo"
    on_cpus = json.loads(json.dumps(tiny_request()).replace('"V100"', '"cpu"'))
    bundle = make_bundle(planned(**on_cpus | {"planner": "gpipe"}))
    assert (bundle.lowered_for, {part.device_kind for part in bundle.ranks}) == ("gloo", {"cpu"})


def test_sizes_of_boundaries_are_compared_where_they_were_measured(flushed: PlanFile) -> None:
    profile = flushed.request.profile
    assert isinstance(profile, ModelProfile)
    assert profile.boundary_sizes() is None
    measured = profile.model_copy(update={"source": profile.source.model_copy(update={"method": "measured"})})
    assert measured.boundary_sizes() == tuple(((f"hidden{i}", 500_000, 500_000),) for i in range(3))


def test_a_damaged_program_is_noticed(flushed: PlanFile) -> None:
    data = make_bundle(flushed).model_dump(mode="json")
    data["ranks"][1]["programs"][0]["prologue"] += " "
    with pytest.raises(InvalidDocument, match=r"programs of rank 1 have the digest [0-9a-f]{64}, but the bundle says"):
        JobBundle.parse(data).ranks[1].refuse_damage()


def test_a_periodic_plan_has_a_program_per_length_of_a_segment(periodic: PlanFile) -> None:
    options = RunOptions(checkpoint_directory="x", checkpoint_every=4)
    bundle = make_bundle(periodic, steps=10, options=options)
    assert bundle.programs_are == "segments"
    assert [program["batches"] for program in bundle.ranks[0].programs] == [2, 4]
    assert bundle.segments(0, 0, 10, options) == (1, 1, 0)
    assert bundle.segments(1, 4, 10, options) == (1, 0), "from a checkpoint on"
    with pytest.raises(UnsupportedRequest, match=r"no program for 3 steps .* from step 0 to 3; .* programs for 2, 4 "):
        bundle.segments(0, 0, 3, options)


def test_a_periodic_plan_needs_its_steps(periodic: PlanFile) -> None:
    with pytest.raises(UnsupportedRequest, match=r"weight_stashing.*needs the number of steps") as caught:
        make_bundle(periodic)
    assert caught.value.remedy is not None
    assert "--steps" in caught.value.remedy


@pytest.mark.parametrize(
    ("exported", "started", "words"),
    [
        pytest.param(
            {}, {"clip_norm": 1.0}, "without --clip-norm or --precision fp16, but its ranks are started with", id="norm"
        ),
        pytest.param(
            {"clip_norm": 1.0},
            {},
            "with --clip-norm or --precision fp16, but its ranks are started without",
            id="no-norm",
        ),
        pytest.param({}, {"precision": "fp16"}, "without --clip-norm or --precision fp16", id="fp16"),
        pytest.param({}, {"advance_forward": True}, "without --advance-forward", id="ladder"),
        pytest.param({}, {"staleness": 1}, "without --staleness", id="staleness"),
    ],
)
def test_ranks_are_started_with_the_options_of_the_export(
    exported: dict[str, Any], started: dict[str, Any], words: str, flushed: PlanFile
) -> None:
    bundle = make_bundle(flushed, options=RunOptions(**exported))
    bundle.refuse_options(RunOptions(**exported))
    with pytest.raises(UnsupportedRequest, match=words):
        bundle.refuse_options(RunOptions(**started))


def test_nodes_count_their_devices_as_people_do(flushed: PlanFile) -> None:
    data = make_bundle(flushed).model_dump(mode="json")
    parts = [data["ranks"][0] | {"rank": rank} for rank in range(4)]
    for part, device in zip(parts, ("b/10", "b/2", "a/0", "b/2"), strict=True):
        part["device"] = device
    assert list(JobBundle.parse(data | {"ranks": parts}).nodes().items()) == [("b", (1, 3, 0)), ("a", (2,))]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"rank": 5}, "entry 1 has rank 5", id="order"),
        pytest.param({"device": "gpu7"}, "a device is called node/index", id="device"),
        pytest.param({"programs": []}, "at least 1 item", id="no-program"),
        pytest.param({"programs": [{}, {}]}, "rank 1 has 2 programs, rank 0 has 1", id="programs"),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], words: str, flushed: PlanFile) -> None:
    data = make_bundle(flushed).model_dump(mode="json")
    data["ranks"][1] |= change
    with pytest.raises(InvalidDocument, match=words):
        JobBundle.parse(data)

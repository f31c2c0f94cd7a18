"""Answers to why-not: the plan at other degrees, the parts of both times, factors simulated by changed profiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

import penstock
from penstock.errors import InvalidDocument, PenstockError, UnsupportedRequest
from penstock.examples import catalogue
from penstock.schemas.api.explanation import WhyNot
from penstock.schemas.plan import PlanFile
from penstock.schemas.profile import ModelProfile
from penstock.schemas.topology import ClusterTopology

GPUS, BATCH = 4, 8
NEAR = Fraction(101, 100)
"""The distance from a stated factor at which the order of two plans has turned, or has not turned yet."""


@cache
def cluster() -> ClusterTopology:
    """Return four H100 without latency, so that collectives of as many times the bytes take as many times as long."""
    data = catalogue.cluster(f"1x{GPUS}xH100").expanded().model_dump(mode="json")
    for node in data["nodes"]:
        node["fabric"]["latency_ns"] = 0
    return ClusterTopology.parse(data)


@cache
def plan_at(tensor: int | None = None, sharding: str | None = None) -> PlanFile:
    """Return the best plan of planner ``even``, at one choice or at any with whole weights and gradients; context 1."""
    degrees: dict[str, Any] = {"degrees": "auto", "sharding": ["none", "optimizer"]}
    if tensor is not None:
        degrees = {"degrees": {"tensor": tensor}, "sharding": sharding}
    how = {"sequence_length": 4096, "planner": "even", **degrees}
    return penstock.plan("llama-3-8b", cluster(), global_batch_size=BATCH, **how).file


def explained(*choices: str, **how: Any) -> tuple[WhyNot, ...]:
    return penstock.explain(plan_at(), what_if=(), why_not=choices, **how).why_not


def words(plan: PlanFile) -> tuple[int, str]:
    assert plan.plan.degrees is not None
    return plan.plan.degrees.tensor, str(plan.plan.sharding)


def time_of(file: PlanFile) -> int:
    prediction = file.plan.prediction
    assert prediction is not None
    return prediction.time_per_global_batch_ns


def choice_of(other: WhyNot) -> tuple[int, str]:
    tensor, sharded = other.choice.removeprefix("tensor ").split(", ")
    return int(tensor), {"nothing sharded": "none", "optimizer sharded": "optimizer"}[sharded]


# ---- the plan at the other choice ------------------------------------------------------------------------------------


def test_the_other_plan_is_the_best_at_what_is_named() -> None:
    tensors = [each for each in (1, 2, 4) if each != words(plan_at())[0]]
    for tensor, other in zip(tensors, explained(*(f"tensor={each}" for each in tensors)), strict=True):
        times = {sharding: time_of(plan_at(tensor, sharding)) for sharding in ("none", "optimizer")}
        assert other.time_ns == min(times.values())
        assert choice_of(other)[0] == tensor
        assert times[choice_of(other)[1]] == other.time_ns
        assert other.bound_ns <= other.time_ns


@pytest.mark.tier("nightly")
def test_next_is_the_best_of_the_other_degrees() -> None:
    our_tensor = words(plan_at())[0]
    others = {(t, s): time_of(plan_at(t, s)) for t in (1, 2, 4) if t != our_tensor for s in ("none", "optimizer")}
    (answer,) = explained("next")
    assert answer.time_ns == min(others.values())
    assert others[choice_of(answer)] == answer.time_ns
    assert explained("default")[0] == answer.model_copy(update={"question": "next"})
    assert explained("default", planner="even")[0].time_ns == answer.time_ns


def test_what_the_request_does_not_allow_is_compared_where_it_is_named() -> None:
    (answer,) = explained("sharding=parameters")
    at = {tensor: time_of(plan_at(tensor, "parameters")) for tensor in (1, 2, 4)}
    assert answer.time_ns == min(at.values())
    assert answer.choice.endswith(", parameters sharded")
    assert sum(each.theirs_ns for each in answer.differences) == answer.time_ns
    assert sum(each.ours_ns for each in answer.differences) == time_of(plan_at())


def test_default_says_nothing_where_the_request_leaves_nothing_open() -> None:
    only = plan_at(2, "none")
    assert penstock.explain(only, what_if=(), why_not=["default"]).why_not == ()
    (named,) = penstock.explain(only, what_if=(), why_not=["tensor=4"]).why_not
    assert choice_of(named) == (4, "none")


@pytest.mark.cases(2)
@pytest.mark.parametrize("choice", ["tensor=1", "next", "sharding=none"])
def test_parts_add_up_to_both_times(choice: str) -> None:
    (other,) = explained(choice)
    assert sum(each.theirs_ns for each in other.differences) == other.time_ns
    assert sum(each.ours_ns for each in other.differences) == time_of(plan_at())
    parts = {each.name: each for each in other.differences}
    for side, tensor in (("theirs_ns", choice_of(other)[0]), ("ours_ns", words(plan_at())[0])):
        communication = getattr(parts["tensor communication"], side) if "tensor communication" in parts else 0
        assert (communication > 0) == (tensor > 1)


@pytest.mark.tier("nightly")
def test_a_choice_that_does_not_fit_says_what_is_missing() -> None:
    cramped = cluster().model_dump(mode="json")
    for device in cramped["nodes"][0]["devices"]:
        device["memory_bytes"] = 40 * 2**30
    topology = ClusterTopology.parse(cramped)
    plan = penstock.plan("llama-3-8b", topology, global_batch_size=BATCH, planner="even", degrees={"tensor": 4}).file
    (other,) = penstock.explain(plan, what_if=(), why_not=["tensor=1,sharding=none"]).why_not
    assert (other.time_ns, other.turns, other.differences) == (None, (), ())
    assert "no plan was found at tensor 1, nothing sharded: " in other.sentence
    assert "are missing" in other.sentence


# ---- how wrong a number must be --------------------------------------------------------------------------------------


def judged_ns(file: PlanFile, profile: ModelProfile) -> int:
    """Return the plan's time by a profile that was changed as a document."""
    request = file.request.model_copy(update={"profile": profile})
    timeline = penstock.judge(PlanFile(plan=file.plan, request=request)).timeline
    assert timeline is not None
    return timeline.time_per_global_batch_ns


def with_layers(file: PlanFile, tensor: int | None, changed: Callable[[Any], Any]) -> ModelProfile:
    """Return the profile of a plan with changed costs at one tensor degree, or at all above 1."""
    profile = file.request.profile
    assert isinstance(profile, ModelProfile)

    def points(measurements: Any) -> Any:
        return tuple(m.model_copy(update={"layers": tuple(map(changed, m.layers))}) for m in measurements)

    if tensor == 1:
        return profile.model_copy(update={"measurements": points(profile.measurements)})
    variants = tuple(
        each.model_copy(update={"measurements": points(each.measurements)})
        if tensor in (None, each.degrees.tensor)
        else each
        for each in profile.variants or ()
    )
    return profile.model_copy(update={"variants": variants})


def computing(factor: Fraction) -> Callable[[Any], Any]:
    names = ("forward_ns", "backward_ns", "weight_ns")

    def changed(layer: Any) -> Any:
        return layer.model_copy(update={name: round(getattr(layer, name) * factor) for name in names})

    return changed


def communicating(factor: Fraction) -> Callable[[Any], Any]:
    """Return a change of a layer's collectives, and of the collectives of its modules."""

    def changed(layer: Any) -> Any:
        more = (
            each.model_copy(update={"bytes_per_sample": round(each.bytes_per_sample * factor)})
            for each in layer.collectives
        )
        update = {"collectives": tuple(more)}
        if modules := getattr(layer, "modules", None):
            update["modules"] = tuple(map(changed, modules))
        return layer.model_copy(update=update)

    return changed


def by_hand() -> Iterator[tuple[str, str | None, float, int, int]]:
    """Yield, for each factor of some comparisons, the differences of the times 1 % short of it and 1 % beyond it."""
    ours = plan_at()
    for other in explained("tensor=1", "next", "tensor=4,sharding=none"):
        theirs = plan_at(*choice_of(other))
        before = time_of(theirs) - time_of(ours)
        for turn in other.turns:
            if turn.factor is None:
                continue
            step = NEAR if turn.factor > 1 else 1 / NEAR
            differences = []
            for factor in (Fraction(turn.factor) / step, Fraction(turn.factor) * step):
                if turn.number == "collectives":
                    profile = with_layers(ours, None, communicating(factor))
                else:
                    assert turn.choice is not None
                    profile = with_layers(ours, int(turn.choice.split(",")[0].split()[1]), computing(factor))
                differences.append(judged_ns(theirs, profile) - judged_ns(ours, profile))
            sign = 1 if before > 0 else -1
            yield turn.number, turn.choice, turn.factor, sign * differences[0], sign * differences[1]


@pytest.mark.tier("nightly")
def test_the_order_turns_at_the_stated_factor() -> None:
    """One percent before it the order is the plan's, one percent beyond it is not."""
    seen = set()
    for number, choice, factor, short, beyond in by_hand():
        assert short > 0 > beyond, (number, choice, factor)
        seen.add((number, factor > 1))
    assert {("collectives", True), ("computation", True), ("computation", False)} <= seen


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "error", "message"),
    [
        ("tensor=3", UnsupportedRequest, "tensor 3 does not divide 32 attention heads; nearest: tensor 1, 2, 4"),
        ("tensor=8", UnsupportedRequest, "tensor 8 needs 8 GPUs in one node, but the largest node has 4"),
        ("tensor=0", UnsupportedRequest, "has no costs at tensor 0"),
        ("tensor", InvalidDocument, "'tensor' is not a choice of degrees"),
        ("tensor=2,tensor=4", InvalidDocument, "is not a choice of degrees"),
        ("sharding=some", InvalidDocument, "is not a choice of degrees"),
    ],
)
def test_what_names_no_other_choice_is_refused(choice: str, error: type[PenstockError], message: str) -> None:
    with pytest.raises(error) as caught:
        explained(choice)
    assert message in str(caught.value)


def test_the_plan_s_own_choice_is_refused() -> None:
    tensor, sharding = words(plan_at())
    for choice in (f"tensor={tensor}", f"sharding={sharding}", f"tensor={tensor},sharding={sharding}"):
        with pytest.raises(InvalidDocument, match=f"the plan already has .*: it is at tensor {tensor}"):
            explained(choice)
    with pytest.raises(InvalidDocument, match="allows no other choice than the plan's tensor 2, nothing sharded"):
        penstock.explain(plan_at(2, "none"), what_if=(), why_not=["next"])
    with pytest.raises(InvalidDocument, match="17 choices exceed the limit of 16"):
        explained(*["next"] * 17)


def test_a_profile_without_degrees_has_no_others() -> None:
    plan = penstock.plan("resnet-50", "1x4xV100", global_batch_size=8, planner="dp").file
    with pytest.raises(UnsupportedRequest, match="no costs at degrees above 1"):
        penstock.explain(plan, what_if=(), why_not=["tensor=2"])
    assert penstock.explain(plan, what_if=(), why_not=["default"]).why_not == ()

"""Coverage: inclusion against the plans themselves, the form in documents, the sentences, and what is refused."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.coverage import (
    CLASS_SCOPE,
    DOMAINS,
    EVERY_PLAN,
    FEATURES,
    NEUTRAL,
    REQUEST_SCOPE,
    SCHEDULE_SCOPE,
    Covers,
    Scope,
    claim,
    describe,
    model_of,
    ranges_of,
)
from penstock.schemas.errors import InvalidDocument
from penstock.schemas.plan import Certificate, Coverage, Plan

OPEN = {"trainer": ("none", "megatron"), "order": ("early-backward", "gpipe", "zb-h1")}


def subsets(values: tuple[str, ...]) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(values), min_size=1)


@st.composite
def classes(draw: st.DrawFn) -> Covers:
    """Draw a class that restricts some features, and leaves the others free, neutral or at random."""
    features: dict[str, Any] = {}
    for name in draw(st.sets(st.sampled_from(tuple(DOMAINS)))):
        features[name] = draw(subsets(DOMAINS[name]))
    for name, values in OPEN.items():
        features[name] = draw(st.none() | subsets(values))
    features["micro_batches"] = draw(st.none() | st.sets(st.integers(1, 6), min_size=1).map(ranges_of))
    return Covers(**features)


FEW = ("pipelines", "backward", "recompute", "update_rule")
"""Features that the plans of ``plans`` differ in, beside the open ones."""


def plans() -> list[Covers]:
    """Return one plan of each combination of values of a few features; all others have the neutral value."""
    closed = [[(name, frozenset({value})) for value in DOMAINS[name]] for name in FEW]
    free = [[(name, frozenset({value})) for value in values] for name, values in OPEN.items()]
    numbers = [[("micro_batches", ((number, number),)) for number in (1, 2, 4)]]
    return [Covers(**dict(chosen)) for chosen in product(*closed, *free, *numbers)]


PLANS = plans()


def members(covers: Covers) -> set[int]:
    """Return which plans belong to a class, feature by feature, without ``<=`` of classes."""
    numbers = set()
    for number, plan in enumerate(PLANS):
        closed = all(getattr(plan, name) <= getattr(covers, name) for name in DOMAINS)
        free = all(getattr(covers, name) is None or getattr(plan, name) <= getattr(covers, name) for name in OPEN)
        ((wanted, _same),) = plan.micro_batches or ((0, 0),)
        ranges = covers.micro_batches
        counted = ranges is None or any(first <= wanted <= last for first, last in ranges)
        if closed and free and counted:
            numbers.add(number)
    return numbers


@given(one=classes(), other=classes())
def test_a_class_within_another_has_no_plan_that_the_other_lacks(one: Covers, other: Covers) -> None:
    assert not one <= other or members(one) <= members(other)
    assert one <= one
    assert one <= EVERY_PLAN
    assert all(PLANS[number] <= one for number in members(one))


@pytest.mark.tier("nightly")
@given(one=classes(), two=classes(), three=classes())
def test_inclusion_is_transitive_and_of_equals_both_ways(one: Covers, two: Covers, three: Covers) -> None:
    assert not (one <= two and two <= three) or one <= three
    assert not (one <= two and two <= one) or describe(one) == describe(two)


def test_what_is_not_named_is_neutral() -> None:
    assert {name: set(getattr(NEUTRAL, name)) for name in DOMAINS} == {n: {v[0]} for n, v in DOMAINS.items()}
    split = Covers(backward=frozenset({"split"}))
    assert not split <= NEUTRAL
    assert NEUTRAL <= NEUTRAL
    assert not split >= NEUTRAL


@given(covers=classes())
def test_documents_give_back_the_class(covers: Covers) -> None:
    written = Coverage.of(covers).model_dump_json(exclude_none=True)
    assert Coverage.model_validate_json(written).covers() == covers
    neutral = [name for name in FEATURES if getattr(covers, name) == getattr(NEUTRAL, name)]
    assert not any(f'"{name}":' in written for name in neutral)


def test_sentences_begin_with_what_is_covered() -> None:
    wide = Covers(**{name: frozenset(DOMAINS[name]) for name in DOMAINS}, trainer=None, order=None, micro_batches=None)
    assert describe(wide) == ""
    assert claim(REQUEST_SCOPE, NEUTRAL) == "No plan of this request"
    one = Covers(order=None, micro_batches=((1, 8), (16, 16)), recompute=frozenset({"none", "stage"}))
    assert claim(CLASS_SCOPE, one) == (
        "No plan of one pipeline, one stage per device, replicas by rows, whole backwards, each stage recomputing "
        "whole or not at all, recomputation inside the backwards, nothing encoded, overlapped all-reduce, replicas "
        "in the order of the cluster, synchronous updates, 1–8, 16 micro-batches"
    )
    assert claim(SCHEDULE_SCOPE, Covers(backward=frozenset({"split"}))) == (
        "No order of this allocation's operations (split backwards)"
    )


@pytest.mark.tier("nightly")
@given(one=classes(), other=classes())
def test_two_classes_are_described_alike_only_where_plans_of_a_request_are_the_same(one: Covers, other: Covers) -> None:
    """``memory``, ``pins`` and a trainer's absence are not described; how to recompute only if some plan does."""
    silent = ("memory", "pins", "trainer", "recompute_runs", "recompute_modules")
    described = [name for name in FEATURES if name not in silent]
    if describe(one) == describe(other):
        assert all(getattr(one, name) == getattr(other, name) for name in described)


COVERS = {"order": "any", "micro_batches": [[1, 4]], "devices": ["one_stage", "several_stages"]}
MODEL = model_of(CLASS_SCOPE, Coverage(**COVERS).covers())
GOOD = {"scope": CLASS_SCOPE, "model": MODEL, "covers": COVERS, "bound_ns": 80, "gap": 0.25, "method": "by hand"}


def test_a_certificate_that_says_what_it_covers_is_taken() -> None:
    assert Certificate(**GOOD).model == MODEL


@pytest.mark.parametrize(
    ("change", "word"),
    [
        pytest.param({"model": "every plan of this request"}, "`covers` corresponds", id="another sentence"),
        pytest.param(
            {"covers": {**COVERS, "backward": ["whole", "split"]}}, "`covers` corresponds", id="wider than said"
        ),
        pytest.param({"scope": REQUEST_SCOPE}, "`covers` corresponds", id="another scope"),
        pytest.param({"covers": {"backward": ["sideways"]}}, "backward", id="an unknown value"),
        pytest.param({"covers": {"colour": ["red"]}}, "colour", id="an unknown feature"),
        pytest.param({"scope": "all plans of all requests"}, "scope", id="an unknown scope"),
    ],
)
def test_a_certificate_that_contradicts_itself_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=r"(?i)certificate") as refused:
        Certificate(**{**GOOD, **change})
    assert word in str(refused.value)


def plan_document(**changes: Any) -> dict[str, Any]:
    """Return a plan of one layer on one device, with one certificate."""
    use = {"busy_ns": 100, "communication_ns": 0, "idle_ns": 0, "peak_memory_bytes": 1, "memory_bytes": 2}
    memory = dict.fromkeys(
        ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace", "context"), 0
    )
    device = {"device": "d", **use, "memory": {f"{name}_bytes": size for name, size in memory.items()}}
    return {
        "request_hash": "sha256:" + "0" * 64,
        "planner": "by-hand",
        "global_batch_size": 1,
        "micro_batch_size": 1,
        "num_micro_batches": 1,
        "pipelines": [{"stages": [{"layers": [0, 0], "devices": ["d"]}], "micro_batches": [0, 0]}],
        "update_rule": "synchronous",
        "schedule": {"name": "gpipe", "rows": [{"devices": ["d"], "text": "F0 B0"}]},
        "prediction": {
            "time_per_global_batch_ns": 100,
            "fill_ns": 0,
            "drain_ns": 0,
            "bubble": 0.0,
            "peak_memory_bytes": 1,
            "devices": [device],
            "basis": "analytic",
            "expected_error": 0.1,
        },
        "certificates": [{**GOOD, **changes}],
    }


def test_a_bound_above_the_time_is_refused_with_its_field() -> None:
    assert Plan.parse(plan_document()).certificates[0].bound_ns == 80
    with pytest.raises(InvalidDocument, match="fault") as refused:
        Plan.parse(plan_document(bound_ns=101))
    assert "certificates/0/bound_ns is 101 ns, above" in refused.value.faults[0].detail
    with pytest.raises(InvalidDocument) as refused:
        Plan.parse(plan_document(covers={"backward": ["sideways"]}))
    assert refused.value.faults[0].pointer == "/certificates/0/covers/backward/0"


def test_a_certificate_says_what_it_covers() -> None:
    document = plan_document()
    del document["certificates"][0]["covers"]
    with pytest.raises(InvalidDocument) as refused:
        Plan.parse(document)
    assert [(fault.pointer, fault.code) for fault in refused.value.faults] == [("/certificates/0/covers", "missing")]


@pytest.mark.parametrize(
    ("scope", "covers", "words"),
    [
        ("all plans of this request", Covers(), "every plan of this request"),
        (
            "schedule of this allocation",
            Covers(update_rule=frozenset({"weight_stashing"}), backward=frozenset({"split"})),
            "this allocation, any order of its operations, as many micro-batches in flight, without a flush, "
            "split backwards",
        ),
        (
            "some plans of this request",
            Covers(micro_batches=((1, 8),), dispatch=frozenset({"rows", "round_robin"})),
            "plans of one pipeline, one stage per device, whole backwards, no recomputation, nothing encoded, "
            "overlapped all-reduce, replicas in the order of the cluster, synchronous updates, in the order "
            "early-backward, 1–8 micro-batches",
        ),
    ],
)
def test_stored_certificates_keep_their_words(scope: Scope, covers: Covers, words: str) -> None:
    """Plans are refused where ``model`` differs from what ``covers`` means, so the words never change."""
    assert model_of(scope, covers) == words

"""This checkout answers as it was recorded, by the rules of ``CHANGES.md``; one request in three is asked."""

from __future__ import annotations

from typing import get_args

import pytest
from answer_record import Record, answer_of
from exchange_list import EXCHANGES
from exchange_record import exchanged
from make_record import ANSWERS, read
from make_record import EXCHANGES as RECORDED_EXCHANGES
from record_comparison import CHANGES, MOST_NAMED, Changes, faults
from request_list import NAMES, request_of

from penstock.schemas.request import Target, UpdateRule
from penstock.solvers.planners.catalogue import PLANNERS

LARGE = ("auto-wide", "auto-wide-private", "auto-wide-rules")
"""Requests that worker processes solve, where they are allowed to."""
FIXED = Changes("moves", frozenset())


@pytest.fixture(scope="module")
def recorded() -> dict[str, Record]:
    """The committed answers."""
    return read(ANSWERS)


@pytest.fixture(scope="module")
def changes() -> Changes:
    """The phase that the checkout is in."""
    return Changes.read(CHANGES.read_text())


@pytest.mark.cases(4)
@pytest.mark.tier("ci")
@pytest.mark.parametrize("seed", range(len(NAMES)), ids=NAMES)
def test_a_request_is_answered_as_recorded(seed: int, recorded: dict[str, Record], changes: Changes) -> None:
    name = NAMES[seed]
    assert faults(changes, recorded, {name: answer_of(name, 1)}) == []


@pytest.mark.tier("nightly")
def test_two_workers_answer_as_one(
    recorded: dict[str, Record], changes: Changes, request: pytest.FixtureRequest
) -> None:
    names = LARGE if request.config.getoption("--tier") == "everything" else LARGE[:1]
    assert faults(changes, recorded, {name: answer_of(name, 2) for name in names}) == []


@pytest.mark.tier("ci")
def test_the_service_answers_as_recorded(tmp_path_factory: pytest.TempPathFactory, changes: Changes) -> None:
    answered = exchanged(tmp_path_factory.mktemp("recorded"))
    assert list(answered) == [each.name for each in EXCHANGES]
    assert faults(changes, read(RECORDED_EXCHANGES), answered) == []


@pytest.mark.tier("ci")
def test_the_record_is_of_everything_that_can_be_asked(recorded: dict[str, Record]) -> None:
    assert recorded.keys() == set(NAMES)
    assert len(NAMES) == 61
    assert len(read(RECORDED_EXCHANGES)) == 40
    requests = [request_of(name) for name in NAMES]
    assert {each.planner for each in requests} == set(PLANNERS)
    assert {rule for each in requests for rule in each.update_rules} == set(get_args(UpdateRule))
    assert {each.target for each in requests} == {None, *get_args(Target)}
    assert {(each.network.sharing, each.network.channel) for each in requests if each.network.sharing == "private"} == {
        ("private", channel) for channel in ("half", "full", "none")
    }
    assert {each.network.transfer for each in requests} == {"nic", "spp", "dapple", "madpipe"}
    assert {each.network.all_reduce for each in requests} == {"flat", "hierarchical", "dapple"}
    assert {each.recompute for each in requests} == {"never", "auto", "always"}
    for extra in ("pins", "codec"):
        assert sum(bool(getattr(each, extra)) for each in requests) >= 3, extra
    assert sum(bool(each.profile.shared_parameters) for each in requests if not isinstance(each.profile, str)) >= 3
    statuses = {each.get("status", "refused") for each in recorded.values()}
    assert statuses == {"optimal", "feasible", "infeasible", "refused"}
    assert all(each.termination.time_limit_ns is None and each.termination.max_plans for each in requests)


def test_no_more_changes_are_named_than_may_be(changes: Changes) -> None:
    names = {*NAMES, *(each.name for each in EXCHANGES)}
    assert changes.named <= names
    assert len(changes.named & set(NAMES)) <= MOST_NAMED
    assert not changes.named or changes.phase == "merges"


def answer(**more: object) -> Record:
    """Return an answer that is changed by the tests below."""
    bounds = [
        {"scope": "all plans of this request", "covers": {"order": "any"}, "bound_ns": 80, "method": "load"},
        {"scope": "schedule of this allocation", "covers": {"order": None}, "bound_ns": 90, "method": "work"},
    ]
    plan = {"planner": "gpipe", "digest": "0", "prediction": {"time_per_global_batch_ns": 100}}
    return {"request_hash": "r", "status": "feasible", "why": ["so"], "plan": plan, "certificates": bounds, **more}


def taking(time_ns: int) -> Record:
    """Return a plan of another planner."""
    return {"planner": "spp", "digest": "1", "prediction": {"time_per_global_batch_ns": time_ns}}


def with_bounds(*bounds_ns: int) -> list[Record]:
    """Return the certificates with other bounds."""
    old = answer()["certificates"]
    return [{**each, "bound_ns": bound} for each, bound in zip(old, bounds_ns, strict=False)]


@pytest.mark.parametrize(
    ("phase", "change", "fault"),
    [
        pytest.param("moves", {}, None, id="nothing-changed"),
        pytest.param("moves", {"why": ["because"]}, "why/0: so -> because", id="moves-change-no-word"),
        pytest.param("words", {"why": ["because"]}, None, id="words"),
        pytest.param("words", {"plan": taking(100)}, "plan/planner: gpipe -> spp", id="names-are-no-words"),
        pytest.param("merges", {"plan": taking(99)}, None, id="a-faster-plan"),
        pytest.param("merges", {"plan": taking(101)}, "takes longer", id="a-slower-plan"),
        pytest.param("merges", {"plan": None}, "there is no plan", id="a-lost-plan"),
        pytest.param("merges", {"request_hash": "s"}, "the request is another one", id="another-request"),
        pytest.param("merges", {"certificates": with_bounds(85, 90)}, None, id="a-larger-bound"),
        pytest.param("merges", {"certificates": with_bounds(79, 90)}, "80 -> 79", id="a-smaller-bound"),
        pytest.param("merges", {"certificates": with_bounds(80, 89)}, "90 -> 89", id="of-the-same-plan"),
        pytest.param("merges", {"certificates": with_bounds(80)}, "no bound on schedule", id="a-lost-bound"),
        pytest.param("merges", {"certificates": [], "plan": taking(99)}, "no bound on all plans", id="the-only-bound"),
        pytest.param("merges", {"certificates": with_bounds(80, 1), "plan": taking(99)}, None, id="of-another-plan"),
    ],
)
def test_what_each_phase_allows(phase: str, change: Record, fault: str | None) -> None:
    changes = Changes.read(f"Phase: {phase}\n- `this`: a reason\n")
    sentences = faults(changes, {"this": answer()}, {"this": answer(**change)})
    assert bool(sentences) == (fault is not None)
    assert fault is None or any(fault in each for each in sentences)


def test_merges_change_nothing_that_is_not_named() -> None:
    changes = Changes.read("Phase: merges\n- `that`: a reason\n")
    sentences = faults(changes, {"this": answer()}, {"this": answer(plan=taking(99))})
    assert any("gpipe -> spp" in each for each in sentences)


@pytest.mark.parametrize(
    ("old", "new", "lost"),
    [("optimal", "feasible", True), ("infeasible", "none_found", True), ("feasible", "optimal", False)],
)
def test_what_was_proven_stays_proven(old: str, new: str, lost: bool) -> None:
    changes = Changes("merges", frozenset({"this"}))
    assert bool(faults(changes, {"this": answer(status=old)}, {"this": answer(status=new)})) is lost


def test_an_exchange_that_is_named_keeps_its_status() -> None:
    changes = Changes("merges", frozenset({"this"}))
    old, new = ({"status": status, "body": {"a": status}} for status in (200, 500))
    assert faults(changes, {"this": old}, {"this": new}) == ["this: status 200 -> 500"]
    assert faults(changes, {"this": old}, {"this": {**old, "body": {}}}) == []


def test_other_types_missing_fields_and_lengths_are_differences() -> None:
    old = {"a": 1, "b": [1, 2], "c": 3}
    for new in ({**old, "a": True}, {**old, "b": [1]}, {"a": 1, "b": [1, 2]}, {**old, "d": 1}):
        assert len(faults(FIXED, {"this": old}, {"this": new})) == 1, new
    assert faults(FIXED, {"this": old}, {"this": {**old, "d": None}}) == []


def test_a_record_without_a_phase_is_refused() -> None:
    for text in ("", "Phase: stays\n", "Phase: moves\nPhase: words\n"):
        with pytest.raises(ValueError, match="one line"):
            Changes.read(text)

"""Periodic plans and several pipelines as documents: out, back in, judged, and refused where they cannot run."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.convert import from_plan, to_plan, to_problem
from penstock.planning.judge import judge
from penstock.planning.programs.lower import programs
from penstock.schemas.errors import InvalidPlan, UnsupportedRequest
from penstock.schemas.plan import Plan, PlanFile
from penstock.schemas.program import BACKWARD, FORWARD, INPUT, WEIGHT, Program
from penstock.schemas.request import PlanRequest
from penstock.solvers.bounds.schedule_bound import request_bound, schedule_bound
from penstock.solvers.judge.shared_processor import parallel_pipelines
from penstock.solvers.judge.simulate import simulate
from penstock.solvers.lowering import check_programs
from penstock.solvers.model.allocation import Allocation, Pipeline, Stage, single_pipeline
from penstock.solvers.model.problem import Problem
from penstock.solvers.model.result import JudgedPlan
from penstock.solvers.model.schedule import Orders, Pattern, PatternOperation, Row
from penstock.solvers.model.update_rules import UpdateRule
from penstock.solvers.schedules.chimera import chimera

EVERY_RULE = ["synchronous", "weight_stashing", "double_buffered", "double_grouped", "elastic_averaging"]


def _request() -> PlanRequest:
    """Build a request of four layers on four devices, with eight samples in a global batch."""
    layer = {"forward_ns": 1000, "backward_ns": 2100, "stash_bytes": 8}
    cut = [{"name": "x", "bytes_per_sample": 4, "gradient_bytes_per_sample": 2}]
    profile = {
        "name": "four",
        "layers": [{"name": f"l{i}", "parameter_bytes": 100, "update_ns": 30} for i in range(4)],
        "boundaries": [cut] * 3,
        "measurements": [{"device_kind": "V100", "micro_batch_size": 2, "layers": [layer] * 4}],
        "source": {"method": "imported", "expected_error": 0.1},
    }
    topology = {
        "name": "small",
        "uniform": {
            "nodes": 1,
            "devices_per_node": 4,
            "kind": "V100",
            "memory_bytes": 10**6,
            "fabric": {"bandwidth_bytes_per_s": 10**9},
        },
    }
    return PlanRequest.parse(
        {"profile": profile, "topology": topology, "global_batch_size": 8, "update_rules": EVERY_RULE}
    )


@pytest.fixture
def request_document() -> PlanRequest:
    return _request()


def _pattern(stages: int, split: bool = False) -> Pattern:
    """Build a pattern of two micro-batches per period, with the second one's operations right behind the first's."""
    operations = []
    for j in (0, 1):
        for s in range(stages):
            operations.append(PatternOperation(FORWARD, s, 10 * s + j, 0, j))
            back = 10 * (2 * stages - s) + 2 * j
            operations.append(PatternOperation(INPUT if split else BACKWARD, s, back, 0, j))
            if split:
                operations.append(PatternOperation(WEIGHT, s, back + 1, 0, j))
    return Pattern("pairs", 20 * stages + 10, 2, tuple(operations))


def _straight(*devices: tuple[int, ...]) -> tuple[Stage, ...]:
    width = 4 // len(devices)
    return tuple(Stage(s * width, (s + 1) * width - 1, group) for s, group in enumerate(devices))


def _two_pipelines() -> Allocation:
    unlike = (Stage(0, 0, (2,)), Stage(1, 3, (3,)))
    return Allocation((Pipeline(_straight((0,), (1,)), (0, 4)), Pipeline(unlike, (5, 7))), 8)


def _both_ways() -> Allocation:
    """Build two groups of two devices with two pipelines in each direction over them, as Chimera's."""
    down, up = _straight((0, 2), (1, 3)), _straight((1, 3), (0, 2))
    return Allocation(tuple(Pipeline((down, up)[q % 2], (2 * q, 2 * q + 1)) for q in range(4)), 8)


def _flushed(allocation: Allocation) -> Orders:
    """Order all forwards, then all backwards, in a row for each stage."""
    rows = []
    for s, stage in enumerate(allocation.stages):
        batches = allocation.micro_batches(s)
        operations = [(kind, s, m) for kind in (FORWARD, BACKWARD) for m in batches]
        rows.append(Row(stage.devices, np.asarray(operations, dtype=np.int32)))
    return Orders("gpipe", tuple(rows))


PLANS: dict[str, tuple[UpdateRule, Allocation, Orders | Pattern]] = {
    "weight stashing": ("weight_stashing", single_pipeline(_straight((0, 1), (2, 3)), 4), _pattern(2)),
    "double buffered": ("double_buffered", single_pipeline(_straight((0,), (1,), (2,), (3,)), 4), _pattern(4)),
    "split backwards": ("double_buffered", single_pipeline(_straight((0,), (1,)), 4), _pattern(2, split=True)),
    "double grouped": ("double_grouped", single_pipeline(_straight((0,), (1,), (0,), (1,)), 2), _pattern(4)),
    "several pipelines": ("synchronous", _two_pipelines(), _flushed(_two_pipelines())),
    "both ways": ("synchronous", _both_ways(), chimera(to_problem(_request()), _both_ways())),
    "pipelines on shared devices": (
        "elastic_averaging",
        parallel_pipelines(_straight((0,), (1,)), 3, 4),
        _flushed(parallel_pipelines(_straight((0,), (1,)), 3, 4)),
    ),
}


def _candidate(problem: Problem, name: str) -> JudgedPlan:
    rule, allocation, schedule = PLANS[name]
    timeline = simulate(problem, allocation, schedule, update_rule=rule)
    return JudgedPlan.of("by-hand", allocation, schedule, timeline, True, rule)


def _document(request: PlanRequest, name: str) -> PlanFile:
    problem = to_problem(request)
    best = _candidate(problem, name)
    bounds = (request_bound(problem), schedule_bound(problem, best.allocation, best.schedule, best.update_rule))
    plan = to_plan(problem, request, best, bounds)
    return PlanFile(plan=Plan.parse_json(plan.canonical_json()), request=request)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_comes_back_as_it_was(request_document: PlanRequest, name: str) -> None:
    file = _document(request_document, name)
    rule, allocation, schedule = PLANS[name]
    assert file.plan.update_rule == rule
    back, orders = from_plan(file.plan, to_problem(request_document))
    assert back == allocation
    if isinstance(schedule, Pattern):
        assert orders == schedule
        return
    assert isinstance(orders, Orders)
    rows = {(row.devices, row.operations.tobytes()) for row in orders.rows}
    assert rows == {(row.devices, row.operations.tobytes()) for row in schedule.rows}


@pytest.mark.parametrize("name", PLANS)
def test_the_judge_agrees_with_the_document(request_document: PlanRequest, name: str) -> None:
    file = _document(request_document, name)
    judgement = judge(file)
    assert judgement.faults == ()
    assert judgement.plan.prediction == file.plan.prediction
    total = file.plan.prediction.time_per_global_batch_ns
    for use in file.plan.prediction.devices:
        assert use.busy_ns + use.communication_ns + use.idle_ns == total
    assert file.plan.certificates
    assert all(certificate.bound_ns <= total for certificate in file.plan.certificates)


def test_weight_versions_stand_in_the_prediction(request_document: PlanRequest) -> None:
    """Two copies of one layer's 100 bytes; of a group without delay one."""
    versions = {
        name: [use.memory.versions_bytes for use in _document(request_document, name).plan.prediction.devices]
        for name in ("double buffered", "double grouped", "several pipelines", "both ways")
    }
    none = {"several pipelines": [0] * 4, "both ways": [0] * 4}
    assert versions == {"double buffered": [100] * 4, "double grouped": [100] * 2} | none


@pytest.mark.parametrize("name", [name for name in PLANS if name != "both ways"])
def test_every_plan_becomes_programs(request_document: PlanRequest, name: str) -> None:
    file = _document(request_document, name)
    batches = 1 if file.plan.schedule.pattern is None else 30
    lowered = programs(file, batches=batches)
    check_programs([Program.from_json(program.to_json()) for program in lowered])
    assert {(program.update_rule, program.batches) for program in lowered} == {(file.plan.update_rule, batches)}
    assert [program.device for program in lowered] == sorted(program.device for program in lowered)
    with pytest.raises(UnsupportedRequest, match="0 global batches"):
        programs(file, batches=0)


def test_a_replica_without_a_row_is_refused(request_document: PlanRequest) -> None:
    with pytest.raises(InvalidPlan, match="some would get no row"):
        programs(_document(request_document, "both ways"))


def test_a_rule_that_the_request_does_not_allow_is_said(request_document: PlanRequest) -> None:
    file = _document(request_document, "double buffered")
    strict = request_document.model_copy(update={"update_rules": ("synchronous",)})
    plan = file.plan.model_copy(update={"request_hash": strict.content_hash()})
    assert judge(PlanFile(plan=plan, request=strict)).faults == (
        "The plan has double_buffered updates; the request allows synchronous.",
    )


def test_a_broken_pin_is_said(request_document: PlanRequest) -> None:
    file = _document(request_document, "double buffered")
    pinned = PlanRequest.parse(
        request_document.model_dump(mode="json") | {"pins": [{"layers": [0, 0], "devices": ["node0/3"]}]}
    )
    plan = file.plan.model_copy(update={"request_hash": pinned.content_hash()})
    broken, *uncovered = judge(PlanFile(plan=plan, request=pinned)).faults
    assert broken == "The plan breaks a pin: layers 0–0 are pinned to node0/3, but are held by node0/0."
    assert len(uncovered) == len(plan.certificates)
    assert all("does not cover the plan" in each for each in uncovered)


def test_a_pattern_under_a_rule_with_a_flush_is_one_sentence(request_document: PlanRequest) -> None:
    file = _document(request_document, "double buffered")
    plan = file.plan.model_copy(update={"update_rule": "synchronous"})
    assert judge(PlanFile(plan=plan, request=request_document)).faults == (
        "Schedule pairs is periodic: it has no flush, which synchronous updates need.",
    )


@pytest.mark.parametrize(
    ("operation", "shift", "word"),
    [
        pytest.param("7F0", 0, "names stage 7 of 4", id="no such stage"),
        pytest.param("0F2", 0, "works on micro-batch 2 of 2", id="no such micro-batch"),
        pytest.param("0F0", 2**52, "overlaps too many periods", id="a shift that no machine could unroll"),
    ],
)
def test_a_bad_pattern_is_one_sentence(request_document: PlanRequest, operation: str, shift: int, word: str) -> None:
    file = _document(request_document, "double buffered")
    pattern = file.plan.schedule.pattern
    odd = pattern.operations[0].model_copy(update={"operation": operation, "shift": shift})
    schedule = file.plan.schedule.model_copy(
        update={"pattern": pattern.model_copy(update={"operations": (odd, *pattern.operations[1:])})}
    )
    faults = judge(PlanFile(plan=file.plan.model_copy(update={"schedule": schedule}), request=request_document)).faults
    assert len(faults) == 1
    assert word in faults[0]


def test_a_row_that_mixes_pipelines_on_shared_devices_is_one_sentence(request_document: PlanRequest) -> None:
    problem = to_problem(request_document)
    rule, allocation, orders = PLANS["pipelines on shared devices"]
    assert isinstance(orders, Orders)
    file = _document(request_document, "pipelines on shared devices")
    rows = file.plan.schedule.rows
    mixed = (rows[0].model_copy(update={"text": rows[0].text + " " + rows[2].text}), *rows[1:2], *rows[3:])
    plan = file.plan.model_copy(update={"schedule": file.plan.schedule.model_copy(update={"rows": mixed})})
    assert judge(PlanFile(plan=plan, request=request_document)).faults[0].startswith("Row 0 mixes pipelines")
    assert len(orders.rows) == 6
    assert {type(row) for row in orders.rows} == {Row}
    assert simulate(problem, allocation, orders, update_rule=rule).rounds == 3
